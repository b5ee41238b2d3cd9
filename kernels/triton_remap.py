"""Selected columns back to positions, where selection and remap are separate ops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_columns import column_position
from .triton_expand import within
from .triton_finish import hidden_positions
from .triton_split import MAX_TOPK
from .triton_tools import at_most, bound, by_row, power_of_two, require, result, single, wrap_triton
from .triton_topk import SCORES
from .validate import Size


@triton.jit
def remap_kernel(
    values,
    columns,
    blocks,
    starts,
    out,
    index,
    scratch,
    rows,
    topk,
    width,
    positions,
    fill,
    values_b,
    values_s,
    values_k,
    columns_b,
    columns_s,
    columns_k,
    blocks_b,
    blocks_s,
    blocks_n,
    starts_b,
    starts_s,
    HAS_START: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    INFINITE_FILL: tl.constexpr,
    K: tl.constexpr,
):
    row_id = tl.program_id(0)
    batch, row = (row_id // rows).to(tl.int64), (row_id % rows).to(tl.int64)
    total = tl.cast(positions, tl.int64)
    low = total * 0
    if HAS_START:
        low = within(tl.load(starts + batch * starts_b + row * starts_s), total)
    slot = tl.arange(0, K)
    inside = slot < topk
    at = columns + batch * columns_b + row * columns_s + slot.to(tl.int64) * columns_k
    column = tl.load(at, mask=inside, other=0)
    at = values + batch * values_b + row * values_s + slot.to(tl.int64) * values_k
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    empty = inside & ((column < 0) | (width == 0))
    column = tl.minimum(tl.maximum(column.to(tl.int64), 0), tl.maximum(width - 1, 0))
    line = blocks + batch * blocks_b + row * blocks_s
    if width > 0:
        block = tl.load(line + (column // SPARSE_BLOCK).to(tl.int64) * blocks_n)
        place = column_position(block, column, low, total, SPARSE_BLOCK, ANCHORED)
    else:
        place = column
    place = tl.minimum(tl.maximum(place, 0), total - 1)
    lacking = tl.sum(empty.to(tl.int32), 0)
    if lacking > 0:
        own = scratch + row_id.to(tl.int64) * K
        hidden, free, rank = hidden_positions(own, place, inside & (empty == 0), total, topk, K)
        tl.debug_barrier()
        tl.store(own + rank, hidden, mask=free)
        tl.debug_barrier()
        turn = tl.cumsum(empty.to(tl.int32), 0) - 1
        place = tl.where(empty, tl.load(own + turn, mask=empty, other=0), place)
    nothing = tl.full([K], float("-inf"), tl.float32)
    if not INFINITE_FILL:
        nothing = tl.zeros([K], tl.float32) + single(fill)
    to = row_id.to(tl.int64) * topk + slot
    tl.store(out + to, tl.where(empty, nothing, value), mask=inside)
    tl.store(index + to, place, mask=inside)


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Columns to positions; see ``dsa::topk_remap``. At most 4,096 slots a row."""
    op = "topk_remap"
    require(op, "values", values, SCORES)
    batch, rows, slots = values.shape
    at_most(op, "the number of slots a row", slots, MAX_TOPK)
    given = (None, None) if out is None else out
    scores = result(given[0], op, values, (batch, rows, slots), torch.float32)
    index = result(given[1], op, values, (batch, rows, slots), torch.int64)
    if isinstance(scores.numel(), int) and scores.numel() == 0:
        return scores, index
    k = power_of_two(bound(slots, MAX_TOPK), 16)
    lines, blocks_b, blocks_s = by_row(blocks, batch, rows, columns)
    start, start_b, start_s = by_row(row_start, batch, rows, columns)
    infinite = fill is None or fill == float("-inf")
    wrap_triton(remap_kernel)[(batch * rows,)](
        values,
        columns,
        lines,
        start,
        scores,
        index,
        values.new_empty((batch * rows, k), dtype=torch.int64),
        rows,
        slots,
        blocks.shape[2] * sparse_block,
        num_positions,
        0.0 if infinite else fill,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        columns.stride(0),
        columns.stride(1),
        columns.stride(2),
        blocks_b,
        blocks_s,
        blocks.stride(2),
        start_b,
        start_s,
        HAS_START=row_start is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        INFINITE_FILL=infinite,
        K=k,
        num_warps=max(1, min(8, k // 128)),
    )
    return scores, index
