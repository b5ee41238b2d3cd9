"""Indexer scores of a row's candidate columns: what is asked for, and how it is launched."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .triton_scores import sparse_kernel
from .triton_tiles import LONGEST, Tiles, choose_tiles, columns_a_program
from .triton_tools import (
    at_most,
    bound,
    by_row,
    cap_registers,
    capability,
    interpreted,
    like_hopper,
    power_of_two,
    require,
    result,
    shared_memory,
    wrap_triton,
)
from .validate import Size

FP8 = torch.float8_e4m3fn
OPERANDS = (torch.float16, torch.bfloat16, torch.float32, FP8)
NUMBERS = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEADS = 128
MAX_DIM = 256
# Kernels count positions in 32 bits.
MAX_POSITIONS = 2**31 - 1

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    FP8: tl.float8e4nv,
}


def product_dtype(q: torch.dtype, k: torch.dtype) -> torch.dtype:
    """The dtype that queries and keys are multiplied in: one that holds both exactly."""
    if interpreted():
        # The interpreter multiplies bf16 by its bit patterns.
        return torch.float32
    if q == k:
        return q
    if FP8 in (q, k):
        return k if q == FP8 else q
    return torch.float32


def padded(heads: Size, dim: Size) -> tuple[int, int]:
    """Heads and head dim as the kernels hold them."""
    return power_of_two(bound(heads, MAX_HEADS), 16), power_of_two(bound(dim, MAX_DIM), 32)


def scorer_tiles(q: Tensor, k: Tensor) -> Tiles:
    """How these operands are scored."""
    shape = padded(q.shape[2], q.shape[3])
    memory = shared_memory(q.device.index)
    return choose_tiles(*shape, product_dtype(q.dtype, k.dtype), memory)


def _register_cap(tiles: Tiles, k: Tensor, padded_dim: int) -> dict[str, int]:
    """The cap of ``tiles`` where keys are copied 16 bytes at a time; other copies need more."""
    step = statically_known_true(k.stride(1) * k.dtype.itemsize % 16 == 0)
    wide = step and statically_known_true(k.stride(2) == 1)
    full = isinstance(k.shape[2], int) and k.shape[2] == padded_dim
    if tiles.registers is None or not (wide and full and like_hopper(k.device.index)):
        return {}
    return cap_registers(tiles.registers)


def check_operands(op: str, q: Tensor, k: Tensor, weights: Tensor, *rest: Tensor | None) -> None:
    """Raises for dtypes and sizes that the scorers do not take.

    Raises:
        TypeError: a dtype without a kernel, or fp8 on a GPU older than compute capability 8.9.
        ValueError: more than 128 heads, a head dimension over 256, or 2**31 positions or more.
    """
    require(op, "q", q, OPERANDS)
    require(op, "k", k, OPERANDS)
    for name, tensor in zip(("weights", "key_scale", "bias"), (weights, *rest), strict=False):
        require(op, name, tensor, NUMBERS)
    heads, dim = q.shape[2:]
    at_most(op, "the number of heads", heads, MAX_HEADS)
    at_most(op, "the head dim", dim, MAX_DIM)
    at_most(op, "the number of positions", k.shape[1], MAX_POSITIONS)
    if FP8 in (q.dtype, k.dtype) and not interpreted() and torch.cuda.is_available():
        if capability(q.device.index) < (8, 9):
            raise TypeError(f"{op}: float8_e4m3fn needs compute capability 8.9 or newer")


def sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    anchored: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
    run: Size | None = None,
    maxima: Tensor | None = None,
) -> Tensor:
    """Scores of the candidate columns; see ``dsa::sparse_mqa_logits``.

    Args:
        q: [B, S, H, D], H at most 128, D at most 256; fp16, bf16, fp32 or float8_e4m3fn.
        k: [B|1, T, D], likewise. Both fp8, bf16 or fp16: the product runs on tensor cores in that
            dtype. Otherwise in the narrowest dtype that holds both exactly.
        weights: [B, S, H]; for fp8 queries with their scales multiplied in.
        blocks, end: what ``candidate_expand`` returns.
        key_scale: [B|1, T], multiplied after the sum over heads.
        out: [B, S, W] to write into; ``out_dtype``: fp32, or bf16 for half the traffic.
        tiles, run: launch parameters, for measurements.
        maxima: fp32 [B * S, :func:`maxima_groups`] to write the largest scores of disjoint groups
            of a row's columns into, -inf where there is none; NaN does not count. ``out`` is then
            fp32.

    Returns:
        logits [B, S, W]; -inf where hidden and from ``end`` on.
    """
    op = "sparse_mqa_logits"
    check_operands(op, q, k, weights, key_scale, bias)
    batch, rows, heads, dim = q.shape
    width = blocks.shape[2] * sparse_block
    out = result(out, op, q, (batch, rows, width), out_dtype)
    if maxima is not None and out.dtype != torch.float32:
        raise TypeError(f"{op}: maxima are those of fp32 scores, and out is {out.dtype}")
    if isinstance(out.numel(), int) and out.numel() == 0:
        return out
    if isinstance(k.shape[1], int) and k.shape[1] == 0:
        return out.fill_(float("-inf"))
    dtype = product_dtype(q.dtype, k.dtype)
    padded_heads, padded_dim = padded(heads, dim)
    if tiles is None:
        tiles = scorer_tiles(q, k)
    if run is None:
        run = columns_a_program(batch * rows, width, tiles.tile, q.device.index, LONGEST)
    keys, k_b, _ = by_row(k[:, None], batch, rows, q)
    lines, blocks_b, blocks_s = by_row(blocks, batch, rows, q)
    stops, end_b, end_s = by_row(end, batch, rows, q)
    starts, starts_b, starts_s = by_row(row_start, batch, rows, end)
    ends, ends_b, ends_s = by_row(row_end, batch, rows, end)
    key_scales, scale_b, _ = by_row(
        None if key_scale is None else key_scale[:, None], batch, rows, weights
    )
    masks, mask_b, mask_s = by_row(mask, batch, rows, q)
    biases, bias_b, bias_s = by_row(bias, batch, rows, weights)
    wrap_triton(sparse_kernel)[(batch * rows, (width + run - 1) // run)](
        q,
        keys,
        weights,
        lines,
        stops,
        starts,
        ends,
        key_scales,
        masks.view(torch.int8) if mask is not None else masks,
        biases,
        q if maxima is None else maxima,
        out,
        rows,
        heads,
        dim,
        k.shape[1],
        width,
        run,
        scale,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        q.stride(3),
        k_b,
        k.stride(1),
        k.stride(2),
        weights.stride(0),
        weights.stride(1),
        weights.stride(2),
        blocks_b,
        blocks_s,
        blocks.stride(2),
        end_b,
        end_s,
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        scale_b,
        0 if key_scale is None else key_scale.stride(1),
        mask_b,
        mask_s,
        0 if mask is None else mask.stride(2),
        bias_b,
        bias_s,
        0 if bias is None else bias.stride(2),
        width,
        WIDE_IDS=blocks.dtype == torch.int64,
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        HAS_SCALE=key_scale is not None,
        HAS_MASK=mask is not None,
        HAS_BIAS=bias is not None,
        HAS_MAXIMA=maxima is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        HEADS=padded_heads,
        PADDED_HEADS=not (isinstance(heads, int) and heads == padded_heads),
        DIM=padded_dim,
        PADDED_DIM=not (isinstance(dim, int) and dim == padded_dim),
        TILE=tiles.tile,
        TYPE=_TYPES[dtype],
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **_register_cap(tiles, k, padded_dim),
    )
    return out
