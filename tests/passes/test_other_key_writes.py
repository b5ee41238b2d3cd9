"""Key writes that differ from the op in one place stay as they are, and the report says why."""

from __future__ import annotations

from typing import Any

import torch
from key_models import (
    ADDED,
    DIM,
    LEFT,
    PAGE,
    PAGES,
    KeyModel,
    Several,
    at_tokens,
    check,
    notes,
    rewritten,
    step,
    steps,
    writes,
)
from torch import Tensor, nn


class NoFloor(KeyModel):
    """A key of zeros has a scale of zero."""

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True) / 448.0
        return (k / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)


class Unclamped(KeyModel):
    """Scales are rounded down to powers of two: codes saturate, or are none."""

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (k / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)


class RoundedScale(KeyModel):
    """Scales have the bits of bf16."""

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = (k.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0).bfloat16().float()
        codes = (k / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale.view(torch.uint8)


class ScaleOfHalves(KeyModel):
    """The scale is that of the first half of the dims."""

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = k[:, : DIM // 2].abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        codes = (k / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale.view(torch.uint8)


class Shifted(KeyModel):
    """A parameter that is zero today is added to the quantised numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        codes = (k / scale + self.shift).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale.view(torch.uint8)


def test_another_quantisation_is_kept() -> None:
    kinds = (NoFloor, Unclamped, RoundedScale, ScaleOfHalves, Shifted)
    models = Several(*(kind() for kind in kinds)).eval()
    result = rewritten(models, steps(len(kinds)))
    assert not writes(result)
    for text, site in zip(notes(result), result.sites, strict=True):
        assert text.startswith(LEFT) and "its keys are no norm" in text or "not what it" in text
        assert site.status == "fused"
    check(models, result, steps(len(kinds), seed=1))


def beside(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Scales lie one token further on than they should."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    flat[:, :size].view(pages, page, -1)[slots // page, slots % page] = codes
    flat[:, size:].view(pages, page, -1)[slots // page, (slots + 1) % page] = scales


def interleaved(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Every token's scale lies behind its codes."""
    cache.view(-1, cache.shape[-1])[slots] = torch.cat([codes, scales], 1)


def truncating(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """A slot of -1 is the last token of the first page."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    at = (torch.div(slots, page, rounding_mode="trunc"), torch.fmod(slots, page))
    flat[:, :size].view(pages, page, -1)[at] = codes
    flat[:, size:].view(pages, page, -1)[at] = scales


def keeping_first(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """What has no slot writes the old bytes of slot 0, also over a new key there."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    safe = slots.clamp(min=0)
    at, real = (safe // page, safe % page), (slots >= 0)[:, None]
    for part, data in ((flat[:, :size], codes), (flat[:, size:], scales)):
        view = part.view(pages, page, -1)
        view[at] = torch.where(real, data, view[at])


def modulo(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """A slot beyond the cache starts again at its first place."""
    at_tokens(cache, codes, scales, slots % (cache.shape[0] * cache.shape[1]))


def also_first(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """A counter lies in the first byte of the cache."""
    at_tokens(cache, codes, scales, slots)
    cache.view(-1)[0] += 1


OTHERS = {
    beside: "other bytes than those of its slots",
    interleaved: "other bytes than those of its slots",
    truncating: "neither left out nor the last place",
    keeping_first: "slots of -1",
    also_first: "another fp8 code or scale",
}


def test_another_write_is_kept() -> None:
    models = Several(*(KeyModel(write) for write in OTHERS)).eval()
    result = rewritten(models, steps(len(OTHERS)))
    assert not writes(result)
    for text, why in zip(notes(result), OTHERS.values(), strict=True):
        assert text.startswith(LEFT) and why in text
    check(models, result, steps(len(OTHERS), seed=1))


def test_slots_are_taken_where_they_name_places() -> None:
    """The write begins behind what the model does to the slots it is given."""
    model = KeyModel(modulo).eval()
    result = rewritten(model, step())
    (op,) = writes(result)
    given = step(seed=1)
    given[4][:2] = torch.tensor([PAGES * PAGE + 3, -2])
    check(model, result, given)


class Stacked(KeyModel):
    def forward(self, *inputs: Tensor) -> Any:
        x, q, w, positions, slots, cache, table, lens = inputs
        self.put(cache[1], x, positions, slots)
        return self.scores(q, w, cache[1], table, lens, lens)


def test_a_cache_that_is_part_of_a_larger_one_is_kept() -> None:
    given = list(step())
    given[5] = torch.stack([given[5], given[5]])
    model = Stacked().eval()
    result = rewritten(model, tuple(given))
    assert not writes(result)
    assert "no input or buffer of the graph" in notes(result)[0]
    check(model, result, tuple(given))


def test_a_cache_that_nobody_writes_or_scores_is_not_looked_at() -> None:
    class Silent(KeyModel):
        def put(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
            pass

    (site,) = rewritten(Silent().eval(), step()).sites
    assert not [n for n in site.notes if n.startswith((ADDED, LEFT))]
