"""Candidate block ids to sorted, unique, padded sparse blocks, and columns to positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tools import at_most, bound, by_row, power_of_two, result, sort, wrap_triton
from .validate import Size, row_shape

MAX_CANDIDATES = 4096


@triton.jit
def row_bound(pointer, batch, row, stride_b, stride_s, positions, GIVEN: tl.constexpr, absent):
    """A row's start or end [int64], clamped to the context; ``absent`` where none is given."""
    if GIVEN:
        at = tl.load(pointer + batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s)
        return tl.minimum(tl.maximum(at.to(tl.int64), 0), positions)
    return absent.to(tl.int64)


@triton.jit
def expand_kernel(
    ids,
    starts,
    ends,
    blocks,
    end,
    rows,
    count,
    positions,
    block_size,
    ids_b,
    ids_s,
    ids_c,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    LOG_C: tl.constexpr,
    LOG_WARPS: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = program // rows, program % rows
    total = tl.cast(positions, tl.int64)
    low = row_bound(starts, batch, row, starts_b, starts_s, total, HAS_START, total * 0)
    high = row_bound(ends, batch, row, ends_b, ends_s, total, HAS_END, total)
    origin = low if ANCHORED else low * 0
    first = ((low - origin) // SPARSE_BLOCK).to(tl.int32)
    last = tl.where(low < high, (high - origin + SPARSE_BLOCK - 1) // SPARSE_BLOCK, 0).to(tl.int32)
    ratio = block_size // SPARSE_BLOCK
    width = count * ratio

    C: tl.constexpr = 2**LOG_C
    slot = tl.arange(0, C)
    at = ids + batch.to(tl.int64) * ids_b + row.to(tl.int64) * ids_s
    raw = tl.load(at + slot.to(tl.int64) * ids_c, mask=slot < count, other=-1).to(tl.int64)
    known = (raw >= 0) & (raw <= positions // block_size)
    block = tl.where(known, raw, 0).to(tl.int32) * ratio
    known = known & (tl.minimum(block + ratio, last) > tl.maximum(block, first))
    block = tl.where(known, block, 2147483647)
    ordered, at_slot = sort(block, LOG_C, LOG_WARPS, 0)

    # The row of the result holds the sorted ids until they have been compared with their neighbour.
    line = blocks + program.to(tl.int64) * width
    tl.store(line + at_slot, ordered, mask=at_slot < count)
    tl.debug_barrier()
    block = tl.load(line + slot, mask=slot < count, other=2147483647)
    before = tl.load(line + slot - 1, mask=(slot > 0) & (slot <= count), other=-1)
    tl.debug_barrier()
    fresh = (block != before) & (block != 2147483647) & (slot < count)
    begin = tl.maximum(block, first)
    stop = tl.where(fresh, tl.minimum(block, 2147483647 - ratio) + ratio, 0)
    stop = tl.minimum(stop, last)
    kept = tl.where(fresh, stop - begin, 0)
    offset = tl.cumsum(kept, 0) - kept
    valid = tl.sum(kept, 0)
    shift = (origin // SPARSE_BLOCK).to(tl.int32)
    for j in range(ratio):
        tl.store(line + offset + j, begin + j + shift, mask=j < kept)
    newest = tl.max(tl.where(fresh, stop - 1, 0), 0)
    padding = tl.where(valid > 0, newest + shift, 0)
    for base in range(valid // C * C, width, C):
        spare = base + slot
        tl.store(line + spare, padding + slot * 0, mask=(spare >= valid) & (spare < width))
    tail = high - origin - newest.to(tl.int64) * SPARSE_BLOCK
    tail = tl.minimum(tl.maximum(tail, 1), SPARSE_BLOCK).to(tl.int32)
    tl.store(end + program, tl.where(valid > 0, (valid - 1) * SPARSE_BLOCK + tail, 0))


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: Size,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Candidate ids as unique ascending sparse blocks; see ``dsa::candidate_expand``.

    Args:
        block_ids: [B|1, S|1, C] int32 or int64, C at most 4,096.
        row_start, row_end: [B|1, S|1], the half-open range that a row sees.
        num_positions: T.
        block_size: positions of a candidate block; ``sparse_block``: of an expanded one.
        anchored: blocks are counted from the row's own start.
        out: (blocks, end) to write into.
        warps: of a program, for measurements.

    Returns:
        blocks [B, S, C * block_size / sparse_block] int32 and end [B, S] int32.

    Raises:
        ValueError: more candidates than a kernel holds.
    """
    batch, rows = row_shape(
        "candidate_expand", block_ids=block_ids, row_start=row_start, row_end=row_end
    )
    count = block_ids.shape[2]
    at_most("candidate_expand", "the number of ids a row", count, MAX_CANDIDATES)
    width = count * (block_size // sparse_block)
    given = (None, None) if out is None else out
    blocks = result(given[0], "candidate_expand", block_ids, (batch, rows, width), torch.int32)
    end = result(given[1], "candidate_expand", block_ids, (batch, rows), torch.int32)
    if isinstance(count, int) and count == 0:
        end.zero_()
        return blocks, end
    if isinstance(batch * rows, int) and batch * rows == 0:
        return blocks, end
    ids, ids_b, ids_s = by_row(block_ids, batch, rows, blocks)
    tile = power_of_two(bound(count, MAX_CANDIDATES), 2)
    starts, starts_b, starts_s = by_row(row_start, batch, rows, blocks)
    ends, ends_b, ends_s = by_row(row_end, batch, rows, blocks)
    if warps is None:
        warps = max(1, tile // 1024)
    wrap_triton(expand_kernel)[(batch * rows,)](
        ids,
        starts,
        ends,
        blocks,
        end,
        rows,
        count,
        num_positions,
        block_size,
        ids_b,
        ids_s,
        ids.stride(2),
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        LOG_C=tile.bit_length() - 1,
        LOG_WARPS=warps.bit_length() - 1,
        num_warps=warps,
    )
    return blocks, end


@triton.jit
def column_position(
    blocks, column, blocks_n, low, positions, SPARSE_BLOCK: tl.constexpr, ANCHORED: tl.constexpr
):
    """Position [int64] of a row's columns, out of range where the block is; ``blocks`` its row."""
    block = tl.load(blocks + (column // SPARSE_BLOCK).to(tl.int64) * blocks_n).to(tl.int64)
    block = tl.minimum(tl.maximum(block, -1), positions // SPARSE_BLOCK + 1)
    place = block * SPARSE_BLOCK + column % SPARSE_BLOCK
    if ANCHORED:
        place += low % SPARSE_BLOCK
    return place


@triton.jit
def columns_kernel(
    blocks,
    starts,
    out,
    rows,
    width,
    positions,
    blocks_b,
    blocks_s,
    blocks_n,
    starts_b,
    starts_s,
    HAS_START: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = program // rows, program % rows
    total = tl.cast(positions, tl.int64)
    low = row_bound(starts, batch, row, starts_b, starts_s, total, HAS_START, total * 0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    line = blocks + batch.to(tl.int64) * blocks_b + row.to(tl.int64) * blocks_s
    safe = tl.where(inside, column, 0)
    place = column_position(line, safe, blocks_n, low, total, SPARSE_BLOCK, ANCHORED)
    place = tl.minimum(tl.maximum(place, 0), tl.maximum(total - 1, 0))
    tl.store(out + program.to(tl.int64) * width + column, place, mask=inside)


def candidate_columns(
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Position [B, S, N * sparse_block] int64 of every column; see ``dsa::candidate_columns``."""
    batch, rows = row_shape("candidate_columns", blocks=blocks, row_start=row_start)
    width = blocks.shape[2] * sparse_block
    out = result(out, "candidate_columns", blocks, (batch, rows, width), torch.int64)
    if isinstance(out.numel(), int) and out.numel() == 0:
        return out
    ids, ids_b, ids_s = by_row(blocks, batch, rows, out)
    start, start_b, start_s = by_row(row_start, batch, rows, out)
    tile = 1024
    wrap_triton(columns_kernel)[(batch * rows, (width + tile - 1) // tile)](
        ids,
        start,
        out,
        rows,
        width,
        num_positions,
        ids_b,
        ids_s,
        ids.stride(2),
        start_b,
        start_s,
        HAS_START=row_start is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        TILE=tile,
    )
    return out
