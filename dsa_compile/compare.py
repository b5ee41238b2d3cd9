"""Selections compared by what they select, judged by the scores they were made from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# A finite fill is at least this far below zero (fp16 masks use -1e4); scores are not.
_FILL = -1e4


@dataclass(frozen=True)
class Agreement:
    """Rows compared, rows alike, and the largest score difference over the others."""

    rows: int
    same_rows: int
    largest_score_difference: float

    def joined(self, other: Agreement) -> Agreement:
        """The agreement over the rows of both."""
        return Agreement(
            self.rows + other.rows,
            self.same_rows + other.same_rows,
            max(self.largest_score_difference, other.largest_score_difference),
        )


def hidden(scores: Tensor) -> Tensor:
    """Where masked scores ``[..., T]`` hold the mask's fill: ``-inf``, or a huge negative number.

    A finite fill counts as such if it is at most -1e4; whatever lies nearer to it than to zero
    is hidden.
    """
    empty = torch.isneginf(scores)
    rest = scores[~(empty | scores.isnan())]
    floor = float(rest.min()) if rest.numel() else 0.0
    return empty | (scores <= floor / 2) if floor <= _FILL else empty


def compare_selections(scores: Tensor, before: Tensor, after: Tensor) -> Agreement:
    """Compare two selections of positions, row by row.

    Args:
        scores: float ``[..., T]``, the masked scores that ``before`` was selected by.
        before, after: integer ``[..., k]``, positions in ``[0, T)``; negative ones found nothing.

    Returns:
        The agreement. Slots whose score is the mask's fill count as having found nothing. NaN
        ranks above every number.
    """
    positions = scores.shape[-1]
    rows = math.prod(scores.shape[:-1])
    scores = scores.reshape(rows, positions)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(hidden(scores), -torch.inf)
    picked = [_picked(scores, s.reshape(rows, s.shape[-1])) for s in (before, after)]
    width = max(p.shape[1] for p in picked)
    sets, ranks = [], []
    for picks in picked:
        filled = torch.nn.functional.pad(picks, (0, width - picks.shape[1]), value=positions)
        sets.append(filled.sort(dim=-1).values)
        padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
        ranks.append(padded.gather(-1, filled).sort(dim=-1, descending=True).values)
    same = (sets[0] == sets[1]).all(dim=-1)
    worst = largest_difference(ranks[0][~same], ranks[1][~same])
    return Agreement(rows, int(same.sum()), worst)


def _picked(scores: Tensor, selection: Tensor) -> Tensor:
    """Selected positions, with ``T`` in the slots that found nothing."""
    positions = scores.shape[-1]
    selection = selection.long()
    inside = (selection >= 0) & (selection < positions)
    if not positions:
        return selection.new_full(selection.shape, positions)
    values = scores.gather(-1, selection.clamp(0, positions - 1))
    return selection.masked_fill(~inside | torch.isneginf(values), positions)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest ``|a - b|``; infinite where only one is NaN or infinite, or the shapes differ."""
    if a.shape != b.shape:
        return torch.inf
    if not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    gap = (a - b).abs()
    gap = gap.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(gap.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
