"""Operands of the strict stand-in of DeepGEMM: their formats, their values, and exact scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP4 = torch.int8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What memory may hold: NaN, infinities, and large numbers of either sign."""
    kinds = torch.tensor([math.nan, math.inf, 3e38, -3e38, 1.5e4])
    return kinds[torch.randint(0, len(kinds), shape)].to(dtype)


def logical_dim(data: Tensor) -> int:
    """Values of a row: two share a byte in MXFP4."""
    return data.shape[-1] * (2 if data.dtype == FP4 else 1)


def dequantized(data: Tensor, scale: Tensor | None) -> Tensor:
    """float64 values of operands whose scales are None, float32, or packed UE8M0."""
    if data.dtype == FP4:
        byte = data.contiguous().view(torch.uint8).long()
        values = torch.stack((E2M1[byte & 15], E2M1[byte >> 4]), -1).flatten(-2).double()
    else:
        values = data.float().double()
    if scale is None:
        return values
    if scale.dtype == torch.float32:
        return values * scale.double()[..., None]
    bits = torch.stack([(scale >> shift) & 255 for shift in (0, 8, 16, 24)], -1)
    powers = torch.exp2(bits.double() - 127)
    return values * powers.repeat_interleave(values.shape[-1] // 4, -1)


def scores_of(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Exact scores [n] of one row: q [H, D], keys [n, D], weights [H], all float64."""
    return torch.einsum("hd,nd->hn", q, keys).relu().mul(weights.double()[:, None]).sum(0)
