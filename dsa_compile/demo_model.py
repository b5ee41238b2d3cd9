"""A small two-level sparse-attention model in plain PyTorch, for the commands demo and bench.

Indexers have the released sizes of DeepSeek-V4.1 (32 heads of 128, top-512, 2,048 candidate blocks
of 8). They are written as such models are: every layer scores all positions, masks what it may not
see, and takes the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEG = float("-inf")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    hidden: int = 256
    heads: int = 32
    dim: int = 128
    topk: int = 512
    block: int = 8
    blocks: int = 2048
    consumers: int = 4


class Indexer(nn.Module):
    """Scores [B, S, T] of the last S of T positions, -inf where a row may not look."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.dim, bias=False)
        self.ww = nn.Linear(sizes.hidden, sizes.heads, bias=False)
        self.scale = sizes.dim**-0.5 * sizes.heads**-0.5

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (self.sizes.heads, self.sizes.dim))
        weights = self.ww(x).float() * self.scale
        scores = torch.einsum("bshd,btd->bsht", q, keys).relu().float()
        scores = (scores * weights.unsqueeze(-1)).sum(dim=2)
        rows, positions = scores.shape[1:]
        row = torch.arange(positions - rows, positions, device=x.device)
        hidden = torch.arange(positions, device=x.device) > row[:, None]
        return scores.masked_fill(hidden, NEG)


def pick(scores: Tensor, topk: int) -> Tensor:
    """Best positions [B, S, k], -1 where a row found nothing."""
    top = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    return top.indices.masked_fill(top.values == NEG, -1)


class ConsumerLayer(nn.Module):
    """x [1, S, hidden], keys [1, T, dim], block_ids int32 [1, S, C] (-1 where unused) -> picks."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.indexer = sizes, Indexer(sizes)

    def forward(self, x: Tensor, keys: Tensor, block_ids: Tensor) -> Tensor:
        positions, block = keys.shape[1], self.sizes.block
        blocks = (positions + block - 1) // block
        spare = block_ids.long().masked_fill(block_ids < 0, blocks)
        keep = torch.zeros(*spare.shape[:2], blocks + 1, dtype=torch.bool, device=x.device)
        keep = keep.scatter_(-1, spare, True)[..., :blocks]
        candidates = keep.repeat_interleave(block, dim=-1)[..., :positions]
        return pick(self.indexer(x, keys).masked_fill(~candidates, NEG), self.sizes.topk)


class TwoLevel(nn.Module):
    """x [1, S, hidden] behind cached keys [1, T - S, dim] -> picks [layers, 1, S, k]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wk = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.source = Indexer(sizes)
        self.consumers = nn.ModuleList(Indexer(sizes) for _ in range(sizes.consumers))

    def publish(self, scores: Tensor) -> Tensor:
        """Positions of each row's best blocks: bool [B, S, T]."""
        block, positions = self.sizes.block, scores.shape[-1]
        padded = F.pad(scores, (0, -positions % block), value=NEG)
        best = padded.unflatten(-1, (-1, block)).amax(-1)
        top = best.topk(min(self.sizes.blocks, best.shape[-1]), dim=-1)
        keep = torch.zeros_like(best, dtype=torch.bool)
        keep = keep.scatter_(-1, top.indices, top.values > NEG)
        return keep.repeat_interleave(block, dim=-1)[..., :positions]

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        keys = torch.cat([cache, self.wk(x)], dim=1)
        scores = self.source(x, keys)
        found, candidates = [pick(scores, self.sizes.topk)], self.publish(scores)
        for layer in self.consumers:
            scores = layer(x, keys).masked_fill(~candidates, NEG)
            found.append(pick(scores, self.sizes.topk))
        return torch.stack(found)


def two_level(
    positions: int, rows: int, sizes: Sizes | None = None
) -> tuple[TwoLevel, tuple[Tensor, ...]]:
    """A model with random weights and one chunk of a prefill for it."""
    torch.manual_seed(0)
    sizes = sizes or Sizes()
    model = TwoLevel(sizes).eval()
    cache = F.rms_norm(torch.randn(1, positions - rows, sizes.dim), (sizes.dim,))
    return model, (torch.randn(1, rows, sizes.hidden), cache)


def consumer_layer(
    positions: int, rows: int, dtype: torch.dtype, device: str, sizes: Sizes | None = None
) -> tuple[ConsumerLayer, tuple[Tensor, ...]]:
    """A layer with random weights, and inputs whose candidates are among the blocks a row sees."""
    torch.manual_seed(0)
    sizes = sizes or Sizes()
    layer = ConsumerLayer(sizes).eval().to(device, dtype)
    blocks = -(-positions // sizes.block)
    newest = torch.arange(positions - rows, positions) // sizes.block
    draw = torch.rand(rows, blocks)
    draw = draw.masked_fill(torch.arange(blocks) > newest[:, None], -1.0)
    top = draw.scatter(1, newest[:, None], 2.0).topk(min(sizes.blocks, blocks), dim=1)
    ids = top.indices.masked_fill(top.values < 0, -1).to(torch.int32)[None]
    keys = F.rms_norm(torch.randn(1, positions, sizes.dim), (sizes.dim,))
    x = torch.randn(1, rows, sizes.hidden)
    return layer, (x.to(device, dtype), keys.to(device, dtype), ids.to(device))
