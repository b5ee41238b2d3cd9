"""From a row's few survivors to its result: the exact cut, the order, and empty slots.

A program takes one row with few warps, so that little of the sort crosses warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_columns import column_position
from .triton_expand import within
from .triton_tools import (
    candidate_column,
    candidate_score,
    key_score,
    middle,
    pack,
    packed_column,
    packed_key,
    single,
    sort,
)


@triton.jit
def _exact_bar(packed, valid, count, topk):
    """The ``topk``-th largest of ``count`` distinct packed candidates, of which there are more."""
    # The second condition is for candidates that repeat, which no selection gives but which a
    # compiler that times kernels on made-up memory does.
    bar = tl.min(tl.where(valid, packed, 2**63 - 1), 0)
    above = tl.max(packed, 0) + 1
    while (count != topk) & (above - 1 > bar):
        half = middle(bar, above)
        found = tl.sum((packed >= half).to(tl.int32), 0)
        if found >= topk:
            bar = half
            count = found
        else:
            above = half
    return bar


@triton.jit
def finish(
    survivors,
    starts,
    blocks,
    values,
    index,
    rows,
    topk,
    positions,
    fill,
    starts_b,
    starts_s,
    blocks_b,
    blocks_s,
    blocks_n,
    HAS_START: tl.constexpr,
    SORTED: tl.constexpr,
    MAP: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    INFINITE_FILL: tl.constexpr,
    LOG_ROOM: tl.constexpr,
    LOG_K: tl.constexpr,
    LOG_WARPS: tl.constexpr,
):
    """Writes the result of one row a program.

    Args:
        survivors: [B * S, 2**LOG_ROOM] int64 candidates in any order; overwritten.
        MAP: 0 writes columns int32, -1 where empty; 1 positions through ``blocks``; 2 columns are
            positions. 1 and 2 give empty slots the largest positions not selected.
    """
    row_id = tl.program_id(0)
    batch, row = (row_id // rows).to(tl.int64), (row_id % rows).to(tl.int64)
    context = tl.cast(positions, tl.int64)
    own = survivors + row_id.to(tl.int64) * 2**LOG_ROOM
    values += row_id.to(tl.int64) * topk
    index += row_id.to(tl.int64) * topk
    slot = tl.arange(0, 2**LOG_ROOM)
    stored = tl.load(own + slot)
    packed = pack(candidate_score(stored), candidate_column(stored))
    kept = packed > -(2**63)
    total = tl.sum(kept.to(tl.int32), 0)
    found = tl.minimum(total, topk)
    if total > topk:
        kept = packed >= _exact_bar(packed, kept, total, topk)
    if SORTED:
        order = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(own + order, packed, mask=kept)
        tl.debug_barrier()
        some = tl.arange(0, 2**LOG_K)
        packed = tl.load(own + some, mask=some < found, other=-(2**63))
        packed, slot = sort(packed, LOG_K, LOG_WARPS, 1)
        kept = slot < found
    else:
        slot = tl.cumsum(kept.to(tl.int32), 0) - 1
        kept = kept & (slot < found)
    column = packed_column(packed)
    place = column.to(tl.int64)
    if MAP == 1:
        low = context * 0
        if HAS_START:
            low = within(tl.load(starts + batch * starts_b + row * starts_s), context)
        safe = tl.where(kept, column, 0)
        at = blocks + batch * blocks_b + row * blocks_s
        block = tl.load(at + (safe // SPARSE_BLOCK).to(tl.int64) * blocks_n)
        place = column_position(block, safe, low, context, SPARSE_BLOCK, ANCHORED)
        place = tl.minimum(tl.maximum(place, 0), context - 1)
    tl.store(values + slot, key_score(packed_key(packed)), mask=kept)
    tl.store(index + slot, place.to(index.dtype.element_ty), mask=kept)
    if found < topk:
        turn = tl.arange(0, 2**LOG_K)
        empty = (turn >= found) & (turn < topk)
        if INFINITE_FILL:
            nothing = tl.full([2**LOG_K], float("-inf"), tl.float32)
        else:
            nothing = tl.zeros([2**LOG_K], tl.float32) + single(fill)
        tl.store(values + turn, nothing, mask=empty)
        if MAP == 0:
            tl.store(index + turn, tl.full([2**LOG_K], -1, tl.int32), mask=empty)
        else:
            hidden, free, rank = hidden_positions(own, place, kept, context, topk, 2**LOG_K)
            rank += found
            tl.store(index + rank, hidden, mask=free & (rank < topk))


@triton.jit
def hidden_positions(flags, place, kept, positions, slots, K: tl.constexpr):
    """Positions that ``place`` does not hold, from the last one down.

    At most ``slots`` positions are held, so that the last ``slots`` of the context have enough.

    Returns:
        positions [K] int64, whether each is one that is not held, and its turn among those.
    """
    turn = tl.arange(0, K)
    tl.debug_barrier()
    tl.store(flags + turn, tl.zeros([K], tl.int64))
    tl.debug_barrier()
    back = positions - 1 - place
    tl.store(flags + back, back * 0 + 1, mask=kept & (back < slots))
    tl.debug_barrier()
    free = (tl.load(flags + turn) == 0) & (turn < slots)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    return positions - 1 - turn, free, rank
