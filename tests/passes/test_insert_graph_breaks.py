"""Marks say which calls no CUDA graph may capture, and why; nothing else changes."""

import torch
from pass_models import TwoLevel, captured, hidden
from torch import Tensor, nn

from dsa_compile.passes import insert_graph_breaks
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.insert_graph_breaks import MARK, op_label
from dsa_compile.passes.pipeline import run_pipeline


def marks(graph_module: torch.fx.GraphModule) -> dict[str, str]:
    return {op_label(n): n.meta[MARK] for n in graph_module.graph.nodes if MARK in n.meta}


def test_named_ops_are_marked_by_op_or_by_overload() -> None:
    graph_module = captured(TwoLevel(), hidden())
    before = graph_module.code
    context = PassContext(uncapturable={"aten::topk": "one", "aten::relu.default": "two"})
    assert insert_graph_breaks.run(graph_module, context).changed
    assert marks(graph_module) == {"aten::topk.default": "one", "aten::relu.default": "two"}
    assert context.recorder.breaks == marks(graph_module) and graph_module.code == before
    other = PassContext(uncapturable={"aten::relu.out": "another overload"})
    graph_module = captured(TwoLevel(), hidden())
    assert not insert_graph_breaks.run(graph_module, other).changed


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x)


class Tagged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.break_test.read(x)


def test_ops_that_pytorch_knows_of_are_marked() -> None:
    x = torch.tensor([0.0, 1.0])
    graph_module = captured(Counts(), x)
    insert_graph_breaks.run(graph_module, PassContext())
    assert "aten::nonzero.default" in marks(graph_module)

    library = torch.library.Library("break_test", "DEF")
    library.define("read(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("read", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("break_test::read", torch.empty_like, lib=library)
    graph_module = captured(Tagged(), x)
    insert_graph_breaks.run(graph_module, PassContext())
    assert marks(graph_module) == {
        "break_test::read.default": "its author tags it cudagraph_unsafe"
    }


class Indexed(nn.Module):
    def forward(self, x: Tensor, at: Tensor, flags: Tensor) -> Tensor:
        zero = torch.zeros(())
        return x.index_put((at,), zero) + x.index_put((flags,), zero) + x.index_put((at,), zero)


def test_what_an_op_is_given_decides_for_each_call() -> None:
    x = torch.ones(4)
    graph_module = captured(Indexed(), x, torch.tensor([1]), x > 0)
    insert_graph_breaks.run(graph_module, PassContext())
    puts = [n for n in graph_module.graph.nodes if op_label(n) == "aten::index_put.default"]
    assert [MARK in n.meta for n in puts] == [False, True, False]


def test_the_pipeline_marks_the_rewritten_graph() -> None:
    result = run_pipeline(
        captured(TwoLevel(), hidden()), uncapturable={"dsa_cpu::candidate_expand": "why"}
    )
    assert result.breaks == {"dsa_cpu::candidate_expand.default": "why"}
    assert run_pipeline(captured(TwoLevel(), hidden())).breaks == {}
