"""Exact top-k in functional ATen: ties fall to the lower place, and empty slots are filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reference import NEG_INF

Size = Any
_LOW_BITS = 32
_NAN = 0x7FC00000


def best(scores: Tensor, count: Size) -> tuple[Tensor, Tensor]:
    """The ``count`` best of the last axis: descending, NaN first, equal ones by place (int64).

    fp32 scores become integers that carry their place in the low half, which are all different and
    in the wanted order, so that any top-k of them is the one that is meant.
    """
    if scores.dtype != torch.float32:
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        return values.narrow(-1, 0, count).contiguous(), order.narrow(-1, 0, count).contiguous()
    last = scores.shape[-1] - 1
    place = torch.arange(scores.shape[-1], device=scores.device)
    # -0.0 and 0.0 are equal.
    bits = torch.where(scores == 0, 0.0, scores).contiguous().view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = torch.where(scores.isnan(), _NAN, bits)
    keys = bits * (1 << _LOW_BITS) + (last - place)
    found = keys.topk(count, dim=-1).values
    order = last - (found & ((1 << _LOW_BITS) - 1))
    return scores.gather(-1, order), order


def ranked(scores: Tensor, count: Size) -> tuple[Tensor, Tensor]:
    """The same, where a score of -inf is an empty slot of place -1."""
    values, order = best(scores, count)
    return values, torch.where(values == NEG_INF, -1, order)


def fill_hidden(
    values: Tensor, indices: Tensor, positions: Size, fill: float
) -> tuple[Tensor, Tensor]:
    """Gives slots of index -1 the value ``fill`` and hidden positions, largest first.

    A row with m empty slots of k sees k - m positions only, so the last k positions of the context
    hold m hidden ones at least: nothing else is looked at.

    Args:
        values, indices: [B, S, k] with k <= positions.
    """
    count = indices.shape[-1]
    empty = indices < 0
    backwards = positions - 1 - indices
    outside = empty | (backwards >= count)
    hidden = torch.ones(*indices.shape[:2], count + 1, dtype=torch.bool, device=values.device)
    hidden = hidden.scatter(-1, torch.where(outside, count, backwards), False)
    numbered = hidden.narrow(-1, 0, count).long().cumsum(-1)
    place = torch.searchsorted(numbered.contiguous(), empty.long().cumsum(-1).contiguous())
    indices = torch.where(empty, positions - 1 - place, indices)
    return torch.where(empty, fill, values), indices
