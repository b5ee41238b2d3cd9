"""Slots are counted by the published blocks only where those are the best visible ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_models import BLOCK, NEG, TwoLevel, captured, hidden
from torch import Tensor, nn

from dsa_compile.passes.pipeline import run_pipeline

Change = Callable[[Tensor, Tensor, Tensor], Tensor]


class ByIndex(TwoLevel):
    """A consumer that tells empty slots by index, of blocks that are ranked in some way."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        scores = self.scores(x, 0)
        own = self.picks(scores)
        blocks = nn.functional.pad(scores, (0, -n % BLOCK), value=NEG)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
        here, row = torch.arange(blocks.shape[-1]), torch.arange(n)[:, None]
        best = self.change(blocks, here, row).topk(3, dim=-1)
        table = torch.zeros_like(blocks, dtype=torch.bool)
        table = table.scatter(-1, best.indices, best.values > NEG)
        keep = table.repeat_interleave(BLOCK, dim=-1)[..., :n]
        picks = self.scores(x, 1).masked_fill(~keep, NEG).topk(6, dim=-1).indices
        return own, torch.where(picks <= row, picks, -1)


def pinned(blocks: Tensor, here: Tensor, row: Tensor) -> Tensor:
    return blocks.masked_fill(here == row // BLOCK, float("inf"))


CHANGES: dict[str, tuple[Change, bool]] = {
    "the best": (lambda b, here, row: b, True),
    "the newest pinned": (pinned, True),
    "the first pinned, too": (lambda b, h, r: pinned(b, h, r).masked_fill(h == 0, 1e30), True),
    "odd ones hidden": (lambda b, h, r: pinned(b, h, r).masked_fill(h % 2 == 1, NEG), False),
    "weak ones hidden": (lambda b, h, r: b.masked_fill(b < b.amax(-1, keepdim=True), NEG), False),
    "the worst": (lambda b, h, r: -b, False),
    "the last pinned for all": (lambda b, h, r: b.masked_fill(h >= 5, float("inf")), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_slots_are_counted_where_the_best_blocks_are_published(name: str) -> None:
    change, counts = CHANGES[name]
    result = run_pipeline(captured(ByIndex(change).eval(), hidden(24)))
    (consumer,) = [s for s in result.sites if s.kind == "consumer"]
    assert (consumer.status == "rewritten") == counts, consumer
    if not counts:
        assert "which blocks are published is not known" in (consumer.reason or "")
