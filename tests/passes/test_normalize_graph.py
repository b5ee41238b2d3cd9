"""What the normalised graph must not hold, and that the user's ops stay as they are."""

import torch
from pass_models import TwoLevel, captured, hidden
from torch import Tensor, nn

from dsa_compile.passes import normalize_graph
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.graph_tools import op_name


def test_fills_do_not_keep_the_tensor_whose_shape_they_copy() -> None:
    graph_module = captured(TwoLevel(), hidden(), dynamic=True)
    result = normalize_graph.run(graph_module, PassContext()).graph_module
    names = {op_name(n) for n in result.graph.nodes}
    assert not names & {"zeros_like", "full_like", "_assert_tensor_metadata"}
    assert "full" in names


def test_sizes_are_read_off_the_earliest_tensor() -> None:
    graph_module = captured(TwoLevel(), hidden(), dynamic=True)
    result = normalize_graph.run(graph_module, PassContext()).graph_module
    sources = {n.args[0].op for n in result.graph.nodes if op_name(n) == "sym_size"}
    assert sources <= {"placeholder"}


def test_a_model_without_an_indexer_keeps_its_numbers() -> None:
    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 2.0

    x = torch.arange(4)
    graph_module = captured(Numbers(), x)
    result = normalize_graph.run(graph_module, PassContext()).graph_module
    result.recompile()
    first, second = result(x)
    assert first.dtype == torch.int64 and second.dtype == torch.float32
