"""Plain PyTorch meaning of ``fused_indexer_q``: rotate, transform, quantise, scale the weights.

Rotary embedding as in RoFormer; the order of the stages is that of the indexer of DeepSeek-V3.2's
inference code, in which the Hadamard transform spreads outliers before quantising. A stage computes
in fp32 (fp64 for fp64) and rounds its result to the dtype of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantise import quantise
from .reference import accumulator


def angles(
    cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [*rows, R/2] of rows, read off the tables where there are positions."""
    if positions is not None:
        at = positions.long().clamp(0, cos.shape[0] - 1)
        cos, sin = cos[at], sin[at]
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: str, rope_start: int) -> Tensor:
    """Rotates pairs of dims of x [..., D] by angles [..., R/2] that broadcast to it.

    Args:
        rope: ``"half"``, ``"interleaved"`` or ``"deinterleaved"``.
    """
    half = cos.shape[-1]
    turned = x[..., rope_start : rope_start + 2 * half]
    if rope == "half":
        first, second = turned[..., :half], turned[..., half:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if rope == "interleaved" else torch.cat(pair, -1)
    return torch.cat((x[..., :rope_start], turned, x[..., rope_start + 2 * half :]), -1)


def hadamard_transform(x: Tensor) -> Tensor:
    """Product of x [..., D] and the orthonormal Hadamard matrix (Sylvester's) of order D."""
    dim = x.shape[-1]
    step = 1
    while step < dim:
        x = x.unflatten(-1, (-1, 2, step))
        first, second = x.unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return x * dim**-0.5


def turn(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rope: str,
    rope_start: int,
    hadamard: bool,
) -> Tensor:
    """Rotation and Hadamard transform of x [..., D], each rounded to x's dtype."""
    dtype = accumulator(x)
    if cos is not None and sin is not None:
        x = rotate(x.to(dtype), cos, sin, rope, rope_start).to(x.dtype)
    return hadamard_transform(x.to(dtype)).to(x.dtype) if hadamard else x


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries for the scorers; see ``serving_schemas``.

    Returns:
        q_out, q_scale, weights_out and weights_bf16; those that were not asked for are empty.
    """
    if cos is not None and sin is not None:
        cos, sin = angles(cos, sin, positions, accumulator(q))
        cos, sin = cos[..., None, :], sin[..., None, :]
    turned = turn(q, cos, sin, rope, rope_start, hadamard)
    values, q_scale = quantise(turned, quant, power_of_two=pow2_scale, floor=floor)
    scaled = weights.to(accumulator(weights))
    if quant == "fp8" and fold_scale and q_scale is not None:
        scaled = scaled * q_scale
    wide = (scaled * softmax_scale * head_scale).float()
    low = wide.to(torch.bfloat16) if bf16_weights else wide.new_empty(0, dtype=torch.bfloat16)
    if q_scale is None:
        values = values.clone() if values is q else values
        q_scale = wide.new_empty(0)
    # ``to`` may give its argument back, but no two results share memory.
    out = wide if weights_out_dtype in (None, torch.float32) else wide.to(weights_out_dtype)
    out = out.clone() if out is weights else out
    return tuple(t.contiguous() for t in (values, q_scale, out, low))  # type: ignore[return-value]
