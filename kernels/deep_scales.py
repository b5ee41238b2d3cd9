"""Scale factors and head weights in the form that DeepGEMM reads.

A UE8M0 scale is the exponent byte of a power of two, ``2**(byte - 127)``. SM100 kernels take four
of them a row of 128 dims, one for each 32, packed into an int32 with the first dims lowest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .deep_requests import UE8M0, round_up

UNIT = 0x7F7F7F7F
"""Four scales of one."""


def for_tma(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and beginning at a multiple of 16 bytes, as TMA loads need it."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def pack_ue8m0(scale: Tensor | None, like: tuple[int, ...], device: torch.device) -> Tensor:
    """Scales as contiguous int32, four UE8M0 bytes each.

    Args:
        scale: int32 (packed already), float8_e8m0fnu or float32 (a power of two) of shape ``like``;
            None is one everywhere.
        like: shape of the result.
        device: where to make unit scales.

    Raises:
        TypeError: another dtype. ValueError: another shape.
    """
    if scale is None:
        return torch.full(like, UNIT, dtype=torch.int32, device=device)
    if tuple(scale.shape) != tuple(like):
        raise ValueError(f"scales must have shape {tuple(like)}, got {tuple(scale.shape)}")
    if scale.dtype == torch.int32:
        return for_tma(scale)
    if scale.dtype == UE8M0:
        exponent = scale.contiguous().view(torch.uint8)
    elif scale.dtype == torch.float32:
        exponent = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    else:
        raise TypeError(f"scales must be int32, float8_e8m0fnu or float32, got {scale.dtype}")
    return exponent[..., None].expand(*exponent.shape, 4).contiguous().view(torch.int32).squeeze(-1)


def unpack_ue8m0(packed: Tensor) -> Tensor:
    """Four float32 scales [..., 4] of each packed int32."""
    exponent = packed.contiguous()[..., None].view(torch.uint8)
    return exponent.view(UE8M0).to(torch.float32)


def pad_heads(tensor: Tensor, heads: int, value: int = 0) -> Tensor:
    """A contiguous, aligned [rows, H, ...] with ``heads`` heads; new ones hold ``value``."""
    rows, have = tensor.shape[:2]
    if have == heads:
        return for_tma(tensor)
    # Copied as bytes: fp8 has few operators of its own, and a zero is the byte 0.
    source = tensor.contiguous()
    raw = source.view(torch.uint8) if source.dtype.itemsize == 1 else source
    out = raw.new_full((rows, heads, *raw.shape[2:]), value)
    out[:, :have] = raw
    return out.view(tensor.dtype)


def head_weights(weights: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Weights [rows, heads] in ``dtype`` whose rows start at multiples of 16 bytes.

    Rows are read by TMA, so their stride is padded; heads beyond those of ``weights`` weigh 0.
    """
    rows, have = weights.shape
    step = 16 // dtype.itemsize
    whole = have == heads and heads % step == 0 and weights.dtype == dtype
    if whole and weights.stride(1) == 1 and weights.stride(0) % step == 0:
        return weights if weights.data_ptr() % 16 == 0 else weights.clone()
    out = torch.zeros(rows, round_up(heads, step), dtype=dtype, device=weights.device)
    out[:, :have] = weights
    return out[:, :heads]
