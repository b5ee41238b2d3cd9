"""Key writes that follow rules which hold where no draw may come stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from key_models import (
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
    steps,
    writes,
)
from torch import Tensor

import dsa_compile


class LargeWeights(KeyModel):
    """A norm whose weights grew in training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        with torch.no_grad():
            self.weight *= 20


class Capped(LargeWeights):
    """The scale is that of no more than 50."""

    most = 50.0

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = k.abs().amax(-1, keepdim=True).clamp(1e-4, self.most) / 448.0
        codes = (k / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale.view(torch.uint8)


class CappedHigh(Capped):
    """The same beyond what any weights are drawn for."""

    most = 1e12


class InRange(KeyModel):
    """Keys of some positions are halved behind the rotation."""

    def turned(self, k: Tensor, positions: Tensor) -> Tensor:
        k = super().turned(k, positions)
        return torch.where(((positions >= 3000) & (positions < 100000))[:, None], k * 0.5, k)


class AtOne(KeyModel):
    """The sign at one position is another, by a product."""

    def turned(self, k: Tensor, positions: Tensor) -> Tensor:
        return super().turned(k, positions) * (1 - 2 * (positions == 3001).float())[:, None]


def keeping_sevens(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Old codes that are all 7 stay."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    old = flat[:, :size].view(pages, page, -1)[slots // page, slots % page]
    at_tokens(cache, torch.where((old == 7).all(-1, keepdim=True), old, codes), scales, slots)


def by_halves(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """The places of the scales are counted in fp16."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    flat[:, :size].view(pages, page, -1)[slots // page, slots % page] = codes
    near = slots.half().long()
    flat[:, size:].view(pages, page, -1)[near // page, near % page] = scales


def test_rules_that_no_draw_meets_are_kept() -> None:
    kinds = {
        Capped(): "not what it computes",
        CappedHigh(norm=None): "bounded by 1e+12",
        InRange(): "chosen by",
        AtOne(): "chosen by",
        KeyModel(keeping_sevens): "the old bytes",
        KeyModel(by_halves): "its slots go through float16",
    }
    models = Several(*kinds).eval()
    result = rewritten(models, steps(len(kinds)))
    assert not writes(result)
    for text, why in zip(notes(result), kinds.values(), strict=True):
        assert text.startswith(LEFT) and why in text
    given = steps(len(kinds), seed=1)
    given[3][:] = torch.tensor([2999, 3000, 3001, 4000, 7])
    first = int(given[4][0])
    old = given[-2].view(PAGES, -1)[:, : PAGE * DIM].view(PAGES, PAGE, DIM)
    old[first // PAGE, first % PAGE] = 7
    check(models, result, given)


class AtRow(KeyModel):
    """Keys far down the step are negated."""

    def turned(self, k: Tensor, positions: Tensor) -> Tensor:
        far = torch.arange(k.shape[0]) > 200
        return torch.where(far[:, None], -k, super().turned(k, positions))


class AtSlot(KeyModel):
    """Keys in late places are negated."""

    def put(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        k = self.turned(self.normed(self.wk(x)), positions)
        k = torch.where((slots > 5000)[:, None], -k, k)
        self.write(cache, *self.quantised(k), slots)


def large(keys: int, pages: int) -> list[Tensor]:
    """Inputs of two steps over a larger cache, with sizes that are not fixed."""
    given = list(steps(2, keys=keys))
    given[4] = torch.arange(pages * PAGE).flip(0)[:: pages * PAGE // keys][:keys]
    given[7:] = [t.repeat(-(-pages // PAGES), 1, 1)[:pages].clone() for t in given[7:]]
    for at in (0, 3, 4, 7, 8):
        torch._dynamo.mark_dynamic(given[at], 0)
    return given


def test_rules_beyond_the_sizes_of_probes_are_kept() -> None:
    models = Several(AtRow(), AtSlot()).eval()
    run = dsa_compile.optimize(models, config={"provider": "cpu", "dynamic": None})
    with torch.no_grad():
        for keys, pages in ((6, 8), (300, 700)):
            mine, theirs = (large(keys, pages) for _ in range(2))
            run(*mine)
            models(*theirs)
            assert all(map(torch.equal, mine[7:], theirs[7:]))
    reasons = ("number of its keys", "slots go through gt")
    for site, why in zip(run.report.sites, reasons, strict=True):
        assert any(n.startswith(LEFT) and why in n for n in site.notes)
