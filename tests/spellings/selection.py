"""Spellings of the selection and of what a model makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import INF

Picked = tuple[Tensor | None, Tensor]


# ---------------------------------------------------------------------------- selection
def by_topk(s: Tensor, k: int) -> Picked:
    top = s.topk(k, dim=-1)
    return top.values, top.indices


def by_topk_unsorted(s: Tensor, k: int) -> Picked:
    values, indices = torch.topk(s, k, dim=-1, sorted=False)
    return values, indices


def by_topk_then_sort(s: Tensor, k: int) -> Picked:
    return None, s.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values


def by_sort(s: Tensor, k: int) -> Picked:
    values, indices = torch.sort(s, dim=-1, descending=True)
    return values[..., :k], indices[..., :k]


def by_argsort(s: Tensor, k: int) -> Picked:
    return None, s.argsort(dim=-1, descending=True)[..., :k]


def by_argsort_stable(s: Tensor, k: int) -> Picked:
    return None, torch.argsort(s, dim=-1, descending=True, stable=True).narrow(-1, 0, k)


SELECTIONS: dict[str, Callable[[Tensor, int], Picked]] = {
    "topk": by_topk,
    "topk unsorted": by_topk_unsorted,
    "topk unsorted, sorted by index": by_topk_then_sort,
    "sort": by_sort,
    "argsort": by_argsort,
    "argsort stable": by_argsort_stable,
}
WITHOUT_VALUES = {"topk unsorted, sorted by index", "argsort", "argsort stable"}


# ---------------------------------------------------------------------------- result
class Picks(NamedTuple):
    """A selection with what validity rules look at; ``candidates`` is None where none restrict."""

    scores: Tensor
    values: Tensor | None
    indices: Tensor
    visible: Tensor
    candidates: Tensor | None
    ends: Tensor
    floor: float


def by_value(p: Picks) -> Tensor:
    return torch.where(p.values > p.floor, p.indices, -1)


def by_value_infinite(p: Picks) -> Tensor:
    return p.indices.masked_fill(p.values == -INF, -1)


def by_finite_value(p: Picks) -> Tensor:
    return p.indices.masked_fill_(~torch.isfinite(p.values), -1)


def by_index(p: Picks) -> Tensor:
    return torch.where(p.indices < p.ends, p.indices, -1)


def by_gathered_score(p: Picks) -> Tensor:
    got = p.scores.gather(-1, p.indices.long().clamp(0, p.scores.shape[-1] - 1))
    return p.indices.masked_fill(~(got > p.floor), -1)


def by_gathered_mask(p: Picks) -> Tensor:
    both = p.visible if p.candidates is None else p.visible & p.candidates
    return torch.where(both.expand(p.scores.shape).gather(-1, p.indices.long()), p.indices, -1)


def bool_mask(p: Picks) -> Tensor:
    picked = torch.zeros_like(p.scores, dtype=torch.bool)
    return picked.scatter_(-1, p.indices.long(), True) & p.visible


def bool_mask_of_ones(p: Picks) -> Tensor:
    hidden = torch.ones(p.scores.shape, dtype=torch.bool).scatter(-1, p.indices.long(), False)
    return ~(hidden | ~p.visible)


def additive_bias(p: Picks) -> Tensor:
    bias = torch.full_like(p.scores, -INF).scatter_(-1, p.indices.long(), 0.0)
    return bias + torch.zeros(p.visible.shape, dtype=p.scores.dtype).masked_fill(~p.visible, -INF)


def bias_with_spare_column(p: Picks) -> Tensor:
    n = p.scores.shape[-1]
    at = torch.where(p.values > p.floor, p.indices.long(), n)
    return p.scores.new_full((*p.scores.shape[:-1], n + 1), -INF).scatter(-1, at, 0.0)[..., :n]


def raw(p: Picks) -> Tensor:
    return p.indices


RESULTS: dict[str, Callable[[Picks], Tensor]] = {
    "-1 by value": by_value,
    "-1 by value == -inf": by_value_infinite,
    "-1 by isfinite": by_finite_value,
    "-1 by index": by_index,
    "-1 by gathered score": by_gathered_score,
    "-1 by gathered mask": by_gathered_mask,
    "bool mask": bool_mask,
    "bool mask of ones": bool_mask_of_ones,
    "additive bias": additive_bias,
    "bias with spare column": bias_with_spare_column,
    "raw": raw,
}
NEEDS_VALUES = {"-1 by value", "-1 by value == -inf", "-1 by isfinite", "bias with spare column"}
NEEDS_INFINITE = {"-1 by value == -inf", "-1 by isfinite"}
# These keep a pick that is visible, even outside the candidates (raw picks leave that to whoever
# takes them): right only where a row with fewer than k visible candidates has no other visible
# position.
BY_VISIBILITY = {"-1 by index", "bool mask", "bool mask of ones", "additive bias", "raw"}

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda i: i,
    "int32": lambda i: i.to(torch.int32),
    "int32 and back": lambda i: i.to(torch.int32).to(torch.int64),
}
