"""Rotary embedding, Hadamard transform and rounding of vectors that a kernel holds.

Vectors [ROWS, DIM] lie along the last axis in the order of their dims. A rotated dim is
``x[source] * cos + x[partner] * sin`` with the sign of the sine folded in; where both come from
memory, the partner is loaded once more, from the cache, since it lies with another thread.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .triton_tools import by_row
from .validate import Size

ROPES = {"none": 0, "half": 1, "interleaved": 2, "deinterleaved": 3}


@triton.jit
def nearest(x, TYPE: tl.constexpr, EXACT: tl.constexpr):
    """fp32 numbers in ``TYPE``, rounded to nearest even."""
    if EXACT and TYPE == tl.bfloat16:
        # The interpreter cuts off what bf16 has no room for: do it with integers there.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        bits = tl.where(x != x, 0x7FC00000, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def butterflies(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr):
    """Product of [ROWS, DIM] fp32 and Hadamard's matrix of order ``2**LOG_DIM``, block by block."""
    second = (tl.arange(0, 2) == 1)[None, :, None]
    for stage in tl.static_range(LOG_DIM):
        pair = tl.reshape(x, [ROWS * (DIM >> (stage + 1)), 2, 1 << stage])
        # a + b for both, and a - b = (a + b) - 2 b: one exchange between threads, not two.
        total = tl.sum(pair, 1, keep_dims=True)
        x = tl.reshape(tl.where(second, total - 2.0 * pair, total), [ROWS, DIM])
    return x


@triton.jit
def swap_neighbours(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Dims 2i and 2i + 1 of [ROWS, DIM] exchanged."""
    even, odd = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
    return tl.reshape(tl.join(odd, even), [ROWS, DIM])


@triton.jit
def source_dims(channel, ROPE: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr):
    """The dim that each dim is made of, before its partner comes in."""
    if ROPE == 3:
        offset = channel - START
        inside = (offset >= 0) & (offset < ROTARY)
        upper = (offset >= ROTARY // 2).to(tl.int32)
        return tl.where(inside, START + 2 * (offset - upper * (ROTARY // 2)) + upper, channel)
    return channel


@triton.jit
def partner_dims(
    channel,
    ROPE: tl.constexpr,
    START: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """The other dim of each dim's pair; dims that are not rotated have any."""
    offset = channel - START
    if GROUPED:
        # Every stretch of ROTARY dims is treated alike, so that loads stay wide.
        return channel // ROTARY * ROTARY + (channel + ROTARY // 2) % ROTARY
    inside = (offset >= 0) & (offset < ROTARY)
    upper = (offset >= ROTARY // 2).to(tl.int32)
    if ROPE == 3:
        other = START + 2 * (offset - upper * (ROTARY // 2)) + 1 - upper
    else:
        other = channel + (ROTARY // 2) * (1 - 2 * upper)
    return tl.where(inside, other, channel)


@triton.jit
def angle_dims(channel, ROPE: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr):
    """Whether a dim is rotated, the place of its angle, and the sign of its sine."""
    offset = channel - START
    inside = (offset >= 0) & (offset < ROTARY)
    if ROPE == 2:
        which, upper = offset // 2, offset % 2
    else:
        upper = (offset >= ROTARY // 2).to(tl.int32)
        which = offset - upper * (ROTARY // 2)
    return inside, tl.where(inside, which, 0), (2 * upper - 1).to(tl.float32)


def angle_arguments(
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rows: tuple[Size, Size],
    stand_in: Tensor,
) -> tuple[Any, ...]:
    """Pointers, table size and strides of the angles of rows [B, S]."""
    if cos is None or sin is None:
        return (stand_in,) * 3 + (0,) * 9
    if positions is None:
        lines, cos_b, cos_s = by_row(cos, *rows, stand_in)
        others, sin_b, sin_s = by_row(sin, *rows, stand_in)
        steps = (cos_b, cos_s, cos.stride(-1), sin_b, sin_s, sin.stride(-1))
        return (lines, others, stand_in, 0, *steps, 0, 0)
    places, pos_b, pos_s = by_row(positions, *rows, stand_in)
    steps = (0, cos.stride(0), cos.stride(1), 0, sin.stride(0), sin.stride(1))
    return (cos, sin, places, cos.shape[0], *steps, pos_b, pos_s)


def rope_constants(
    cos: Tensor | None, positions: Tensor | None, rope: str, rope_start: int, dim: int
) -> dict[str, Any]:
    """Compile-time arguments of a rotation; ``dim`` is the padded head dim."""
    kind = "none" if cos is None else rope
    rotary = 2 if cos is None else max(2, 2 * int(cos.shape[-1]))
    if cos is not None and cos.shape[-1] == 0:
        kind = "none"
    aligned = rotary & (rotary - 1) == 0 and rope_start % rotary == 0 and dim % rotary == 0
    return {
        "TABLE": cos is not None and positions is not None,
        "ROPE": ROPES[kind],
        "START": rope_start if kind != "none" else 0,
        "ROTARY": rotary,
        "GROUPED": kind == "half" and aligned,
    }
