"""Ops of several results that no CUDA graph may capture, for Inductor's graph partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import dsa_compile
import dsa_compile.kernels  # noqa: F401 (registers the op)
from dsa_compile.inductor_lowering import UNCAPTURED, register_tagged, tag_uncapturable

from .models import TwoLevel, assert_same, inputs

NAMED = "dsa_cpu::candidate_expand"


def targets(graph: fx.Graph) -> list[str]:
    return [n.target.name() for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def traced() -> fx.Graph:
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    sizes = {"num_positions": 64, "block_size": 8, "sparse_block": 8}
    expanded = graph.call_function(torch.ops.dsa_cpu.candidate_expand.default, (ids,), dict(sizes))
    parts = [graph.call_function(lambda pair, n: pair[n], (expanded, n)) for n in range(2)]
    graph.call_function(torch.ops.aten.relu.default, (ids,))
    graph.output(tuple(parts))
    return graph


@pytest.mark.parametrize("name", [NAMED, "dsa_cpu::candidate_expand.default"])
def test_a_tagged_op_stands_for_a_named_one_of_several_results(name: str) -> None:
    graph = traced()
    before = targets(graph)
    tag_uncapturable(graph, ["other::op", "aten::relu"])
    assert targets(graph) == before
    tag_uncapturable(graph, [name])
    assert targets(graph) == [f"{UNCAPTURED}::dsa_cpu_candidate_expand", "aten::relu"]
    (call,) = [n for n in graph.nodes if UNCAPTURED in str(n.target)]
    assert torch.Tag.cudagraph_unsafe in call.target.tags
    again = traced()
    tag_uncapturable(again, [NAMED])
    assert targets(again) == targets(graph)


def test_it_means_the_same() -> None:
    register_tagged([NAMED, "no_such::op", "aten::relu"])
    op: Any = torch.ops.dsa_uncaptured.dsa_cpu_candidate_expand.default
    ids = torch.tensor([[[5, -1, 2]]])
    sizes = {"num_positions": 61, "block_size": 8, "sparse_block": 4}
    got, expected = op(ids, **sizes), torch.ops.dsa_cpu.candidate_expand(ids, **sizes)
    assert all(map(torch.equal, got, expected))
    torch.library.opcheck(op, (ids,), sizes)
    assert (
        str(op._schema).partition("(")[2]
        == str(torch.ops.dsa_cpu.candidate_expand.default._schema).partition("(")[2]
    )


@torch.no_grad()
def test_the_backend_uses_it() -> None:
    model, x = TwoLevel().eval(), inputs()
    run = torch.compile(model, backend="dsa", options={"uncapturable": (NAMED,)})
    assert_same(run(x), model(x))
    (note,) = dsa_compile.compiled_report(model).notes
    assert note.startswith(f"a CUDA graph is interrupted around {NAMED}")
