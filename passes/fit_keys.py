"""Find which stages turn a model's projection into the keys in its cache, by trying the few known.

The stretch is run on made-up numbers; a stage is taken where what it gives is a tensor of the
model's own. Nothing is accepted here: see ``prove_keys``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from dsa_compile.kernels.fused_q_reference import hadamard_transform, rotate
from dsa_compile.kernels.key_cache_reference import normalise
from dsa_compile.passes.arrange_angles import Angles
from dsa_compile.passes.compare_keys import (
    first_difference,
    fp8_differs,
    mxfp4_differs,
    stage_differs,
)
from dsa_compile.passes.find_rotations import rotations
from dsa_compile.passes.graph_tools import value
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import KeyTrace

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class KeyForm:
    """Options of the fused op, and the model's own results of its stages.

    Attributes:
        norm, eps: as in the op; ``weight`` and ``bias`` number the trace's vectors.
        angles: cosines and sines; None where nothing is rotated.
        rows: the carrier and the two of its dims that hold batch and rows, for the angles; None
            where the keys lie in one row of all.
        stages: for each of norm, rotation and transform that is done, the carrier that it gives.
        negative: what a negative slot means: ``"skip"``, or ``"wrap"`` where it counts from the
            end of the cache.
    """

    norm: str = "none"
    eps: float = 1e-6
    weight: int | None = None
    bias: int | None = None
    rows: tuple[int, int, int] | None = None
    angles: tuple[Angles, Angles] | None = None
    rope: str = "half"
    start: int = 0
    hadamard: bool = False
    quant: str = "fp8"
    pow2: bool = True
    floor: float = 1e-4
    stages: tuple[int, ...] = ()
    negative: str = "skip"

    def describe(self) -> str:
        """The stages in words."""
        names = {"layer": "LayerNorm", "rms": "RMSNorm"}
        stages = [f"{names[self.norm]} with eps {self.eps:g}"] if self.norm != "none" else []
        if self.angles is not None:
            stages.append(f"{self.rope} rotation from dim {self.start}")
        if self.hadamard:
            stages.append("Hadamard transform")
        if self.quant == "fp8":
            stages.append(f"fp8 with {'power-of-two' if self.pow2 else 'fp32'} scales")
        else:
            stages.append("MXFP4")
        stages.append("the write into the pages")
        if self.negative == "wrap":
            stages.append("negative slots counted from the end, as in the model")
        return ", ".join(stages)


class KeyFitter:
    """Fits one stretch under one draw.

    Args:
        trace: the stretch.
        values: of all its nodes, under the draw.
        stored: codes [N, ..] and scales [N, ..] that the model put into the slots of its keys.
        most: keys that are looked at; None: all.
    """

    def __init__(
        self,
        trace: KeyTrace,
        values: Values,
        stored: tuple[Tensor, Tensor],
        most: int | None = None,
    ) -> None:
        self.trace, self.values, self.most = trace, values, most
        self.stored = (stored[0][:most], stored[1][:most])
        self.where = _rows_in(trace, values)
        self.rows = self._sizes()

    def fit(self) -> KeyForm:
        """The stages that give the stored keys.

        Raises:
            Refusal: none are known that do; carries what the nearest does otherwise.
        """
        least = (2.0, "")
        for form in self._turned():
            for tried in self._formats(form):
                share, why = self.stored_differ(tried)
                if not why:
                    return tried
                least = min(least, (share, why))
        what = "its keys are no norm, rotation, Hadamard transform and quantisation that is known"
        raise Refusal(what, 9, least[1] or None)

    def differ(self, form: KeyForm, real: Tensor) -> str:
        """The first difference of a form from the model, in words; empty where there is none.

        Args:
            real: bool [N], which keys are stored.
        """
        at = 0
        for name, done in _done(form):
            if not done:
                continue
            before, after = self._before(form, at), form.stages[at]
            exact = self._stage(name, form, self._numbers(before))
            wrong = stage_differs(self._numbers(after), exact)
            _, why = first_difference(wrong, f"the model's {name} gives another number")
            if why:
                return why
            at += 1
        return self.stored_differ(form, real)[1]

    def stored_differ(self, form: KeyForm, real: Tensor | None = None) -> tuple[float, str]:
        """Share of stored numbers that are not those of the last stage, and the first in words."""
        key = self._numbers(self._before(form, len(form.stages)))
        codes, scales = self.stored
        if form.quant == "fp8":
            wrong = fp8_differs(
                key.float(),
                codes.view(torch.float8_e4m3fn),
                scales.contiguous().view(torch.float32).squeeze(-1),
                power_of_two=form.pow2,
                floor=form.floor,
            )
        else:
            wrong = mxfp4_differs(key.float(), codes, scales)
        if real is not None:
            wrong = wrong & real[:, None]
        what = f"the model stores another {form.quant} code or scale than the op would"
        return first_difference(wrong, what)

    def _sizes(self) -> tuple[int, int]:
        if self.where is None:
            return 1, self.values[self.trace.root].numel() // self.trace.dim
        carrier, batch, row = self.where
        shape = self.values[self.trace.carriers[carrier]].shape
        return shape[batch], shape[row]

    def _before(self, form: KeyForm, at: int) -> int:
        return form.stages[at - 1] if at else 0

    def _numbers(self, carrier: int) -> Tensor:
        x = self.values[self.trace.carriers[carrier]]
        assert isinstance(x, Tensor)
        return x.reshape(-1, self.trace.dim)[: self.most]

    def _stage(self, name: str, form: KeyForm, x: Tensor) -> Tensor:
        """What a stage gives for keys [N, D], in fp64."""
        x = x.double()
        if name == "norm":
            weight, bias = (self._vector(at) for at in (form.weight, form.bias))
            return normalise(x, form.norm, weight, bias, form.eps)
        if name == "transform":
            return hadamard_transform(x)
        assert form.angles is not None
        cos, sin = (self._angles(angles) for angles in form.angles)
        return rotate(x, cos, sin, form.rope, form.start)

    def _vector(self, at: int | None) -> Tensor | None:
        return None if at is None else self.values[self.trace.vectors[at]].double()

    def _angles(self, angles: Angles) -> Tensor:
        x = self.values[self.trace.sides[angles.side]]
        line = angles.arrange(lambda op, *a: op(*a), x, self.rows, x.shape[-1])
        return line.expand(*self.rows, -1).flatten(0, 1)[: self.most].double()

    def _turned(self) -> Iterator[KeyForm]:
        """Forms whose stages up to the quantisation are the model's, the longest first."""
        whole = KeyForm(quant=self.trace.quant, rows=self.where)
        for normed in self._norms(whole):
            for rotated in self._rotated(normed):
                yield from self._transformed(rotated)

    def _norms(self, form: KeyForm) -> Iterator[KeyForm]:
        vectors: list[int | None] = [*range(len(self.trace.vectors)), None]
        for norm in ("layer", "rms"):
            for eps in self.trace.epsilons:
                for weight in vectors:
                    for bias in vectors:
                        if weight is None or weight != bias:
                            tried = replace(form, norm=norm, eps=eps, weight=weight, bias=bias)
                            yield from self._taken("norm", tried)
        yield form

    def _rotated(self, form: KeyForm) -> Iterator[KeyForm]:
        sides = [self.values[n] for n in self.trace.sides]
        complexes = [bool(value(n).is_complex()) for n in self.trace.sides]
        for angles, rope, start in rotations(sides, complexes, self.rows, self.trace.dim):
            tried = replace(form, angles=angles, rope=rope, start=start)
            yield from self._taken("rotation", tried)
        yield form

    def _transformed(self, form: KeyForm) -> Iterator[KeyForm]:
        dim = self.trace.dim
        if dim & (dim - 1) == 0:
            yield from self._taken("transform", replace(form, hadamard=True))
        yield form

    def _taken(self, name: str, form: KeyForm) -> Iterator[KeyForm]:
        """The form with the carrier that holds what its stage gives; nothing where none does."""
        before = self._before(form, len(form.stages))
        exact = self._stage(name, form, self._numbers(before))
        for at in range(before + 1, len(self.trace.carriers)):
            given = self.values[self.trace.carriers[at]]
            # A stage keeps the dtype of its input.
            if given.dtype != self.values[self.trace.carriers[0]].dtype:
                continue
            if not bool(stage_differs(self._numbers(at), exact).any()):
                yield replace(form, stages=(*form.stages, at))
                return

    def _formats(self, form: KeyForm) -> Iterator[KeyForm]:
        if form.quant == "mxfp4":
            yield form
            return
        for pow2 in (True, False):
            for floor in self.trace.floors:
                yield replace(form, pow2=pow2, floor=floor)


def _rows_in(trace: KeyTrace, values: Values) -> tuple[int, int, int] | None:
    """The first carrier that lays keys out in batch and rows, and its dims that hold them."""
    for at, node in enumerate(trace.carriers):
        shape = values[node].shape
        lead = [i for i, n in enumerate(shape[:-1]) if n != 1]
        if shape[-1] == trace.dim and len(lead) == 2:
            return at, lead[0], lead[1]
    return None


def _done(form: KeyForm) -> tuple[tuple[str, bool], ...]:
    return (
        ("norm", form.norm != "none"),
        ("rotation", form.angles is not None),
        ("transform", form.hadamard),
    )
