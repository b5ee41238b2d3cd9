"""Prove that a fused key write leaves in the cache what the model's own ops leave there."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx
from torch import Tensor

from dsa_compile.kernels.key_cache_reference import parts_of_pages
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.compare_query import numbers
from dsa_compile.passes.draw_keys import ORDINARY, KeyDraws
from dsa_compile.passes.emit_keys import FusedWrite
from dsa_compile.passes.fit_keys import KeyFitter, KeyForm, Values
from dsa_compile.passes.graph_tools import dtype_of
from dsa_compile.passes.run_probe import ProbeError, evaluate, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import KeyTrace

_FITTED = 64
"""Keys that a form is fitted to; it is proven on all of a draw."""
_FEW_BITS = 2.0**-6
"""What keys of 16 bits may differ by once a number has been rounded to the other side, as a share
of the largest: a few times their precision."""


class KeyProver:
    """Compares what a stretch and the fused op leave in the cache, under all kinds of draws.

    Args:
        trace: the stretch.
        binding: sizes, with no more keys than the cache has places.
        seed: of the draws.
    """

    def __init__(self, trace: KeyTrace, binding: Binding, seed: int) -> None:
        self.trace, self.binding = trace, binding
        self.draws = KeyDraws(trace, binding, seed)
        self.pages, self.places = self.draws.pages, self.draws.places

    def fit(self) -> KeyForm:
        """What the stretch computes, under one draw.

        Raises:
            Refusal: nothing that the op does.
        """
        slots = self.draws.slots()
        values = self.draws.draw(ORDINARY, 0, slots)
        new = self._new(values, self.trace.write.written)
        stored = self._stored(new, slots)
        form = KeyFitter(self.trace, values, stored, _FITTED).fit()
        return replace(form, negative=self._negative(form))

    def check(self, fused: FusedWrite, form: KeyForm, draws: int) -> None:
        """Compare under all kinds of draws.

        Raises:
            Refusal: the op leaves something else than the model; carries the first difference.
        """
        for kind, turn in self.draws.kinds(draws):
            slots = self.draws.slots()
            self._compare(self.draws.draw(kind, turn, slots), slots, form, fused, kind)
        for slots, kind, odd in (*self.draws.odd_slots(form.negative), *self.draws.odd_integers()):
            try:
                values = self.draws.draw(ORDINARY, 0, slots, odd)
            except Refusal:
                # The model takes no such numbers.
                continue
            self._compare(values, slots, form, fused, kind)

    def _compare(
        self, values: Values, slots: Tensor, form: KeyForm, fused: FusedWrite | None, kind: str
    ) -> None:
        places = slots.long()
        if form.negative == "wrap":
            places = torch.where(places < 0, places + self.places, places)
        real = (places >= 0) & (places < self.places)
        new = self._new(values, self.trace.write.written)
        stored = self._stored(new, torch.where(real, places, -1))
        why = KeyFitter(self.trace, values, stored).differ(form, real)
        if not why and fused is not None:
            try:
                env = evaluate(needed([fused.cache], values), values, self.binding)
            except ProbeError as error:
                raise Refusal(f"the op does not take it: {error}", 9) from error
            why = self._emitted_differs(new, env[fused.cache], places[real])
        if why:
            raise Refusal("the fused write is not what it computes", 9, f"{why} ({kind})")

    def _negative(self, form: KeyForm) -> str:
        """What a slot of -1 means to the model: ``"skip"``, or ``"wrap"``: the last place.

        Raises:
            Refusal: something else.
        """
        slots = self.draws.without_last()
        try:
            values = self.draws.draw(ORDINARY, 0, slots)
        except Refusal:
            return "skip"
        nearest = None
        for rule in ("skip", "wrap"):
            try:
                self._compare(values, slots, replace(form, negative=rule), None, "a slot of -1")
                return rule
            except Refusal as error:
                nearest = error.counterexample
        what = "a slot of -1 is neither left out nor the last place of the cache"
        raise Refusal(what, 8, nearest)

    def _new(self, values: Values, node: fx.Node) -> Tensor:
        x = values[node]
        assert isinstance(x, Tensor)
        return x.contiguous().reshape(self.pages)

    def _stored(self, new: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of keys in the places that the model wrote; zeros of those at -1.

        Raises:
            Refusal: other bytes than those have changed.
        """
        why = self._strays(new, slots[slots >= 0])
        if why:
            raise Refusal("its write changes other bytes than those of its slots", 7, why)
        parts = parts_of_pages(new, self.trace.quant)
        codes, scales = (self._rows(part)[slots.clamp(min=0)] for part in parts)
        return codes, scales

    def _strays(self, new: Tensor, slots: Tensor) -> str:
        """The first byte that differs from the old cache beside those of the slots, in words."""
        expected = self.draws.old.clone()
        parts = zip(*(parts_of_pages(x, self.trace.quant) for x in (expected, new)), strict=True)
        page = self.pages[1]
        for mine, given in parts:
            mine[slots // page, slots % page] = given[slots // page, slots % page]
        if torch.equal(expected, new):
            return ""
        at = int((expected != new).flatten(1).nonzero()[0, 1])
        number = int((expected != new).flatten(1).nonzero()[0, 0])
        return f"byte {at} of page {number}"

    @staticmethod
    def _rows(part: Tensor) -> Tensor:
        return part.flatten(0, 1)

    def _emitted_differs(self, model: Tensor, emitted: Tensor, places: Tensor) -> str:
        """The first way in which the op's cache is not the model's, in words.

        The stages have been compared exactly; this is about how they are handed to the op. Where
        the keys have few bits, rounding of one stage to the other side is seen in all later ones.
        """
        why = self._strays(emitted.reshape(self.pages), places)
        if why:
            return f"the op writes {why}"
        quant = self.trace.quant
        wide = []
        for cache in (model, emitted.reshape(self.pages)):
            parts = parts_of_pages(cache, quant)
            codes, scales = (self._rows(part)[places].contiguous() for part in parts)
            if quant == "fp8":
                codes = codes.view(torch.float8_e4m3fn)
                scales = scales.view(torch.float32).squeeze(-1)
            wide.append(numbers(codes, scales, quant, codes=False))
        (got, step), (want, other) = wide
        room = 1.001 * torch.maximum(step, other)
        if dtype_of(self.trace.root).itemsize == 2:
            room = room + _FEW_BITS * want.abs().amax(-1, keepdim=True)
        finite = got.isfinite().all(-1) & want.isfinite().all(-1)
        wrong = ((got - want).abs() > room) & finite[:, None]
        if not wrong.any():
            return ""
        key, dim = (int(i) for i in wrong.nonzero()[0])
        numbers_of = f"{got[key, dim]:.6g}, the op's {want[key, dim]:.6g}"
        return f"place {int(places[key])} dim {dim}: {numbers_of}"
