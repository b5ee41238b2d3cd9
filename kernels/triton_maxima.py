"""Largest visible score of every block of positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_expand import row_bound
from .triton_tools import by_row, key_score, order_key, power_of_two, single, wrap_triton
from .validate import Size


@triton.jit
def block_max_kernel(
    scores,
    starts,
    ends,
    mask,
    out,
    rows,
    positions,
    count,
    block_size,
    fill,
    pin,
    scores_b,
    scores_s,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    mask_b,
    mask_s,
    mask_t,
    out_b,
    out_s,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_MASK: tl.constexpr,
    INFINITE_FILL: tl.constexpr,
    PIN: tl.constexpr,
    INFINITE_PIN: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = (program // rows).to(tl.int64), (program % rows).to(tl.int64)
    total = tl.cast(positions, tl.int64)
    low = row_bound(starts, batch, row, starts_b, starts_s, total, HAS_START, total * 0)
    high = row_bound(ends, batch, row, ends_b, ends_s, total, HAS_END, total)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    hidden = tl.full([TILE, INNER], float("-inf"), tl.float32)
    if not INFINITE_FILL:
        hidden = tl.zeros([TILE, INNER], tl.float32) + single(fill)
    best = tl.full([TILE], -(2**31), tl.int32)
    line = scores + batch * scores_b + row * scores_s
    for start in range(0, block_size, INNER):
        inner = start + tl.arange(0, INNER)
        place = block.to(tl.int64)[:, None] * block_size + inner[None, :]
        seen = (place >= low) & (place < high) & (inner[None, :] < block_size)
        if HAS_MASK:
            at = mask + batch * mask_b + row * mask_s + place * mask_t
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        score = tl.where(seen, tl.load(line + place, mask=seen, other=0.0), hidden)
        key = tl.where(inner[None, :] < block_size, order_key(score), -(2**31))
        best = tl.maximum(best, tl.max(key, 1))
    value = key_score(best)
    if PIN:
        newest = tl.where(high > 0, (high - 1) // block_size, -1)
        if INFINITE_PIN:
            value = tl.where(block == newest, float("inf"), value)
        else:
            value = tl.where(block == newest, single(pin), value)
    tl.store(out + batch * out_b + row * out_s + block, value, mask=block < count)


def block_maxima(
    scores: Tensor,
    out: Tensor,
    *,
    positions: Size,
    block_size: int,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    fill: float | None,
    pin: float | None = None,
) -> None:
    """Largest visible score of every block into ``out`` [B, S, blocks]; hidden ones are ``fill``.

    Args:
        scores: what :func:`score_rows` wrote.
        pin: the value of the block of position row_end - 1, or None.
    """
    batch, rows, count = out.shape
    starts, starts_b, starts_s = by_row(row_start, batch, rows, scores)
    ends, ends_b, ends_s = by_row(row_end, batch, rows, scores)
    masks, mask_b, mask_s = by_row(mask, batch, rows, scores)
    inner = min(power_of_two(block_size), 128)
    tile = max(1, 1024 // inner)
    infinite_fill = fill is None or fill == float("-inf")
    infinite_pin = pin is None or pin == float("inf")
    wrap_triton(block_max_kernel)[(batch * rows, (count + tile - 1) // tile)](
        scores,
        starts,
        ends,
        masks.view(torch.int8) if mask is not None else masks,
        out,
        rows,
        positions,
        count,
        block_size,
        0.0 if infinite_fill else fill,
        0.0 if infinite_pin else pin,
        scores.stride(0),
        scores.stride(1),
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        mask_b,
        mask_s,
        0 if mask is None else mask.stride(2),
        out.stride(0),
        out.stride(1),
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        HAS_MASK=mask is not None,
        INFINITE_FILL=infinite_fill,
        PIN=pin is not None,
        INFINITE_PIN=infinite_pin,
        TILE=tile,
        INNER=inner,
        num_warps=4,
    )
