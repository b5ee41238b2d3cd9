"""Prove that an emitted fused op gives a scorer what the model's own ops give it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.fused_q_reference import hadamard_transform
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.compare_query import queries_differ, weights_differ
from dsa_compile.passes.emit_query import FusedQuery
from dsa_compile.passes.fit_query import QueryForm, Values
from dsa_compile.passes.graph_tools import dtype_of, is_float, is_size, is_tensor, value
from dsa_compile.passes.run_probe import ProbeError, evaluate, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_query import QueryTrace

_LENGTHS = (40, 7, 2, 1, 0)


class QueryProver:
    """Makes draws for a stretch and compares what it and the fused op give.

    Draws are ordinary numbers; rows that differ by many orders of magnitude, down to nothing; what
    is quantised of many sizes within a row, which tells scales of parts of a row; queries of one
    dim alone, each in turn, so that no entry of a transform can hide behind the others; rows that
    hold a NaN or an infinity; and head weights of many sizes, and some that are no numbers, so
    that nothing which bounds or replaces them can hide.
    """

    def __init__(self, trace: QueryTrace, binding: Binding, seed: int) -> None:
        self.trace, self.binding = trace, binding
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = binding.shape(trace.query)
        self.hadamard = False

    def draw(self, kind: str, turn: int = 0) -> Values:
        """Values of everything that the stretch and the fused op's arguments depend on.

        Raises:
            Refusal: the stretch cannot be run on any of the draws.
        """
        given = self._roots(kind, turn)
        failure: ProbeError | None = None
        # Integers may be positions, or indices into something short.
        for high in _LENGTHS:
            env = {n: given[n] if n in given else self._leaf(n, high) for n in self._leaves()}
            try:
                nodes = needed([self.trace.query, self.trace.weights, *self.trace.sides], env)
                values = evaluate(nodes, env, self.binding)
            except ProbeError as error:
                failure = error
                continue
            return values
        raise Refusal(f"the probe of its query side cannot be run: {failure}", 6)

    def check(self, fused: FusedQuery, form: QueryForm, draws: int) -> None:
        """Compare under all kinds of draws.

        Raises:
            Refusal: queries or weights differ; carries the counterexample.
        """
        self.hadamard = form.hadamard
        for kind, turn in self._kinds(draws):
            env = self.draw(kind, turn)
            values = evaluate(needed([fused.op], env), env, self.binding)
            queries, scales, weights = values[fused.op][:3]
            quant, codes = form.quant, form.codes
            _, why = queries_differ(values[self.trace.query], queries, scales, quant, codes=codes)
            if not why:
                wide = weights
                if quant == "fp8" and not codes:
                    # The model has this scale in its queries.
                    own = values[self.trace.weights].reshape(weights.shape).to(weights.dtype)
                    # In a row that holds no number it is none, and neither are the scores.
                    wide = torch.where(scales.isfinite(), weights / scales, own)
                why = weights_differ(values[self.trace.weights], wide)
            if why:
                raise Refusal("the fused query op is not what it computes", 9, f"{why} ({kind})")

    def _kinds(self, draws: int) -> Iterator[tuple[str, int]]:
        rows = self.shape[0] * self.shape[1] * self.shape[2]
        for turn in range(draws):
            yield "ordinary numbers", turn
        for turn in range(-(-self.shape[3] // max(1, rows))):
            yield "one dim alone", turn
        yield "many orders of magnitude", 0
        yield "dims of many sizes", 0
        yield "no numbers", 0
        yield "weights of many sizes", 0
        yield "weights that are no numbers", 0

    def _leaves(self) -> list[fx.Node]:
        roots = [self.trace.root, *self.trace.weight_roots[:1]]
        found = [n for n in self.trace.leaves if is_tensor(n)]
        return list(dict.fromkeys([*roots, *(n for n in found if not is_size(n))]))

    def _roots(self, kind: str, turn: int) -> Values:
        trace, shape = self.trace, self.shape
        dtype = dtype_of(trace.root)
        x = self._normal(shape)
        lead = shape[:3]
        if kind == "one dim alone":
            rows = lead[0] * lead[1] * lead[2]
            at = (torch.arange(rows) + turn * rows) % shape[3]
            x = torch.nn.functional.one_hot(at, shape[3]).reshape(shape) * (x.abs() + 0.5)
        elif kind == "many orders of magnitude":
            low, high = (-3.0, 3.0) if dtype == torch.float16 else (-14.0, 12.0)
            power = torch.rand((*lead, 1), generator=self.generator) * (high - low) + low
            x = x * 10**power
            x = x.masked_fill(torch.rand((*lead, 1), generator=self.generator) < 0.2, 0)
        elif kind == "dims of many sizes":
            part = max(1, shape[3] // 4)
            power = torch.rand((*lead, -(-shape[3] // part)), generator=self.generator)
            power = power.repeat_interleave(part, -1)[..., : shape[3]]
            x = x * 10 ** (-7 * power - torch.rand(shape, generator=self.generator))
            # The transform is its own inverse.
            x = hadamard_transform(x) if self.hadamard else x
        elif kind == "no numbers":
            odd = torch.rand((*lead, 1), generator=self.generator)
            first = torch.arange(shape[3]) == 0
            x = x.masked_fill((odd < 0.2) & first, torch.nan)
            x = x.masked_fill((odd > 0.8) & first, torch.inf)
        top = trace.weight_roots[0]
        return {
            trace.root: x.to(dtype).reshape(self.binding.shape(trace.root)),
            top: self._weights(kind, lead).to(dtype_of(top)).reshape(self.binding.shape(top)),
        }

    def _weights(self, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        w = self._normal(shape)
        w = torch.where(w.abs() < 0.1, 1.0, w)
        if kind == "weights of many sizes":
            half = any(
                dtype_of(n) == torch.float16 for n in (*self.trace.weight_roots, self.trace.weights)
            )
            low, high = (-1.0, 4.0) if half else (-14.0, 12.0)
            w = w * 10 ** (torch.rand(shape, generator=self.generator) * (high - low) + low)
        elif kind == "weights that are no numbers":
            odd = torch.rand(shape, generator=self.generator)
            w = w.masked_fill(odd < 0.2, torch.nan).masked_fill(odd > 0.8, torch.inf)
            w = torch.where(self._normal(shape) < 0, -w, w)
        return w

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _leaf(self, node: fx.Node, high: int) -> torch.Tensor:
        shape, dtype = self.binding.shape(node), dtype_of(node)
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        if value(node).is_complex() or is_float(node):
            return torch.randn(shape, generator=self.generator, dtype=_wide(dtype)).to(dtype)
        return torch.randint(0, high + 1, shape, generator=self.generator).to(dtype)


def _wide(dtype: torch.dtype) -> Any:
    return torch.complex64 if dtype.is_complex else torch.float32
