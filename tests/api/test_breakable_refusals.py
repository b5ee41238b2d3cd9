"""What ``BreakableCUDAGraph`` cannot capture, or cannot take, is said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dsa_compile import BreakableCUDAGraph, CaptureError, ConfigError, InputError
from dsa_compile.capture import export_graph
from dsa_compile.passes.pipeline import run_pipeline

from .test_breakable import BATCH, Put, Recorder


class Largest(nn.Module):
    """Multiplies the rows by a number that the host reads."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        number = counts.max().item()
        torch._check(number >= 0)
        return x * number


class Places(nn.Module):
    """Adds places whose number depends on data."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return x + counts.nonzero().sum()


@pytest.mark.parametrize(
    ("model", "op"), [(Largest(), "_local_scalar_dense"), (Places(), "nonzero")]
)
def test_what_the_host_reads_is_refused(model: nn.Module, op: str) -> None:
    given = torch.randn(4, 5), torch.tensor([1, 0, 3])
    graph = run_pipeline(export_graph(model, given, dynamic=True)).graph_module
    with pytest.raises(CaptureError, match=f"aten::{op}.default gives a number or a size"):
        BreakableCUDAGraph(graph, [4], rows=BATCH, capture=Recorder())


X, PLACES, TABLE = torch.randn(3, 5), torch.tensor([4, 0, 2]), torch.zeros(6, 5)
ROWS = {0: 0, 1: 0}


@pytest.fixture(scope="module")
def put() -> fx.GraphModule:
    return export_graph(Put(), (X, PLACES, TABLE), dynamic=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph_module": Put()}, "graph_module must be a GraphModule, got Put"),
        ({"buckets": None}, "buckets must be a sequence of numbers of rows, got None"),
        ({"buckets": 4}, "buckets must be a sequence"),
        ({"rows": [0]}, r"rows must map positions of inputs to dims, got \[0\]"),
        ({"rows": {"x": 0}}, "rows must map positions"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    put: fx.GraphModule, arguments: dict[str, Any], message: str
) -> None:
    given = {"graph_module": put, "buckets": [4], "rows": ROWS, "capture": Recorder()}
    with pytest.raises(ConfigError, match=message):
        BreakableCUDAGraph(**{**given, **arguments})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X, PLACES), "3 inputs are needed, got 2"),
        ((None, PLACES, TABLE), "input 0 must be torch.float32 .*, got None"),
        ((X[0], PLACES, TABLE), r"input 0 must be .* got torch.float32 \(5\) on cpu"),
        ((X.double(), PLACES, TABLE), "input 0 must be .* got torch.float64"),
        ((X, PLACES, TABLE.half()), r"input 2 must be torch.float32 \(.*, 5\) on cpu"),
        ((X, PLACES, TABLE[0]), r"input 2 must be .* got torch.float32 \(5\) on cpu"),
        ((X, PLACES.to("meta"), TABLE), "input 1 must be .* got torch.int64 .* on meta"),
    ],
)
def test_inputs_of_another_kind_are_named_at_the_first_call(
    put: fx.GraphModule, given: tuple[Any, ...], message: str
) -> None:
    recorder = Recorder()
    run = BreakableCUDAGraph(put, [4], rows=ROWS, capture=recorder)
    with pytest.raises(InputError, match=message):
        run(*given)
    assert not recorder.warmed


def test_results_go_into_tensors_on_their_device(put: fx.GraphModule) -> None:
    run = BreakableCUDAGraph(put, [4], rows=ROWS, capture=Recorder())
    with pytest.raises(InputError, match=r"out\[0\] must be a tensor or None, got 5"):
        run(X, PLACES, TABLE, out=[5, None])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"out\[0\] is .* on meta and the result is .* on cpu"):
        run(X, PLACES, TABLE, out=[X.to("meta"), None])
