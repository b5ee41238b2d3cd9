"""The kernel that scores all positions, for a few rows at a time.

Products never leave a program: only scores [rows, T] are written. A tile of keys stays on chip
while the rows of a group pass over it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_scores import relu, relu_scale
from .triton_tools import single


@triton.jit
def _rows_of(at_row, last, own, PAIR: tl.constexpr, EVEN: tl.constexpr):
    """The first row [int64] of a product, and which of its rows ``own`` [PAIR] are there."""
    if EVEN:
        return tl.cast(tl.maximum(tl.minimum(at_row, last - PAIR), 0), tl.int64), own >= 0
    return tl.cast(at_row, tl.int64), at_row + own < last


@triton.jit
def dense_scores(
    q,
    k,
    weights,
    starts,
    ends,
    key_scale,
    mask,
    flags,
    bias,
    maxima,
    out,
    rows,
    heads,
    dim,
    positions,
    group,
    scale,
    q_b,
    q_s,
    q_h,
    q_d,
    k_b,
    k_t,
    k_d,
    w_b,
    w_s,
    w_h,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    scale_b,
    scale_t,
    mask_b,
    mask_s,
    mask_t,
    flags_b,
    flags_s,
    bias_b,
    bias_s,
    bias_t,
    maxima_r,
    out_b,
    out_s,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    FLAGS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAXIMA: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    WARPS: tl.constexpr,
    TYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of TILE positions for ``group`` rows; tiles that none of them sees are left out.

    Args:
        EVEN: there are PAIR rows or more, so that no product needs rows that are not there: the
            last one of a group begins early and finds some scores a second time.
        flags: one bit a block of FLAGS positions, where FLAGS is not 0; see ``triton_flags``.
        maxima: fp32 [B * S, ...], the largest scores of 8 * WARPS groups of every tile, of
            positions that the row sees.
    """
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, rows)
    base = tl.program_id(0) * TILE
    total = tl.cast(positions, tl.int64)

    # What the group sees together; GROUP is a power of two that holds ``group``.
    row = first + tl.arange(0, GROUP)
    mine = tl.where(row < last, row, first).to(tl.int64)
    low, high = total * 0, total
    if HAS_START:
        low = tl.load(starts + batch * starts_b + mine * starts_s).to(tl.int64)
        low = tl.min(tl.minimum(tl.maximum(low, 0), total), 0)
    if HAS_END:
        high = tl.load(ends + batch * ends_b + mine * ends_s).to(tl.int64)
        high = tl.max(tl.minimum(tl.maximum(high, 0), total), 0)
    if (base < high) & (base + TILE > low):
        place = base + tl.arange(0, TILE)
        here = place < positions
        wide = place.to(tl.int64)
        channel = tl.arange(0, DIM)
        wanted = here[:, None]
        if PADDED_DIM:
            wanted = wanted & (channel[None, :] < dim)
        key_at = k + batch * k_b + wide[:, None] * k_t + channel.to(tl.int64)[None, :] * k_d
        key = tl.load(key_at, mask=wanted, other=0.0).to(TYPE)
        factor = tl.full([TILE], 1.0, tl.float32) * single(scale) * relu_scale(TYPE)
        if HAS_SCALE:
            at = key_scale + batch * scale_b + wide * scale_t
            factor *= tl.load(at, mask=here, other=0.0).to(tl.float32)
        if HAS_MAXIMA:
            # Scores of no position are NaN, which no maximum counts.
            factor = tl.where(here, factor, float("nan"))
        # One product serves PAIR rows: a wider one reads less shared memory for its work.
        line = tl.arange(0, PAIR * HEADS)
        which = line // HEADS
        head = line % HEADS
        q_at = (
            q + batch * q_b + which.to(tl.int64)[None, :] * q_s + head.to(tl.int64)[None, :] * q_h
        )
        q_at = q_at + channel.to(tl.int64)[:, None] * q_d
        w_at = weights + batch * w_b + which.to(tl.int64) * w_s + head.to(tl.int64) * w_h
        own = tl.arange(0, PAIR)
        to = out + batch * out_b + wide[:, None] + own.to(tl.int64)[None, :] * out_s
        if FLAGS:
            # Words are loaded a row ahead: nothing else would hide the time that they take.
            words = flags + batch * flags_b + own.to(tl.int64)[None, :] * flags_s
            words = words + (place // FLAGS >> 5)[:, None]
            bit = (place // FLAGS & 31)[:, None]
            begin, real = _rows_of(first, last, own, PAIR, EVEN)
            word = tl.load(words + begin * flags_s, here[:, None] & real[None, :])
        for at_row in tl.range(first, last, PAIR, num_stages=STAGES):
            row64, real = _rows_of(at_row, last, own, PAIR, EVEN)
            asked = head < heads
            if not EVEN:
                asked = asked & (row64 + which < last)
            if EVEN and not PADDED_HEADS and not PADDED_DIM:
                query = tl.load(q_at + row64 * q_s)
                weight = tl.load(w_at + row64 * w_s).to(tl.float32)
            else:
                shape = asked[None, :] & (channel[:, None] < dim)
                query = tl.load(q_at + row64 * q_s, mask=shape, other=0.0)
                weight = tl.load(w_at + row64 * w_s, mask=asked, other=0.0).to(tl.float32)
            if TYPE == tl.float32:
                product = tl.dot(key, query.to(TYPE), input_precision="ieee")
            else:
                product = tl.dot(key, query.to(TYPE))
            shown = relu(product, TYPE) * weight[None, :]
            if PADDED_HEADS:
                # An infinite key would turn the zero queries of heads that are none into NaN.
                shown = tl.where(asked[None, :], shown, 0.0)
            score = tl.sum(tl.reshape(shown, [TILE, PAIR, HEADS]), 2)
            score *= factor[:, None]
            there = here[:, None] & real[None, :]
            if HAS_BIAS:
                bias_at = bias + batch * bias_b + (row64 + own)[None, :] * bias_s
                bias_at = bias_at + wide[:, None] * bias_t
                score += tl.load(bias_at, mask=there, other=0.0).to(tl.float32)
            if HAS_MASK:
                mask_at = mask + batch * mask_b + (row64 + own)[None, :] * mask_s
                mask_at = mask_at + wide[:, None] * mask_t
                open_to = tl.load(mask_at, mask=there, other=0) != 0
                score = tl.where(open_to, score, float("-inf"))
            if FLAGS:
                score = tl.where((word >> bit) & 1 != 0, score, float("-inf"))
                ahead, real = _rows_of(at_row + PAIR, last, own, PAIR, EVEN)
                word = tl.load(words + ahead * flags_s, mask=here[:, None] & real[None, :])
            tl.store(to + row64 * out_s, score, mask=there)
            if HAS_MAXIMA:
                line64 = batch * rows + row64 + own
                if HAS_START:
                    bounds = starts + batch * starts_b + (row64 + own) * starts_s
                    begins = tl.load(bounds, mask=real, other=0).to(tl.int64)
                    score = tl.where(wide[:, None] >= begins[None, :], score, float("-inf"))
                if HAS_END:
                    bounds = ends + batch * ends_b + (row64 + own) * ends_s
                    stops = tl.load(bounds, mask=real, other=0).to(tl.int64)
                    score = tl.where(wide[:, None] < stops[None, :], score, float("-inf"))
                # A thread holds positions p and p + 8 of each of its warp's sixteens.
                split = tl.reshape(score, [TILE // (16 * WARPS), WARPS, 2, 8, PAIR])
                most = tl.reshape(tl.max(tl.max(split, 2), 0), [8 * WARPS, PAIR])
                nth = tl.program_id(0) * (8 * WARPS) + tl.arange(0, 8 * WARPS)
                most_at = maxima + nth.to(tl.int64)[:, None] + (line64 * maxima_r)[None, :]
                tl.store(most_at, most, mask=(nth >= 0)[:, None] & real[None, :])
