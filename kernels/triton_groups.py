"""Largest scores of groups of a row's columns, for selections that no scorer has kept any for.

One read of the scores and nothing else, at the speed of memory. The selection then needs few warps
a row: see ``triton_select``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_expand import within
from .triton_tiles import TileMaxima
from .triton_tools import by_row, wrap_triton
from .validate import Size

_AT_ONCE = 1024
_DEPTH = 4


@triton.jit
def _larger(most, some):
    """The larger of numbers; NaN does not count."""
    some = some.to(tl.float32)
    return tl.maximum(most, tl.where(some == some, some, float("-inf")))


@triton.jit
def group_kernel(
    source,
    starts,
    ends,
    out,
    rows,
    positions,
    width,
    source_b,
    source_s,
    source_w,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    TILE: tl.constexpr,
    SHARE: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """AT_ONCE groups of a row a program; group g holds the columns that leave g beside GROUPS."""
    row_id = tl.program_id(0)
    batch, row = (row_id // rows).to(tl.int64), (row_id % rows).to(tl.int64)
    whole = tl.cast(positions, tl.int64)
    low, stop = tl.cast(0, tl.int32), tl.cast(width, tl.int32)
    if HAS_START:
        low = within(tl.load(starts + batch * starts_b + row * starts_s), whole).to(tl.int32)
    if HAS_END:
        stop = within(tl.load(ends + batch * ends_b + row * ends_s), whole).to(tl.int32)
    if TILE > 1:
        low = low // TILE * SHARE
        if HAS_END:
            stop = (stop + TILE - 1) // TILE * SHARE
    line = source + batch * source_b + row * source_s
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    place = tl.arange(0, DEPTH)[:, None] * GROUPS + group[None, :]
    most = tl.full([DEPTH, AT_ONCE], float("-inf"), tl.float32)
    step: tl.constexpr = DEPTH * GROUPS
    base = low // step * step
    if not HAS_START:
        # Without a mask, so that a thread loads several columns at once.
        for whole_step in range(0, stop // step * step, step):
            column = whole_step + place
            most = _larger(most, tl.load(line + column.to(tl.int64) * source_w))
        base = stop // step * step
    for masked in range(base, stop, step):
        column = masked + place
        asked = (column >= low) & (column < stop)
        at = line + column.to(tl.int64) * source_w
        most = _larger(most, tl.load(at, mask=asked, other=float("-inf")))
    tl.store(out + row_id.to(tl.int64) * GROUPS + group, tl.max(most, 0))


def group_maxima(
    scores: Tensor,
    groups: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    positions: Size | None = None,
    kept: TileMaxima | None = None,
) -> Tensor:
    """Largest scores fp32 [B * S, groups] of disjoint groups of each row's columns.

    Args:
        scores: [B, S, W] fp16, bf16 or fp32, any strides.
        groups: a power of two.
        starts, ends: [B|1, S|1]: columns before and from there on do not count.
        positions, kept: where columns are themselves maxima of those of ``positions`` that a row
            sees, as ``kept``; ``starts`` and ``ends`` are positions.

    Returns:
        -inf where a group has no column that counts. NaN does not count.
    """
    batch, rows, width = scores.shape
    out = scores.new_empty((batch * rows, groups), dtype=torch.float32)
    start, starts_b, starts_s = by_row(starts, batch, rows, scores)
    end, ends_b, ends_s = by_row(ends, batch, rows, scores)
    at_once = min(groups, _AT_ONCE)
    wrap_triton(group_kernel)[(batch * rows, groups // at_once)](
        scores,
        start,
        end,
        out,
        rows,
        width if positions is None else positions,
        width,
        scores.stride(0),
        scores.stride(1),
        scores.stride(2),
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        HAS_START=starts is not None,
        HAS_END=ends is not None,
        TILE=1 if kept is None else kept.tile,
        SHARE=1 if kept is None else kept.share,
        GROUPS=groups,
        AT_ONCE=at_once,
        DEPTH=_DEPTH,
        num_warps=4,
    )
    return out
