"""Decode steps that read their keys through a block table, spelled in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pass_models import captured
from torch import Tensor, fx, nn

from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

HEADS, DIM, TOPK, BLOCK, BLOCKS = 16, 32, 6, 8, 3
NEG = float("-inf")

Read = Callable[[Tensor, Tensor], Tensor]


def by_index(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table].flatten(1, 2)


def by_index_select(cache: Tensor, table: Tensor) -> Tensor:
    read = cache.index_select(0, table.reshape(-1))
    return read.reshape(table.shape[0], -1, cache.shape[-1])


def by_gather(cache: Tensor, table: Tensor) -> Tensor:
    pages = cache.flatten(1)
    index = table.reshape(-1, 1).expand(-1, pages.shape[1])
    return pages.gather(0, index).reshape(table.shape[0], -1, cache.shape[-1])


def by_slots(cache: Tensor, table: Tensor) -> Tensor:
    page = cache.shape[1]
    position = torch.arange(table.shape[1] * page)
    slots = table[:, position // page] * page + position % page
    return cache.flatten(0, 1)[slots]


def by_lines(cache: Tensor, table: Tensor) -> Tensor:
    page = cache.shape[1]
    position = torch.arange(table.shape[1] * page)
    request = torch.arange(table.shape[0])
    slots = table[request[:, None], position // page] * page + position % page
    return cache.flatten(0, 1)[slots]


def clamped(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table.clamp(min=0))


def shortened(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table)[:, :-5]


def fused_fp8(cache: Tensor, table: Tensor) -> Tensor:
    """Fused pages, taken apart and widened by the model."""
    page, width = cache.shape[1:]
    raw = cache[table].flatten(2)
    values = raw[..., : page * (width - 4)].contiguous().view(torch.float8_e4m3fn)
    scales = raw[..., page * (width - 4) :].contiguous().view(torch.float32)
    keys = values.unflatten(-1, (page, width - 4)).float() * scales.unsqueeze(-1)
    return keys.flatten(1, 2)


def fused_mxfp4(cache: Tensor, table: Tensor) -> Tensor:
    """Fused pages of packed fp4 codes and power-of-two scales, widened by the model."""
    page, width = cache.shape[1:]
    size = width * 16 // 17
    raw = cache[table].flatten(2)
    packed = raw[..., : page * size].unflatten(-1, (page, size)).flatten(1, 2)
    scales = raw[..., page * size :].unflatten(-1, (page, width - size)).flatten(1, 2)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = numbers[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    factors = torch.exp2(scales.float() - 127)
    return (values.unflatten(-1, (-1, 32)) * factors.unsqueeze(-1)).flatten(-2)


class Paged(nn.Module):
    """Scores of S rows a request against the keys that ``read`` gives, then a selection.

    Args:
        read: keys [Q, T, D] of a cache and a block table [Q, P].
        candidates: whether published blocks restrict the rows.
        lines: whether the table is that of more requests, and a tensor says which are ours.
        cache: held as a buffer, so that its sizes are constants; else it is an input.
    """

    cache: Tensor | None

    def __init__(
        self,
        read: Read,
        candidates: bool = True,
        lines: bool = False,
        cache: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("cache", cache)
        self.read, self.candidates, self.lines = read, candidates, lines

    def scores(self, q: Tensor, weights: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
        product = torch.einsum("bshd,btd->bsht", q.to(keys.dtype), keys).relu()
        scores = (product * weights.unsqueeze(-1)).sum(2)
        ends = lens[:, None] - q.shape[1] + 1 + torch.arange(q.shape[1])
        return scores.masked_fill(torch.arange(keys.shape[1]) >= ends[..., None], NEG)

    def forward(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        table: Tensor,
        lens: Tensor,
        ids: Tensor,
        *request: Tensor,
    ) -> Tensor:
        if self.lines:
            table = table[request[0]]
        cache = cache if self.cache is None else self.cache
        scores = self.scores(q, weights, self.read(cache, table), lens)
        if self.candidates:
            block = torch.arange(scores.shape[-1]) // BLOCK
            scores = scores.masked_fill(~(ids[..., None] == block).any(-2), NEG)
        values, places = scores.topk(TOPK, dim=-1)
        return places.masked_fill(values == NEG, -1)


class Several(nn.Module):
    """The same step once for each way to read."""

    def __init__(self, reads: list[Read]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Paged(read) for read in reads)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(step(*inputs) for step in self.steps)


def setting(
    page: int = 16,
    quant: str = "none",
    unused: int = -1,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """q, weights, cache, table, lens, ids of three requests, two rows each, ragged lengths."""
    made = torch.Generator().manual_seed(seed)
    requests, rows = 3, 2
    columns = 64 // page + 1
    pages = 2 * columns + 3
    if quant == "none":
        cache = torch.randn(pages, page, DIM, generator=made).to(dtype or torch.float32)
    else:
        width = DIM + 4 if quant == "fp8" else DIM // 2 + DIM // 32
        cache = torch.zeros(pages, page, width, dtype=torch.uint8)
        keys = torch.randn(pages * page, DIM, generator=made)
        slots = torch.arange(pages * page)
        torch.ops.dsa.indexer_k_quant_and_cache(keys, cache, slots, quant=quant)
    # The first two requests share their first page, as after a common prompt.
    table = torch.randint(0, pages, (requests, columns), generator=made)
    table[1, 0] = table[0, 0]
    lens = torch.tensor([columns * page - 6, page + 3, 2])
    used = torch.arange(columns) < (lens[:, None] + page - 1) // page
    table = torch.where(used, table, unused)
    ids = torch.stack(
        [torch.randperm(columns * page // BLOCK, generator=made)[:BLOCKS] for _ in range(6)]
    ).view(requests, rows, BLOCKS)
    ids[:, :, 0] = (lens - 1)[:, None] // BLOCK
    q = torch.randn(requests, rows, HEADS, DIM, generator=made)
    weights = torch.randn(requests, rows, HEADS, generator=made)
    return q, weights, cache, table, lens, ids


def rewritten(model: Any, inputs: tuple[Tensor, ...], **options: Any) -> PipelineResult:
    """What the passes make of a model for the CPU."""
    return run_pipeline(captured(model, *inputs, **options), provider="cpu")


def reads_of_keys(graph_module: fx.GraphModule) -> list[fx.Node]:
    """Ops that read more than a table: results of the size of keys, wider than one number."""
    names = ("index", "index_select", "gather", "embedding", "gather_indexer_k")
    found = [
        n
        for n in graph_module.graph.nodes
        if str(n.target).split(".")[-2:-1] and str(n.target).split(".")[1] in names
    ]
    return [
        n
        for n in found
        if not isinstance(n.meta["val"], Tensor)
        or n.meta["val"].dtype not in (torch.int64, torch.int32)
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two selections [.., k], or those in front of two results, hold the same positions."""
    first, second = (x[0] if isinstance(x, tuple) else x for x in (a, b))
    return torch.equal(first.sort(-1).values, second.sort(-1).values)
