"""Keys normalised, rotated, quantised and written into the pages of a cache in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .serving_results import indexer_k_quant as key_results
from .triton_fused_q import QUANTS, TYPES, rounds_by_integers
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
    interpreted,
    power_of_two,
    processors,
    require,
    result,
    single,
    wrap_triton,
)
from .validate import Size

NORMS = {"none": 0, "layer": 1, "rms": 2}


@triton.jit
def _affine(x, weight, bias, there, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Normalised rows times the weights of their dims, plus the biases."""
    if HAS_WEIGHT:
        x *= tl.load(weight, mask=there, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        x += tl.load(bias, mask=there, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def key_kernel(
    k,
    norm_weight,
    norm_bias,
    cos,
    sin,
    positions,
    slots,
    values,
    scales,
    count,
    dim,
    table,
    pages,
    stride,
    eps,
    floor,
    spread,
    k_n,
    k_d,
    weight_d,
    bias_d,
    slot_n,
    cos_b,
    cos_s,
    cos_d,
    sin_b,
    sin_s,
    sin_d,
    pos_b,
    pos_s,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CACHE: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE: tl.constexpr,
    ROPE: tl.constexpr,
    START: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPED: tl.constexpr,
    HADAMARD: tl.constexpr,
    QUANT: tl.constexpr,
    POW2: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    LOG_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    """TOKENS keys a program. With CACHE, scales go where values do, behind those of their page."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, DIM)
    inner = channel < dim
    real = row < count
    row64 = row.to(tl.int64)
    # What is written waits for the slots, what is read does not.
    written = real
    token = row64
    base = row64 * 0
    if CACHE:
        slot = tl.load(slots + row64 * slot_n, mask=real, other=-1).to(tl.int64)
        written = real & (slot >= 0) & (slot < tl.cast(pages, tl.int64) * PAGE)
        place = tl.where(written, slot, 0).to(tl.uint64, bitcast=True)
        token = (place % PAGE).to(tl.int64, bitcast=True)
        base = (place // PAGE).to(tl.int64, bitcast=True) * stride
    there = real[:, None] & inner[None, :]
    at = k + row64[:, None] * k_n
    source = source_dims(channel, ROPE, START, ROTARY)
    x = tl.load(at + source.to(tl.int64)[None, :] * k_d, mask=there, other=0.0).to(tl.float32)
    mean = tl.zeros([TOKENS], tl.float32)
    inverse = mean + 1.0
    if NORM != 0:
        centred = x
        if NORM == 1:
            mean = tl.sum(x, 1) / dim
            centred = tl.where(there, x - mean[:, None], 0.0)
        inverse = tl.sum(centred * centred, 1) / dim + single(eps)
        inverse = tl.div_rn(inverse * 0.0 + 1.0, tl.sqrt_rn(inverse))
        x = (x - mean[:, None]) * inverse[:, None]
        weight_at, bias_at = norm_weight + source * weight_d, norm_bias + source * bias_d
        x = _affine(x, weight_at, bias_at, inner, HAS_WEIGHT, HAS_BIAS)
        x = nearest(x, TYPE, EXACT).to(tl.float32)
    if ROPE != 0:
        if ROPE == 2:
            other = swap_neighbours(x, TOKENS, DIM)
        else:
            partner = partner_dims(channel, ROPE, START, ROTARY, GROUPED)
            close = inner & (partner < dim)
            from_there = at + partner.to(tl.int64)[None, :] * k_d
            other = tl.load(from_there, mask=real[:, None] & close[None, :], other=0.0)
            other = other.to(tl.float32)
            if NORM != 0:
                other = (other - mean[:, None]) * inverse[:, None]
                weight_at, bias_at = norm_weight + partner * weight_d, norm_bias + partner * bias_d
                other = _affine(other, weight_at, bias_at, close, HAS_WEIGHT, HAS_BIAS)
                other = nearest(other, TYPE, EXACT).to(tl.float32)
        inside, which, sign = angle_dims(channel, ROPE, START, ROTARY)
        line = row64
        if TABLE:
            line = tl.load(positions + row64 * pos_s, mask=real, other=0).to(tl.int64)
            line = tl.minimum(tl.maximum(line, 0), table - 1)
        wanted = real[:, None] & inside[None, :]
        c = tl.load(cos + line[:, None] * cos_s + which[None, :] * cos_d, mask=wanted, other=1.0)
        s = tl.load(sin + line[:, None] * sin_s + which[None, :] * sin_d, mask=wanted, other=0.0)
        turned = x * c.to(tl.float32) + other * (s.to(tl.float32) * sign[None, :])
        turned = nearest(turned, TYPE, EXACT).to(tl.float32)
        x = tl.where(inside[None, :], turned, x)
    x = tl.where(there, x, 0.0)
    if HADAMARD:
        x = butterflies(x, TOKENS, DIM, LOG_DIM) * single(spread)
        x = nearest(x, TYPE, EXACT).to(tl.float32)
    if QUANT == 1:
        codes, scale = fp8_rows(x, single(floor), POW2, INTEGERS)
        to = values + (base + token * dim)[:, None] + channel[None, :]
        tl.store(to, codes, mask=written[:, None] & inner[None, :])
        if CACHE:
            to = values + base + PAGE * tl.cast(dim, tl.int64) + token * 4
        else:
            to = scales + token * 4
        tl.store(to.to(tl.pointer_type(tl.float32)), scale, mask=written)
    else:
        packed, scale = mxfp4_rows(x, TOKENS, DIM)
        size, groups = dim // 2, dim // 32
        byte, group = tl.arange(0, DIM // 2), tl.arange(0, DIM // 32)
        to = values + (base + token * size)[:, None] + byte[None, :]
        tl.store(to, packed, mask=written[:, None] & (byte[None, :] < size))
        if CACHE:
            behind = values + PAGE * tl.cast(size, tl.int64)
        else:
            behind = scales
        to = behind + (base + token * groups)[:, None] + group[None, :]
        tl.store(to, scale, mask=written[:, None] & (group[None, :] < groups))


def tokens_a_program(count: Size, dim: int, device: int | None) -> tuple[int, int]:
    """Tokens that one program takes, and its warps.

    A warp that waits for no other; of two tokens where there are many (on an H200).
    """
    many = bound(count, 2**20) >= 8 * processors(device)
    return 1 + (many and dim <= 128), 1


def _launch(
    op: str,
    k: Tensor,
    values: Tensor,
    scales: Tensor | None,
    slots: Tensor | None,
    cache: tuple[Size, Size, int],
    options: dict[str, Any],
) -> None:
    """Quantises keys into ``values`` and ``scales``, uint8.

    Args:
        cache: pages, bytes between pages and tokens of a page, where there are slots.
    """
    weight, bias = options.get("norm_weight"), options.get("norm_bias")
    cos, sin = options.get("cos"), options.get("sin")
    for name, tensor in (("k", k), ("norm_weight", weight), ("norm_bias", bias)):
        require(op, name, tensor, NUMBERS)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require(op, name, tensor, NUMBERS)
    count, dim = k.shape
    at_most(op, "the head dim", dim, MAX_DIM)
    padded = power_of_two(bound(dim, MAX_DIM), 32)
    positions = options.get("positions")
    # One line of N rows, as angles of queries have theirs.
    own_cos, own_sin, own_positions = (
        None if x is None else x if table else x[None]
        for x, table in (
            (cos, positions is not None),
            (sin, positions is not None),
            (positions, False),
        )
    )
    angles = angle_arguments(own_cos, own_sin, own_positions, (1, count), k)
    rope, start = options.get("rope", "half"), options.get("rope_start", 0)
    turned = bool(options.get("hadamard", False))
    tokens, warps = tokens_a_program(count, padded, k.device.index)
    wrap_triton(key_kernel)[((count + tokens - 1) // tokens,)](
        k,
        k if weight is None else weight,
        k if bias is None else bias,
        *angles[:3],
        k if slots is None else slots,
        values,
        k if scales is None else scales,
        count,
        dim,
        angles[3],
        *cache[:2],
        float(options.get("eps", 1e-6)),
        float(options.get("floor", 1e-4)),
        1.0 if not turned else int(dim) ** -0.5,
        *k.stride(),
        0 if weight is None else weight.stride(0),
        0 if bias is None else bias.stride(0),
        0 if slots is None else slots.stride(0),
        *angles[4:],
        NORM=NORMS[options.get("norm", "none")],
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CACHE=slots is not None,
        PAGE=cache[2],
        **rope_constants(cos, positions, rope, start, padded),
        HADAMARD=turned,
        QUANT=QUANTS[options.get("quant", "fp8")],
        POW2=options.get("pow2_scale", True),
        TOKENS=tokens,
        DIM=padded,
        LOG_DIM=int(dim).bit_length() - 1 if turned else 0,
        TYPE=TYPES[k.dtype],
        EXACT=interpreted(),
        INTEGERS=rounds_by_integers(k.device.index),
        num_warps=warps,
    )


def no_elements(*tensors: Tensor) -> bool:
    return any(isinstance(t.numel(), int) and t.numel() == 0 for t in tensors)


def indexer_k_quant(
    k: Tensor, *, out: tuple[Tensor, Tensor] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Quantised keys and scales; see ``dsa::indexer_k_quant``.

    Args:
        k: [N, D] fp16, bf16 or fp32, D at most 256.
        out: (values, scales) to write into, contiguous.
    """
    op = "indexer_k_quant"
    shapes = key_results(k, **options)
    given = (None, None) if out is None else out
    parts = [result(to, op, k, *part) for to, part in zip(given, shapes, strict=True)]
    raw = [part if part.dtype == torch.uint8 else part.view(torch.uint8) for part in parts]
    if not no_elements(k):
        _launch(op, k, raw[0], raw[1], None, (1, 0, 1), options)
    return parts[0], parts[1]


def indexer_k_quant_and_cache(k: Tensor, cache: Tensor, slots: Tensor, **options: Any) -> None:
    """Quantised keys into the slots of a cache; see ``dsa::indexer_k_quant_and_cache``.

    Args:
        k: [N, D] fp16, bf16 or fp32, D at most 256.
        cache: uint8 [pages, page, bytes of a token], written in place. Of two keys for one slot
            either may stay.
    """
    if no_elements(k, cache):
        return
    shape = (cache.shape[0], cache.stride(0), int(cache.shape[1]))
    # The cache is one argument of the kernel: a compiler would take two for two tensors, and keep
    # what was written to one of them.
    _launch("indexer_k_quant_and_cache", k, cache, None, slots, shape, options)
