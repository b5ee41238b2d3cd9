"""Consumers whose ids, masks or sizes mean something else than they seem to at small sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .harness import NEG, Case, Layers, check, hidden_states, picks

BLOCK = 4
Membership = Callable[[Tensor, Tensor, Tensor], Tensor]


class Consumer(Layers):
    """Selects inside candidate blocks whose ids are an input, under a causal mask."""

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self.membership = membership

    def forward(self, x: Tensor, ids: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        inside = self.membership(ids, torch.arange(x.shape[1]), extra)
        return picks(self.raw(x).masked_fill(~(self.causal(x) & inside), NEG), 6)


def inside(ids: Tensor, position: Tensor) -> Tensor:
    return (ids[..., None] == position // BLOCK).any(-2)


def ids_of(batch: int, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, -(-rows // BLOCK), (batch, rows, 3), generator=generator)


def flags_of(rows: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, rows, generator=torch.Generator().manual_seed(seed)) > 0.5


def inputs(batch: int = 2, rows: int = 20, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return hidden_states(batch, rows, seed), ids_of(batch, rows, seed), flags_of(rows, seed)


ODD_IDS: dict[str, Membership] = {
    "as they are": lambda i, p, e: inside(i, p),
    "one number stands for block 0": lambda i, p, e: inside(torch.where(i == 999, 0, i), p),
    "below -1 stands for block 0": lambda i, p, e: inside(torch.where(i < -1, 0, i), p),
    "below -1 shows everything": lambda i, p, e: inside(i, p) | (i[..., :1] < -1),
    "wrapped in eight bits": lambda i, p, e: inside(i.to(torch.int8), p),
    "first positions in 32 bits": lambda i, p, e: inside(i.int() * BLOCK // BLOCK, p),
}


@pytest.mark.parametrize("name", ODD_IDS)
def test_odd_ids_keep_their_meaning(name: str) -> None:
    x, ids, extra = inputs()
    odd = [-2, -7, 100, 257, 999, 2**31 - 1, -(2**31), 2**40]
    others = [(x, ids.masked_fill(ids_of(2, 20, 5) == 1, number), extra) for number in odd]
    check(Case(Consumer(ODD_IDS[name]), (x, ids, extra), others))


LATE_RULES: dict[str, Membership] = {
    "late positions are shown": lambda i, p, e: inside(i, p) | (p >= 60),
    "old positions are shown": lambda i, p, e: inside(i, p) | ((p[:, None] - p) > 64),
    "late blocks share a flag": lambda i, p, e: inside(i, p.clamp(max=63)),
}


@pytest.mark.parametrize("name", LATE_RULES)
def test_a_rule_that_starts_late_is_kept(name: str) -> None:
    dynamic = ((0, 1), (0, 1), (0, 1))
    others = [inputs(1, 90), inputs(1, 130)]
    check(Case(Consumer(LATE_RULES[name]), inputs(), others, dynamic))


BOTH_WAYS: dict[str, Membership] = {
    "symmetric flags": lambda i, p, e: inside(i, p) & (e | e.transpose(0, 1)),
    "flags one way only": lambda i, p, e: inside(i, p) & e & ~e.transpose(0, 1),
    "distances": lambda i, p, e: inside(i, p) & (((p[:, None] - p).abs() < 6) | e.transpose(0, 1)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_mask_read_along_both_axes(name: str, dynamic: bool) -> None:
    shapes = ((0, 1), (0, 1), (0, 1)) if dynamic else None
    others = [inputs(seed=3)] + ([inputs(1, 33)] if dynamic else [])
    check(Case(Consumer(BOTH_WAYS[name]), inputs(), others, shapes))


class Sliced(Layers):
    """Selects among the first positions only, however long the context is."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        masked = self.raw(x).masked_fill(~self.causal(x), NEG)
        return picks(masked[..., : min(x.shape[1], 64)])


def test_a_slice_that_cuts_nothing_at_small_sizes() -> None:
    check(Case(Sliced(), (hidden_states(),), [(hidden_states(1, 99),)], ((0, 1),)))


class Bounded(Layers):
    """Positions up to and with a row's last one."""

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        return picks(self.raw(x).masked_fill(torch.arange(x.shape[1]) > last, NEG))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_bound_may_be_the_largest_number(dtype: torch.dtype) -> None:
    last = torch.arange(20).reshape(1, 20, 1).expand(2, 20, 1).to(dtype)
    limit = torch.full_like(last, torch.iinfo(dtype).max)
    check(Case(Bounded(), (hidden_states(), last), [(hidden_states(), limit)]))


class AddedTwice(Consumer):
    """Hides by the lowest number, added once, and adds numbers that may hide on their own."""

    def forward(self, x: Tensor, ids: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(x.shape[1])
        shown = self.causal(x) & inside(ids, position)
        lowest = torch.finfo(torch.float32).min
        hidden = torch.where(shown, 0.0, lowest)
        values, indices = (self.raw(x) + (hidden + extra)).topk(6)
        return values, indices.masked_fill(values <= lowest / 2, -1)


def test_a_fill_that_swallows_scores_does_not_swallow_what_else_is_added() -> None:
    def given(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        # So much is hidden by it that rows show it among their six best.
        added = torch.where(flags_of(20, seed) & (torch.arange(20) % 5 == 0), 0.0, NEG)
        return hidden_states(2, 20, seed), ids_of(2, 20, seed), added

    check(Case(AddedTwice(ODD_IDS["as they are"]), given(0), others=[given(1), given(2)]))
