"""Candidate ids to ascending sparse blocks, and columns to positions, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_plan import Part, parts, rows_within, working_set
from .reference import row_range

_BITMAP_CELLS_PER_ID = 20


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
    low: Tensor,
    high: Tensor,
    num_positions: int,
    block_size: int,
    sparse_block: int,
    anchored: bool,
) -> tuple[Tensor, Tensor]:
    """:func:`expand` of rows: ids [R, C], bounds [R, 1]."""
    ratio = block_size // sparse_block
    total = -(-num_positions // sparse_block)
    # Junk ids must not overflow: nothing beyond the last block is kept anyway.
    blocks = ids.long().clamp(-1, num_positions // block_size + 1)
    if ratio > 1:
        blocks = (blocks[..., None] * ratio + torch.arange(ratio)).flatten(1)
    origin = low if anchored else torch.zeros_like(low)
    first = torch.div(low - origin, sparse_block, rounding_mode="floor")
    stop = torch.div(high - origin + sparse_block - 1, sparse_block, rounding_mode="floor")
    stop = torch.where(high > low, stop, 0)
    blocks = _sorted_unique(blocks, (blocks >= first) & (blocks < stop), total)
    valid = blocks < total
    count = valid.sum(-1, keepdim=True)
    last = blocks.gather(-1, (count - 1).clamp_(min=0))
    tail = (high - origin - last * sparse_block).clamp_(1, sparse_block)
    end = torch.where(count > 0, (count - 1) * sparse_block + tail, 0)
    blocks = torch.where(valid, blocks, last) + torch.div(
        origin, sparse_block, rounding_mode="floor"
    )
    return blocks.masked_fill_(count == 0, 0), end


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
    shape = torch.broadcast_shapes(block_ids.shape[:2], low.shape, high.shape)
    width = block_ids.shape[2] * (block_size // sparse_block)
    blocks = torch.zeros(*shape, width, dtype=torch.int32)
    end = torch.zeros(shape, dtype=torch.int32)
    if blocks.numel() == 0:
        return blocks, end
    ids = block_ids.expand(*shape, -1)
    low, high = low.expand(shape), high.expand(shape)
    row_bytes = 40 * width + min(-(-num_positions // sparse_block), 20 * width)
    for part in parts(Part(0, shape[0], 0, shape[1]), rows_within(working_set() // 4, row_bytes)):
        some, stop = _expand_part(
            part.of(ids).reshape(-1, ids.shape[2]),
            part.of(low).reshape(-1, 1),
            part.of(high).reshape(-1, 1),
            num_positions,
            block_size,
            sparse_block,
            anchored,
        )
        part.of(blocks).copy_(some.view(part.batch, part.rows, width))
        part.of(end).copy_(stop.view(part.batch, part.rows))
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
    shape = torch.broadcast_shapes(blocks.shape[:2], low.shape)
    starts = blocks.long().clamp(-1, num_positions // sparse_block + 1) * sparse_block
    if anchored:
        starts = starts + (low % sparse_block)[..., None]
    starts = starts.expand(*shape, -1)
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
