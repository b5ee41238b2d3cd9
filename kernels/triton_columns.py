"""Columns of a row's candidates to positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_expand import row_bound
from .triton_tools import by_row, result, wrap_triton
from .validate import Size, row_shape


@triton.jit
def column_position(
    block, column, low, positions, SPARSE_BLOCK: tl.constexpr, ANCHORED: tl.constexpr
):
    """Position [int64] of a row's columns in their blocks, out of range where the block is."""
    block = tl.minimum(tl.maximum(block.to(tl.int64), -1), positions // SPARSE_BLOCK + 1)
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
    block = tl.load(line + (safe // SPARSE_BLOCK).to(tl.int64) * blocks_n)
    place = column_position(block, safe, low, total, SPARSE_BLOCK, ANCHORED)
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
    ids, ids_b, ids_s = by_row(blocks, batch, rows, blocks)
    start, start_b, start_s = by_row(row_start, batch, rows, blocks)
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
