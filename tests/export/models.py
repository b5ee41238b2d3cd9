"""A two-level model small enough to compile in seconds, and the effects that programs must keep."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# With fewer heads a row's relus are all off now and then, and its scores tie at zero.
HEADS, HEAD_DIM, DIM, BLOCK, BLOCKS, TOPK = 16, 8, 24, 4, 3, 6
NEG = float("-inf")


class Indexer(nn.Module):
    """Causally masked scores [B, S, T] of S rows that end the T positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.ww = nn.Linear(DIM, HEADS, bias=False)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        query = self.wq(x).unflatten(-1, (HEADS, HEAD_DIM))
        scores = torch.einsum("bshd,btd->bsht", query, keys).relu()
        scores = (scores * self.ww(x).unsqueeze(-1)).sum(dim=2)
        rows, positions = scores.shape[1:]
        row = torch.arange(rows, device=x.device) + (positions - rows)
        hidden = torch.arange(positions, device=x.device) > row[:, None]
        return scores.masked_fill(hidden, NEG)


def picks(scores: Tensor) -> Tensor:
    top = scores.topk(min(TOPK, scores.shape[-1]), dim=-1)
    return top.indices.masked_fill(top.values == NEG, -1)


class TwoLevel(nn.Module):
    """x [B, S, DIM], the last rows of keys [B, T, HEAD_DIM] -> picks [B, S, k] of both layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.source, self.consumer = Indexer(), Indexer()

    def publish(self, scores: Tensor) -> Tensor:
        """Mask [B, S, T] of each row's best blocks."""
        positions = scores.shape[-1]
        blocks = (positions + BLOCK - 1) // BLOCK
        padded = F.pad(scores, (0, blocks * BLOCK - positions), value=NEG)
        best = padded.unflatten(-1, (blocks, BLOCK)).amax(-1)
        top = best.topk(min(BLOCKS, best.shape[-1]), dim=-1)
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top.indices, top.values > NEG)
        return keep.repeat_interleave(BLOCK, dim=-1)[..., :positions]

    def layers(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.source(x, keys)
        mask = self.publish(scores)
        masked = self.consumer(x, keys).masked_fill(~mask, NEG)
        return picks(scores), picks(masked)

    def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x, keys)


class WritesBuffer(TwoLevel):
    """Keys are a buffer that each call writes into, and a counter of calls."""

    def __init__(self, length: int = 27) -> None:
        super().__init__()
        self.wk = nn.Linear(DIM, HEAD_DIM, bias=False)
        self.register_buffer("keys", torch.randn(1, length, HEAD_DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, -x.shape[1] :] = self.wk(x)
        self.calls += 1
        return self.layers(x, self.keys)


class WritesInput(TwoLevel):
    """Keys are an input that each call writes into; called by keyword, with nested arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.wk = nn.Linear(DIM, HEAD_DIM, bias=False)

    def forward(self, x: Tensor, *, state: dict[str, Tensor], gain: float = 1.0) -> dict[str, Any]:
        keys = state["keys"]
        keys[:, -x.shape[1] :] = self.wk(x)
        first, second = self.layers(x * gain, keys)
        return {"picks": [first, second], "newest": keys[:, -1]}


class NoIndexer(nn.Module):
    """A top-k that no indexer is behind."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1).topk(2).indices


def inputs(rows: int = 9, positions: int = 31, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x [1, S, DIM] and keys [1, T, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, rows, DIM, generator=generator)
    return x, torch.randn(1, positions, HEAD_DIM, generator=generator)


def assert_same(got: Any, expected: Any) -> None:
    """Equal picks as sets: order is not promised."""
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values)
