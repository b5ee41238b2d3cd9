"""Indexers whose operands are model inputs, as an engine or a test of one fault would call them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .candidates import ID_MASKS
from .masks import INF


def scores_of(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return (torch.einsum("bshd,btd->bsht", q, k).relu() * w.unsqueeze(-1)).sum(2)


def exact_selection(
    q: Tensor, k: Tensor, w: Tensor, allowed: Tensor, topk: int
) -> list[list[set[int]]]:
    """The sets in float64, without ties broken: the data must have none at the cut."""
    parts = (q.double() @ k.double().transpose(1, 2).unsqueeze(1)).clamp_min(0)
    scores = (parts * w.double().unsqueeze(-1)).sum(2).masked_fill(~allowed, -INF)
    top = scores.topk(min(topk, k.shape[1]), dim=-1)
    picked = torch.where(top.values > -INF, top.indices, -1).tolist()
    return [[{i for i in row if i >= 0} for row in rows] for rows in picked]


def sets(indices: Tensor) -> list[list[set[int]]]:
    return [[{i for i in row if i >= 0} for row in rows] for rows in indices.tolist()]


class Single(nn.Module):
    """One level: row t of S sees the positions before ``ends[b, t]``."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def forward(self, q: Tensor, k: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        s = scores_of(q, k, w)
        s = s.masked_fill(torch.arange(k.shape[1]) >= ends.unsqueeze(-1), -INF)
        top = s.topk(min(self.topk, k.shape[1]), dim=-1)
        return torch.where(top.values > -INF, top.indices, -1)


class Consumer(nn.Module):
    """Candidate ids as an input; ``mask`` names how they become a mask over positions."""

    def __init__(self, topk: int, block: int, mask: str = "compare and any") -> None:
        super().__init__()
        self.topk, self.block, self.mask = topk, block, mask

    def forward(self, q: Tensor, k: Tensor, w: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        s = scores_of(q, k, w)
        inside = ID_MASKS[self.mask](ids, k.shape[1], self.block)
        s = s.masked_fill(torch.arange(k.shape[1]) >= ends.unsqueeze(-1), -INF)
        s = torch.where(inside, s, -INF)
        top = s.topk(self.topk, dim=-1)
        return torch.where(top.values > -INF, top.indices, -1)


class StaticCache(nn.Module):
    """A decode step into a key cache of fixed length, of which only a part is filled."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def forward(
        self, q: Tensor, new: Tensor, w: Tensor, cache: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        k = cache.index_copy(1, position, new)
        s = scores_of(q, k, w)
        s = s.masked_fill(torch.arange(k.shape[1]) > position.unsqueeze(-1), -INF)
        top = s.topk(self.topk, dim=-1)
        return top.indices.masked_fill(top.values == -INF, -1), k


class Attention(nn.Module):
    """A single-level indexer and the attention over what it selects, by an additive mask."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def forward(self, q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
        t = k.shape[1]
        causal = torch.full((t, t), -INF).triu(1)
        picked = (scores_of(q, k, w) + causal).topk(min(self.topk, t), dim=-1).indices
        bias = torch.full((q.shape[0], t, t), -INF).scatter(-1, picked, 0.0) + causal
        return F.scaled_dot_product_attention(v, v, v, attn_mask=bias)


def draw(
    seed: int, batch: int, rows: int, positions: int, heads: int = 6, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and head weights of one seed."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, rows, heads, dim, generator=g),
        torch.randn(batch, positions, dim, generator=g),
        torch.randn(batch, rows, heads, generator=g),
    )
