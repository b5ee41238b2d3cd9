"""In which order the two halves of a key's bytes meet the queries of even and of odd dims.

The sum of a product does not mind the order of its inner axis, so long as both operands have the
same one: it is chosen so that threads find the bytes they multiply side by side in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mxfp4 import ue8m0, widen, widen_relative


@triton.jit
def bytes_in_order(HALF: tl.constexpr, BY_LANE: tl.constexpr, NARROW: tl.constexpr):
    """The byte of a key that each place of a product's inner axis takes.

    In the operand of a matrix instruction, lane c of four holds places 2c, 2c + 1, 2c + 8, 2c + 9
    of every sixteen, of 8-bit numbers twice as many. It is given a run of bytes that lie together:
    a wide read, of few scales.
    """
    RUN: tl.constexpr = 4 if NARROW else 2
    place = tl.arange(0, HALF)
    if BY_LANE:
        lane, pair = place // RUN % 4, place // (4 * RUN)
        place = lane * (HALF // 4) + pair * RUN + place % RUN
    return place


@triton.jit
def in_order(x, TILE: tl.constexpr, HALF: tl.constexpr, BY_LANE: tl.constexpr):
    """Numbers of bytes [TILE, HALF / 16, 16] along a product's inner axis."""
    if BY_LANE:
        RUN: tl.constexpr = 4 if x.dtype == tl.float8e5 else 2
        x = tl.permute(tl.reshape(x, [TILE, 4, HALF // (4 * RUN), RUN]), (0, 2, 1, 3))
    return tl.reshape(x, [TILE, HALF])


@triton.jit
def query_nibbles(
    q,
    q_scale,
    most,
    head,
    heads,
    dim,
    q_h,
    q_d,
    s_h,
    s_d,
    HALF: tl.constexpr,
    BY_LANE: tl.constexpr,
    PACKED: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Queries of even and of odd dims, [HALF, HEADS] each, in the order of the keys' bytes.

    Args:
        most: largest UE8M0 scales [HEADS] of packed queries that are widened to e5m2.
    """
    NARROW: tl.constexpr = TYPE == tl.float8e5 or TYPE == tl.float8e4nv
    pair = bytes_in_order(HALF, BY_LANE, NARROW)
    there = (head[None, :] < heads) & (2 * pair[:, None] < dim)
    at = q + head.to(tl.int64)[None, :] * q_h
    if PACKED:
        byte = tl.load(at + pair.to(tl.int64)[:, None] * q_d, mask=there, other=0)
        group = (pair // 16).to(tl.int64)[:, None] * s_d
        scale = tl.load(q_scale + head.to(tl.int64)[None, :] * s_h + group, mask=there, other=127)
        if NARROW:
            even, odd = widen_relative(byte, scale, most[None, :])
        else:
            even, odd = widen(byte, ue8m0(scale), TYPE, False)
    else:
        even = tl.load(at + 2 * pair.to(tl.int64)[:, None] * q_d, mask=there, other=0.0).to(TYPE)
        last = at + (2 * pair.to(tl.int64)[:, None] + 1) * q_d
        odd = tl.load(last, mask=there, other=0.0).to(TYPE)
    return even, odd
