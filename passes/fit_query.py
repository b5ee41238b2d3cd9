"""Find which fused op a stretch of a model computes, by trying the few that there are.

The stretch is run on made-up numbers, and so is each candidate; the first that gives the same
queries and head weights is proposed. Nothing is accepted here: see ``prove_query``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.fused_q_reference import turn
from dsa_compile.kernels.quantise import quantise
from dsa_compile.passes.arrange_angles import Angles
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.compare_query import queries_differ, weights_differ
from dsa_compile.passes.find_rotations import rotations
from dsa_compile.passes.graph_tools import dtype_of, value
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_query import QueryTrace

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class QueryForm:
    """Options of the fused op, and how its results stand for the model's.

    Attributes:
        wide: the op reads the projection in fp32.
        angles: cosines and sines; None where nothing is rotated.
        codes: the model's queries are fp8 numbers without their scale.
        fold: the model's weights have the q scale in them. Where the model's queries have it
            instead, the op moves it into the weights: it is positive, so it passes through relu.
        weight_root: number of the tensor that the weights are read from.
    """

    wide: bool = False
    angles: tuple[Angles, Angles] | None = None
    rope: str = "half"
    start: int = 0
    hadamard: bool = False
    quant: str = "none"
    pow2: bool = True
    floor: float = 1e-4
    codes: bool = False
    fold: bool = False
    weight_root: int = 0
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def does_nothing(self) -> bool:
        """Whether the fused op would only scale the weights."""
        return self.angles is None and not self.hadamard and self.quant == "none"

    def describe(self) -> str:
        """The stages in words."""
        stages = []
        if self.angles is not None:
            stages.append(f"{self.rope} rotation from dim {self.start}")
        if self.hadamard:
            stages.append("Hadamard transform")
        if self.quant == "fp8":
            stages.append(f"fp8 with {'power-of-two' if self.pow2 else 'fp32'} scales")
        elif self.quant == "mxfp4":
            stages.append("MXFP4")
        return ", ".join(stages)


class QueryFitter:
    """Fits one stretch under one draw.

    Args:
        trace: the stretch.
        values: of all its nodes, under the draw.
        binding: the sizes of the draw.
    """

    def __init__(self, trace: QueryTrace, values: Values, binding: Binding) -> None:
        self.trace, self.values = trace, values
        self.query: torch.Tensor = values[trace.query]
        self.weights: torch.Tensor = values[trace.weights]
        self.shape = tuple(self.query.shape)
        self.binding = binding
        self.least = (2.0, "")

    def fit(self) -> QueryForm:
        """The fused op that computes the stretch.

        Raises:
            Refusal: none does; carries what the nearest candidate does otherwise.
        """
        for form in self._turned():
            for quantised in self._formats(form):
                found = self._weighted(quantised)
                if found is not None:
                    return found
        what = "its query side is no rotation, Hadamard transform and quantisation that is known"
        raise Refusal(what, 9, self.least[1] or None)

    def _turned(self) -> Iterator[QueryForm]:
        dim = self.shape[-1]
        power = dim & (dim - 1) == 0
        widths = [False]
        if dtype_of(self.trace.root).itemsize == 2:
            widths.append(True)
        for wide in widths:
            for hadamard in (True, False) if power and self.trace.mixes else (False,):
                plain = QueryForm(wide=wide, hadamard=hadamard)
                if self.trace.sides:
                    for angles, rope, start in self._rotations():
                        yield replace(plain, angles=angles, rope=rope, start=start)
                yield plain

    def _rotations(self) -> Iterator[tuple[tuple[Angles, Angles], str, int]]:
        sides = [self.values[n] for n in self.trace.sides]
        complexes = [bool(value(n).is_complex()) for n in self.trace.sides]
        return rotations(sides, complexes, self.shape[:2], self.shape[-1])

    def _formats(self, form: QueryForm) -> Iterator[QueryForm]:
        trace, dim = self.trace, self.shape[-1]
        root = self.values[trace.root].reshape(self.shape)
        root = root.float() if form.wide else root
        turned = turn(root, *self._angles(form), form.rope, form.start, form.hadamard)
        tries: list[QueryForm] = []
        if trace.fp8 and trace.reduced and dim % 4 == 0 and dim <= 128:
            tries = [
                replace(form, quant="fp8", pow2=pow2, floor=floor, codes=codes)
                for pow2 in (True, False)
                for floor in trace.floors
                for codes in (True, False)
            ]
        elif trace.reduced and dim % 32 == 0:
            tries = [replace(form, quant="mxfp4")]
        else:
            tries = [form]
        for tried in tries:
            values, scales = quantise(
                turned, tried.quant, power_of_two=tried.pow2, floor=tried.floor
            )
            given = scales if scales is not None else values.new_empty(0)
            share, why = queries_differ(self.query, values, given, tried.quant, codes=tried.codes)
            if share < self.least[0] and why:
                self.least = (share, why)
            if not why:
                self.scales = scales
                yield tried

    def _angles(self, form: QueryForm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if form.angles is None:
            return None, None
        found = []
        for angles in form.angles:
            x = self.values[self.trace.sides[angles.side]]
            line = angles.arrange(lambda op, *a: op(*a), x, self.shape[:2], x.shape[-1])
            found.append(line.to(turn_dtype(x))[:, :, None])
        return found[0], found[1]

    def _weighted(self, form: QueryForm) -> QueryForm | None:
        if form.does_nothing:
            return None
        folds = (True, False) if form.quant == "fp8" and form.codes else (False,)
        moved = form.quant == "fp8" and not form.codes
        for at, root in enumerate(self.trace.weight_roots):
            if moved and self.weights.dtype != torch.float32 and root is not self.trace.weights:
                # The op's weights hold the q scale, and cannot be rounded as the model's are.
                continue
            raw = self.values[root].reshape(self.weights.shape).float()
            for fold in folds:
                scaled = raw * self.scales if fold else raw
                near: tuple[float, float] | None = None
                for scales in self._factors(scaled):
                    made = scaled * scales[0] * scales[1]
                    why = weights_differ(self.weights, made)
                    if why:
                        self.least = (0.0, why)
                        continue
                    # The order of the factors that rounds as the model does, if there is one.
                    near = near or scales
                    if torch.equal(made.to(self.weights.dtype), self.weights):
                        near = scales
                        break
                if near is not None:
                    return replace(form, weight_root=at, fold=fold, scales=near)
        return None

    def _factors(self, scaled: torch.Tensor) -> list[tuple[float, float]]:
        """What the weights may be multiplied with: the model's own constants, or what fits."""
        ratio = self.weights.double() / scaled.double()
        known = ratio[ratio.isfinite()]
        if not known.numel():
            return []
        fitted = float(known.median())
        out = [(1.0, 1.0)] if abs(fitted - 1) < 1e-2 else []
        factors = self.trace.factors[-4:]
        pairs = [(a, b) for i, a in enumerate(factors) for b in factors[i + 1 :]]
        out += [pair for a, b in pairs for pair in ((a, b), (b, a))]
        out += [(a, 1.0) for a in factors]
        product = 1.0
        for factor in factors:
            product *= factor
        out = [s for s in [*out, (product, 1.0)] if abs(s[0] * s[1] / fitted - 1) < 1e-2]
        return out or [(fitted, 1.0)]


def turn_dtype(x: torch.Tensor) -> torch.dtype:
    """What angles are computed in."""
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
