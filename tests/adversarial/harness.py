"""Models that invite a wrong rewrite, and the one property that all of them are held to.

Whatever the pipeline decides about a model, the graph it returns computes what the given graph
computed, on inputs other than those it was captured with too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

NEG, POS = -math.inf, math.inf
# Twelve heads: a score of exactly zero (all relus off) needs 2^-12, so picks have no ties.
HEADS, DIM, WIDTH = 12, 8, 16
Model = Callable[..., Any]


def numbers(seed: int = 0) -> Callable[..., Tensor]:
    """Standard normal tensors, one after the other, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def hidden_states(batch: int = 2, rows: int = 20, seed: int = 0) -> Tensor:
    return numbers(seed)(batch, rows, WIDTH)


def operands(batch: int = 2, rows: int = 6, keys: int = 20, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key and head weights of one indexer."""
    draw = numbers(seed)
    return draw(batch, rows, HEADS, DIM), draw(batch, keys, DIM), draw(batch, rows, HEADS)


def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    products = torch.einsum("bshd,btd->bsht", query, key).relu()
    return (products * weights[..., None]).sum(2)


def picks(logits: Tensor, k: int = 4) -> tuple[Tensor, Tensor]:
    """Selected scores, and positions with -1 where nothing was found."""
    values, indices = logits.topk(min(k, logits.shape[-1]))
    return values, indices.masked_fill(values == NEG, -1)


class Layers(nn.Module):
    """Projections of two indexer layers over shared keys; sub-classes spell ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        draw = numbers(7)

        def weight(outputs: int) -> nn.Parameter:
            return nn.Parameter(draw(outputs, WIDTH) * WIDTH**-0.5)

        self.queries = nn.ParameterList([weight(HEADS * DIM), weight(HEADS * DIM)])
        self.weights = nn.ParameterList([weight(HEADS), weight(HEADS)])
        self.key = weight(DIM)

    def raw(self, x: Tensor, layer: int = 0) -> Tensor:
        """Unmasked scores of a layer, ``[batch, rows, rows]``."""
        query = nn.functional.linear(x, self.queries[layer]).unflatten(-1, (HEADS, DIM))
        key = nn.functional.linear(x, self.key)
        return scores(query, key, nn.functional.linear(x, self.weights[layer]))

    def causal(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        return position[None] <= position[:, None]


class Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass
class Case:
    """A model, what it is captured with, and what it must also be right for.

    ``states`` are changes of the model's own parameters and buffers after the rewrite.
    """

    model: nn.Module | Model
    inputs: tuple[Any, ...]
    others: Sequence[tuple[Any, ...]] = ()
    dynamic: tuple[tuple[int, ...], ...] | None = None
    states: Sequence[Callable[[nn.Module], None]] = ()
    tolerance: float = 1e-4
    statuses: frozenset[str] = field(default_factory=frozenset)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(case: Case) -> PipelineResult:
    """Run the pipeline over a case and hold its result to the property."""
    model = case.model if isinstance(case.model, nn.Module) else Function(case.model)
    shapes: Any = None
    if case.dynamic is not None:
        shapes = tuple({d: Dim.AUTO for d in dims} for dims in case.dynamic)
        if not isinstance(case.model, nn.Module):
            shapes = (shapes,)
    program = torch.export.export(model.eval(), case.inputs, dynamic_shapes=shapes)
    graph_module = program.run_decompositions({}).module(check_guards=False)
    result = run_pipeline(graph_module, provider="reference")  # type: ignore[arg-type]
    with torch.no_grad():
        for inputs in (case.inputs, *case.others):
            want = graph_module(*inputs)
            assert_same(result.graph_module(*inputs), want, case.tolerance)
        for change in case.states:
            change(model)
            want = graph_module(*case.inputs)
            assert_same(result.graph_module(*case.inputs), want, case.tolerance)
    if case.statuses:
        assert {s.status for s in result.sites} == case.statuses, result.sites
    return result


__all__ = [
    "Case",
    "DIM",
    "Function",
    "HEADS",
    "Layers",
    "NEG",
    "POS",
    "WIDTH",
    "assert_same",
    "check",
    "hidden_states",
    "numbers",
    "operands",
    "picks",
    "scores",
]
