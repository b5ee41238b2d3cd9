"""Queries for the scorers in one launch: rotation, Hadamard, quantisation, head weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantise import FP8
from .serving_results import fused_indexer_q as results_of
from .triton_mxfp4 import fp8_rows, mxfp4_rows
from .triton_rotate import (
    angle_arguments,
    angle_dims,
    butterflies,
    nearest,
    partner_dims,
    rope_constants,
    source_dims,
    swap_neighbours,
)
from .triton_sparse import MAX_DIM, NUMBERS
from .triton_tools import (
    at_most,
    bound,
    capability,
    interpreted,
    power_of_two,
    processors,
    require,
    result,
    single,
    wrap_triton,
)
from .validate import Size

QUANTS = {"none": 0, "fp8": 1, "mxfp4": 2}
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def rounds_by_integers(index: int | None) -> bool:
    """Whether fp8 codes are made by integer arithmetic: there is no such conversion to use."""
    return interpreted() or (torch.cuda.is_available() and capability(index) < (8, 9))


@triton.jit
def fused_q_kernel(
    q,
    weights,
    cos,
    sin,
    positions,
    q_out,
    q_scale,
    weights_out,
    weights_low,
    rows,
    heads,
    dim,
    table,
    softmax_scale,
    head_scale,
    floor,
    spread,
    q_b,
    q_s,
    q_h,
    q_d,
    w_b,
    w_s,
    w_h,
    cos_b,
    cos_s,
    cos_d,
    sin_b,
    sin_s,
    sin_d,
    pos_b,
    pos_s,
    TABLE: tl.constexpr,
    ROPE: tl.constexpr,
    START: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPED: tl.constexpr,
    HADAMARD: tl.constexpr,
    QUANT: tl.constexpr,
    POW2: tl.constexpr,
    FOLD: tl.constexpr,
    LOW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LOG_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    """One row and HEADS of its heads a program."""
    program = tl.program_id(0)
    batch, row = (program // rows).to(tl.int64), (program % rows).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, DIM)
    real = head < heads
    at = q + batch * q_b + row * q_s + head.to(tl.int64)[:, None] * q_h
    there = real[:, None]
    if PADDED:
        there = there & (channel[None, :] < dim)
    source = source_dims(channel, ROPE, START, ROTARY)
    x = tl.load(at + source.to(tl.int64)[None, :] * q_d, mask=there, other=0.0).to(tl.float32)
    if ROPE != 0:
        if ROPE == 2:
            other = swap_neighbours(x, HEADS, DIM)
        else:
            partner = partner_dims(channel, ROPE, START, ROTARY, GROUPED)
            close = there & (partner[None, :] < dim)
            other = tl.load(at + partner.to(tl.int64)[None, :] * q_d, mask=close, other=0.0)
            other = other.to(tl.float32)
        inside, which, sign = angle_dims(channel, ROPE, START, ROTARY)
        line = row
        if TABLE:
            line = tl.load(positions + batch * pos_b + row * pos_s).to(tl.int64)
            line = tl.minimum(tl.maximum(line, 0), table - 1)
        c = tl.load(cos + batch * cos_b + line * cos_s + which * cos_d, mask=inside, other=1.0)
        s = tl.load(sin + batch * sin_b + line * sin_s + which * sin_d, mask=inside, other=0.0)
        s = s.to(tl.float32) * sign
        turned = x * c.to(tl.float32)[None, :] + other * s[None, :]
        turned = nearest(turned, TYPE, EXACT).to(tl.float32)
        x = tl.where(inside[None, :], turned, x)
    if HADAMARD:
        x = butterflies(x, HEADS, DIM, LOG_DIM) * single(spread)
        x = nearest(x, TYPE, EXACT).to(tl.float32)

    weight = tl.load(
        weights + batch * w_b + row * w_s + head.to(tl.int64) * w_h, mask=real, other=0.0
    ).to(tl.float32)
    line = program.to(tl.int64) * heads + head
    if QUANT == 1:
        codes, scale = fp8_rows(x, single(floor), POW2, INTEGERS)
        tl.store(q_out + line[:, None] * dim + channel[None, :], codes, mask=there)
        tl.store(q_scale + line, scale, mask=real)
        if FOLD:
            weight *= scale
    elif QUANT == 2:
        packed, scale = mxfp4_rows(x, HEADS, DIM)
        byte = tl.arange(0, DIM // 2)
        to = q_out + line[:, None] * (dim // 2) + byte[None, :]
        tl.store(to, packed, mask=real[:, None] & (byte[None, :] < dim // 2))
        group = tl.arange(0, DIM // 32)
        to = q_scale + line[:, None] * (dim // 32) + group[None, :]
        tl.store(to, scale, mask=real[:, None] & (group[None, :] < dim // 32))
    else:
        to = q_out + line[:, None] * dim + channel[None, :]
        tl.store(to, nearest(x, TYPE, EXACT), mask=there)
    weight = weight * single(softmax_scale) * single(head_scale)
    tl.store(weights_out + line, nearest(weight, weights_out.dtype.element_ty, EXACT), mask=real)
    if LOW:
        tl.store(weights_low + line, nearest(weight, tl.bfloat16, EXACT), mask=real)


def heads_a_program(rows: Size, heads: int, dim: int, device: int | None) -> int:
    """Heads that one program takes: 4,096 numbers, fewer where the grid would not fill the GPU."""
    most = max(1, 4096 // dim)
    while most > 4 and bound(rows, 2**20) * -(-heads // most) < 2 * processors(device):
        most //= 2
    return min(most, power_of_two(heads))


def fused_indexer_q(
    q: Tensor,
    weights: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope: str = "half",
    rope_start: int = 0,
    hadamard: bool = False,
    quant: str = "none",
    pow2_scale: bool = True,
    floor: float = 1e-4,
    fold_scale: bool = True,
    softmax_scale: float = 1.0,
    head_scale: float = 1.0,
    weights_out_dtype: torch.dtype | None = None,
    bf16_weights: bool = False,
    out: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, their scales and head weights; see ``dsa::fused_indexer_q``.

    Args:
        q: [B, S, H, D] fp16, bf16 or fp32, D at most 256; weights, cos and sin likewise.
        out: results to write into, contiguous; None where a new one is wanted.
    """
    op = "fused_indexer_q"
    for name, tensor in (("q", q), ("weights", weights), ("cos", cos), ("sin", sin)):
        require(op, name, tensor, NUMBERS)
    batch, rows, heads, dim = q.shape
    at_most(op, "the head dim", dim, MAX_DIM)
    shapes = results_of(
        q,
        weights,
        quant=quant,
        weights_out_dtype=weights_out_dtype,
        bf16_weights=bf16_weights,
    )
    given = (None,) * 4 if out is None else out
    values, scales, wide, low = (
        # fp8 is written as bytes.
        result(to, op, q, shape, dtype if to is not None or dtype != FP8 else torch.uint8)
        for to, (shape, dtype) in zip(given, shapes, strict=True)
    )
    fp8 = quant == "fp8"
    outs = (values.view(FP8) if fp8 and values.dtype != FP8 else values, scales, wide, low)
    if isinstance(q.numel(), int) and q.numel() == 0:
        if isinstance(weights.numel(), int) and weights.numel() and dim == 0:
            raise ValueError(f"{op}: the head dim is 0")
        return outs
    padded = power_of_two(bound(dim, MAX_DIM), 32)
    angles = angle_arguments(cos, sin, positions, (batch, rows), q)
    tile = heads_a_program(batch * rows, bound(heads, 2**16), padded, q.device.index)
    wrap_triton(fused_q_kernel)[(batch * rows, (heads + tile - 1) // tile)](
        q,
        weights,
        *angles[:3],
        values.view(torch.uint8) if values.dtype == FP8 else values,
        scales,
        wide,
        low,
        rows,
        heads,
        dim,
        angles[3],
        float(softmax_scale),
        float(head_scale),
        float(floor),
        int(dim) ** -0.5 if hadamard else 1.0,
        *q.stride(),
        *weights.stride(),
        *angles[4:],
        **rope_constants(cos, positions, rope, rope_start, padded),
        HADAMARD=hadamard,
        QUANT=QUANTS[quant],
        POW2=pow2_scale,
        FOLD=fold_scale,
        LOW=bf16_weights,
        HEADS=tile,
        DIM=padded,
        LOG_DIM=int(dim).bit_length() - 1 if hadamard else 0,
        PADDED=not (isinstance(dim, int) and dim == padded),
        TYPE=TYPES[q.dtype],
        EXACT=interpreted(),
        INTEGERS=rounds_by_integers(q.device.index),
        num_warps=4,
    )
    return outs
