"""Candidate ids to ascending sparse blocks, and columns to positions, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_plan import Part, pieces, share_of_memory
from .cpu_threads import for_each
from .cpu_topk import fill_empty
from .reference import accumulator, row_range
from .validate import row_shape

_BITMAP_CELLS_PER_ID = 20
# What one id and one slot cost, in operations of a product.
_EXPANSION, _REMAPPING = 1500, 3000


def _sorted_unique(blocks: Tensor, keep: Tensor, total: int) -> Tensor:
    """Kept ids of every row ascending and once each, then ids of ``total`` and above.

    Marking ids in a bitmap and listing its set cells beats sorting while the bitmap is not much
    larger than the list. Every row marks as many spare cells past ``total`` as it lacks ids, so
    that all rows list equally many.
    """
    rows, width = blocks.shape
    if total + width > _BITMAP_CELLS_PER_ID * width:
        ordered = torch.where(keep, blocks, total).sort(dim=-1).values
        repeat = ordered[:, 1:] == ordered[:, :-1]
        repeat &= ordered[:, 1:] < total
        if bool(repeat.any()):
            ordered[:, 1:].masked_fill_(repeat, total)
            ordered = ordered.sort(dim=-1).values
        return ordered
    cells = torch.zeros(rows, total + width + 1, dtype=torch.bool)
    dump = total + width
    cells.scatter_(-1, torch.where(keep, blocks, dump), True)
    spare = width - cells[:, :total].sum(-1, keepdim=True)
    cells[:, total:dump] = torch.arange(width) < spare
    cells[:, dump] = False
    return cells.nonzero()[:, 1].view(rows, width)


def _expand_part(
    ids: Tensor,
    low: Tensor | None,
    high: Tensor,
    num_positions: int,
    block_size: int,
    sparse_block: int,
    anchored: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`expand` of rows: ids [R, C], bounds [R, 1]; no lower bound is zero."""
    ratio = block_size // sparse_block
    total = -(-num_positions // sparse_block)
    # Junk ids must not overflow: nothing beyond the last block is kept anyway.
    blocks = ids.long().clamp(-1, num_positions // block_size + 1)
    if ratio > 1:
        blocks = (blocks[..., None] * ratio + torch.arange(ratio)).flatten(1)
    reach = high if low is None or not anchored else high - low
    stop = (reach + (sparse_block - 1)) // sparse_block
    if low is None or anchored:
        keep = (blocks >= 0) & (blocks < stop)
    else:
        keep = (blocks >= low // sparse_block) & (blocks < stop.masked_fill(high <= low, 0))
    blocks = _sorted_unique(blocks, keep, total)
    valid = blocks < total
    count = valid.sum(-1, keepdim=True)
    last = blocks.gather(-1, (count - 1).clamp_(min=0))
    tail = (reach - last * sparse_block).clamp_(1, sparse_block)
    end = (count - 1) * sparse_block + tail
    blocks = torch.where(valid, blocks, last)
    if anchored and low is not None:
        blocks += low // sparse_block
    empty = count == 0
    return blocks.masked_fill_(empty, 0), end.masked_fill_(empty, 0)


def expand(
    block_ids: Tensor,
    row_start: Tensor | None,
    row_end: Tensor | None,
    *,
    num_positions: int,
    block_size: int,
    sparse_block: int,
    anchored: bool,
) -> tuple[Tensor, Tensor]:
    """Blocks [B, S, N] int32 and end [B, S] int32; see the op ``candidate_expand``."""
    low, high = row_range(row_start, row_end, num_positions, block_ids.device)
    batch, rows = row_shape("candidate_expand", block_ids=block_ids, row_start=low, row_end=high)
    whole = Part(0, int(batch), 0, int(rows))
    width = block_ids.shape[2] * (block_size // sparse_block)
    blocks = torch.empty(whole.batch, whole.rows, width, dtype=torch.int32)
    end = torch.zeros(whole.batch, whole.rows, dtype=torch.int32)
    if blocks.numel() == 0:
        return blocks, end
    ids = block_ids.expand(whole.batch, whole.rows, -1)
    low, high = low.expand_as(end), high.expand_as(end)
    row_bytes = 40 * width + min(-(-num_positions // sparse_block), 20 * width)

    def run(part: Part) -> None:
        some, stop = _expand_part(
            part.of(ids).reshape(-1, ids.shape[2]),
            None if row_start is None else part.of(low).reshape(-1, 1),
            part.of(high).reshape(-1, 1),
            num_positions,
            block_size,
            sparse_block,
            anchored,
        )
        part.of(blocks).copy_(some.view(part.batch, part.rows, width))
        part.of(end).copy_(stop.view(part.batch, part.rows))

    for_each(
        pieces(whole, share_of_memory() // 4, row_bytes),
        lambda: run,
        _EXPANSION * blocks.numel(),
    )
    return blocks, end


def columns(
    blocks: Tensor,
    row_start: Tensor | None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool,
) -> Tensor:
    """Position of every column [B, S, W] int64, clamped into the context."""
    low, _ = row_range(row_start, None, num_positions, blocks.device)
    batch, rows = row_shape("candidate_columns", blocks=blocks, row_start=low)
    starts = blocks.long().clamp(-1, num_positions // sparse_block + 1) * sparse_block
    if anchored:
        starts = starts + (low % sparse_block)[..., None]
    starts = starts.expand(int(batch), int(rows), -1)
    out = torch.empty(*starts.shape, sparse_block, dtype=torch.int64)
    torch.add(starts[..., None], torch.arange(sparse_block), out=out)
    return out.clamp_(0, max(num_positions - 1, 0)).flatten(-2)


def positions_of(
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool,
) -> Tensor:
    """Positions [B, S, k] int64 of selected columns; -1 stays -1."""
    if blocks.shape[2] == 0:
        return torch.full(columns.shape, -1, dtype=torch.int64)
    chosen = columns.long()
    empty = chosen < 0
    chosen = chosen.clamp(0, blocks.shape[2] * sparse_block - 1)
    block = torch.div(chosen, sparse_block, rounding_mode="floor")
    start = blocks.expand(*columns.shape[:2], -1).gather(-1, block).long()
    start.clamp_(-1, num_positions // sparse_block + 1)
    places = start * sparse_block + chosen % sparse_block
    if anchored:
        low, _ = row_range(row_start, None, num_positions, blocks.device)
        places += (low % sparse_block)[..., None]
    return places.clamp_(0, max(num_positions - 1, 0)).masked_fill_(empty, -1)


def remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool,
    fill: float,
) -> tuple[Tensor, Tensor]:
    """Values and positions [B, S, k] of selected columns; see the op ``topk_remap``."""
    batch, count, slots = values.shape
    scores = torch.empty(batch, count, slots, dtype=accumulator(values))
    places = torch.empty(batch, count, slots, dtype=torch.int64)
    blocks = blocks.expand(batch, count, -1)
    start = None if row_start is None else row_start.expand(batch, count)

    def run(part: Part) -> None:
        found = positions_of(
            part.of(columns),
            part.of(blocks),
            None if start is None else part.of(start),
            num_positions=num_positions,
            sparse_block=sparse_block,
            anchored=anchored,
        )
        part.of(scores).copy_(part.of(values))
        fill_empty(part.of(scores).flatten(0, 1), found.flatten(0, 1), num_positions, fill)
        part.of(places).copy_(found)

    whole = Part(0, batch, 0, count)
    for_each(
        pieces(whole, share_of_memory() // 4, 100 * max(1, slots)),
        lambda: run,
        _REMAPPING * values.numel(),
    )
    return scores, places
