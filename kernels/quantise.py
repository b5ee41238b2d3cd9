"""Round trips through fp8 e4m3 and MXFP4, in plain PyTorch.

fp8 e4m3 (DeepSeek-V3.2, V4): one scale for the values of a group, ``max(amax, floor) / 448`` in
fp32, or the smallest power of two that is not below it. A value is divided by the scale, clamped to
[-448, 448] and rounded to nearest even.

MXFP4 (OCP Microscaling 1.0): 32 values share a scale ``2**e`` with ``e = ceil(log2(amax / 6))``,
stored as the byte e + 127 (UE8M0, float8_e8m0fnu). Values are e2m1, rounded to nearest even and
saturating at 6, two a byte, the one of the even dim in the low nibble.

A NaN or an infinity in a group makes its scale NaN or infinite, and nothing of the group comes back
as a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 32
"""Values that share a scale in MXFP4."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; the fourth bit is the sign."""

E2M1_MAX = 6.0
SMALLEST_MXFP4_SCALE = 2.0**-126


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two [fp32] that is not below a positive normal fp32 number."""
    bits = (x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def quantise_fp8(x: Tensor, *, power_of_two: bool, floor: float) -> tuple[Tensor, Tensor]:
    """Values float8_e4m3fn [..., D] and one scale fp32 [...] a row of D values.

    Args:
        x: [..., D] of any float dtype; computed in fp32.
        power_of_two: whether the scale is rounded up to a power of two.
        floor: the least ``amax``, positive.
    """
    x = x.float()
    largest = x.abs().amax(-1).clamp(min=floor)
    # By a tensor: on GPUs, PyTorch multiplies by the rounded reciprocal of a plain number.
    scale = largest / torch.full_like(largest, FP8_MAX)
    if power_of_two:
        scale = power_of_two_above(scale)
    # Clamped first: whether an overflowing cast saturates differs between releases of PyTorch.
    return (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantise_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., D] of fp8 values [..., D] and scales [...]."""
    return values.float() * scale[..., None]


def encode_e2m1(x: Tensor) -> Tensor:
    """Codes uint8 (0 to 15) of the nearest e2m1 numbers, ties to even; NaN becomes a zero."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    # Halfway points: a tie goes to the even code.
    for point in (0.75, 1.75, 3.5):
        code += size >= point
    for point in (1.25, 2.5, 5.0):
        code += size > point
    return code | (x.signbit() & ~x.isnan()).to(torch.uint8) << 3


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 numbers of codes (0 to 15)."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[codes.long()]


def scale_bytes(scale: Tensor) -> Tensor:
    """UE8M0 bytes (uint8) of scales that are powers of two."""
    return scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def byte_scales(scale: Tensor) -> Tensor:
    """fp32 scales of UE8M0 bytes (uint8)."""
    return scale.contiguous().view(torch.float8_e8m0fnu).float()


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed values uint8 [..., D / 2] and UE8M0 scales uint8 [..., D / 32] of [..., D]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1).clamp(min=E2M1_MAX * SMALLEST_MXFP4_SCALE)
    scale = power_of_two_above(amax / torch.full_like(amax, E2M1_MAX))
    codes = encode_e2m1(groups / scale[..., None]).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale_bytes(scale)


def dequantise_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., D] of packed values [..., D / 2] and scales [..., D / 32]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = decode_e2m1(codes).unflatten(-1, (-1, GROUP))
    return (values * byte_scales(scale)[..., None]).flatten(-2)


def quantise(
    x: Tensor, quant: str, *, power_of_two: bool, floor: float
) -> tuple[Tensor, Tensor | None]:
    """Values and scales of ``quant``: ``"fp8"``, ``"mxfp4"``, or ``"none"`` (x, without scales)."""
    if quant == "fp8":
        return quantise_fp8(x, power_of_two=power_of_two, floor=floor)
    return quantise_mxfp4(x) if quant == "mxfp4" else (x, None)


def dequantise(values: Tensor, scale: Tensor, quant: str) -> Tensor:
    """fp32 numbers of what :func:`quantise` gave for ``"fp8"`` or ``"mxfp4"``."""
    if quant == "fp8":
        return dequantise_fp8(values, scale)
    return dequantise_mxfp4(values, scale)
