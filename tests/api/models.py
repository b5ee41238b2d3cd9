"""Small models with sparse-attention indexers, written as their users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

# With fewer heads a row's relus are all off now and then, and its scores tie at zero.
HEADS, HEAD_DIM, DIM, BLOCK, BLOCKS, TOPK = 16, 8, 24, 4, 3, 6


class Indexer(nn.Module):
    """Scores of every position, ``sum_h w[t,h] * relu(q[t,h] . k[s])``, causally masked."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.ww = nn.Linear(DIM, HEADS, bias=False)

    def forward(self, x: Tensor, keys: Tensor, start: int = 0) -> Tensor:
        batch, rows = x.shape[0], x.shape[1]
        query = self.wq(x).view(batch, rows, HEADS, HEAD_DIM)
        scores = torch.relu(torch.einsum("bshd,btd->bsht", query, keys))
        scores = (scores * (self.ww(x) * HEAD_DIM**-0.5).unsqueeze(-1)).sum(dim=2)
        row = torch.arange(rows, device=x.device) + start
        hidden = torch.arange(keys.shape[1], device=x.device) > row[:, None]
        return scores.masked_fill(hidden, -torch.inf)


def publish(scores: Tensor, start: int = 0) -> Tensor:
    """Ids [B, S, C] of each row's best blocks, -1 where a row has fewer; the newest always."""
    rows, positions = scores.shape[-2:]
    blocks = -(-positions // BLOCK)
    padded = F.pad(scores, (0, blocks * BLOCK - positions), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, BLOCK)).amax(-1)
    newest = (torch.arange(rows, device=scores.device) + start) // BLOCK
    here = torch.arange(blocks, device=scores.device) == newest[:, None]
    top = best.masked_fill(here, torch.inf).topk(min(BLOCKS, blocks), dim=-1)
    return top.indices.masked_fill(top.values == -torch.inf, -1)


def inside(ids: Tensor, positions: int) -> Tensor:
    """Mask [B, S, T] of the positions in the blocks ``ids``."""
    block_of = torch.arange(positions, device=ids.device) // BLOCK
    return (ids[..., None, :] == block_of[:, None]).any(-1)


def attend(x: Tensor, values: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the best positions [B, S, k], and those, -1 where nothing was found."""
    top = scores.topk(min(TOPK, scores.shape[-1]), dim=-1)
    found = top.values > -torch.inf
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top.indices, found)
    logits = (x @ values.mT).masked_fill(~picked, -3e4)
    return logits.softmax(-1) @ values, top.indices.masked_fill(~found, -1)


class TwoLevel(nn.Module):
    """A source layer and a consumer layer: x [B, S, DIM] to (y, picks of both layers)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.source, self.consumer = Indexer(), Indexer()
        self.wk = nn.Linear(DIM, HEAD_DIM, bias=False)
        self.tag = f"two-level {seed}"

    def layers(
        self, x: Tensor, keys: Tensor, values: Tensor, start: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.source(x, keys, start)
        first, source_picks = attend(x, values, scores)
        allowed = inside(publish(scores, start), keys.shape[1])
        scores = self.consumer(x + first, keys, start).masked_fill(~allowed, -torch.inf)
        second, consumer_picks = attend(x, values, scores)
        return x + first + second, source_picks, consumer_picks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layers(x, self.wk(x), x)


class ByKeyword(TwoLevel):
    """The same with keyword arguments, a nested input, a constant, and a nested result."""

    def forward(
        self, x: Tensor, extra: dict[str, Tensor] | None = None, *, gain: float = 1.0
    ) -> dict[str, object]:
        if extra is not None:
            x = x + extra["shift"]
        y, source_picks, consumer_picks = self.layers(x * gain, self.wk(x), x)
        return {"y": y, "picks": [source_picks, consumer_picks], "gain": gain, "none": None}


class CacheArgument(TwoLevel):
    """Chunked prefill and decoding: writes keys and values into caches among its inputs."""

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        end = start + x.shape[1]
        keys[:, start:end] = self.wk(x)
        values[:, start:end] = x
        return self.layers(x, keys, values, start)


class CacheBuffer(TwoLevel):
    """The same with the caches as buffers, and a counter of calls."""

    def __init__(self, batch: int = 2, length: int = 32, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("keys", torch.zeros(batch, length, HEAD_DIM))
        self.register_buffer("values", torch.zeros(batch, length, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        end = start + x.shape[1]
        self.keys[:, start:end] = self.wk(x)
        self.values[:, start:end] = x
        self.calls += 1
        return self.layers(x, self.keys, self.values, start)


class WithBreak(TwoLevel):
    """Python that no graph can hold, between the two layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.wk(x)
        scores = self.source(x, keys)
        first, source_picks = attend(x, x, scores)
        ids = publish(scores)
        self.seen.append(first.abs().max().item())
        scores = self.consumer(x + first, keys).masked_fill(~inside(ids, keys.shape[1]), -torch.inf)
        second, consumer_picks = attend(x, x, scores)
        return x + first + second, source_picks, consumer_picks


class NoIndexer(nn.Module):
    """A router: a top-k without an indexer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1).topk(2).indices


def inputs(batch: int = 2, rows: int = 29, seed: int = 1, dtype: torch.dtype = torch.float32):
    """Random x [B, S, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, DIM, generator=generator).to(dtype)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Equal outputs; picks as sets, since order is not promised and ties may fall either way."""
    torch.testing.assert_close(got[0], expected[0])
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values)


def ops(graph_module: fx.GraphModule) -> set[str]:
    """Names of the ``dsa`` ops that a graph calls, whatever their provider."""
    names = (str(n.target) for n in graph_module.graph.nodes if n.op == "call_function")
    return {name.split(".")[1] for name in names if name.startswith("dsa")}
