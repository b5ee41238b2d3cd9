"""Whether keys in a model's cache are what the stages of a fused write give, up to fp32 rounding.

Each stage is compared with the model's own result of it, given the model's own result of the one
before, so that no difference is carried along. The exact result is known in fp64: the model's must
be what rounding gives somewhere within 1e-5 of it, relative to the number itself, and within 1e-6
of the largest number of the key, since sums of numbers as large as that lose as much. Nothing else
is let through: a code may be the neighbouring one where the exact number lies that close to the
point between the two, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsa_compile.kernels.quantise import (
    FP8,
    FP8_MAX,
    GROUP,
    byte_scales,
    decode_e2m1,
    encode_e2m1,
    quantise_fp8,
    quantise_mxfp4,
)

_FP32 = 1e-5
_OF_LARGEST = 1e-6


def stage_differs(model: Tensor, exact: Tensor) -> Tensor:
    """Bool [N, D]: numbers of the model [N, D] that rounding of ``exact`` (fp64) does not explain.

    A key that holds no number in one must hold none in the other; which of its dims are none is
    left open.
    """
    got = model.double()
    odd, number = _odd_rows(got, exact)
    room = _FP32 * exact.abs() + _OF_LARGEST * exact.abs().amax(-1, keepdim=True)
    low, high = ((exact + side * room).to(model.dtype).double() for side in (-1, 1))
    return odd | number & ((got < low) | (got > high))


def fp8_differs(
    key: Tensor, codes: Tensor, scale: Tensor, *, power_of_two: bool, floor: float
) -> Tensor:
    """Bool [N, D]: codes (float8) or scales [N] of the model that are not those of ``key``."""
    exact = key.double()
    low, high = (
        quantise_fp8(exact * side, power_of_two=power_of_two, floor=floor * side)[1]
        for side in (1 - _FP32, 1 + _FP32)
    )
    wide = codes.double() * scale.double()[:, None]
    odd, number = _odd_rows(wide, exact)
    wrong = ((scale < low) | (scale > high))[:, None]

    def code(x: Tensor) -> Tensor:
        return x.clamp(-FP8_MAX, FP8_MAX).to(FP8).double()

    return odd | number & (wrong | _outside(codes.double(), exact / scale.double()[:, None], code))


def mxfp4_differs(key: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Bool [N, D]: likewise for packed codes [N, D/2] and scale bytes [N, D/32]."""
    exact = key.double()
    low, high = (quantise_mxfp4(exact * side)[1] for side in (1 - _FP32, 1 + _FP32))
    wrong = ((scale < low) | (scale > high)).repeat_interleave(GROUP, -1)
    factor = byte_scales(scale).double().repeat_interleave(GROUP, -1)
    codes = decode_e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(-2)).double()
    odd, number = _odd_rows(codes * factor, exact)

    def code(x: Tensor) -> Tensor:
        return decode_e2m1(encode_e2m1(x)).double()

    return odd | number & (wrong | _outside(codes, exact / factor, code))


def _outside(got: Tensor, exact: Tensor, code: Callable[[Tensor], Tensor]) -> Tensor:
    room = _FP32 * exact.abs()
    return (got < code(exact - room)) | (got > code(exact + room))


def _odd_rows(got: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, 1] that are numbers in one alone, and those that are in both."""
    one, other = (x.isfinite().all(-1, keepdim=True) for x in (got, exact))
    return one != other, one & other


def first_difference(wrong: Tensor, what: str) -> tuple[float, str]:
    """Share of wrong numbers [N, D], and the first of them in words; empty where none is."""
    if not wrong.any():
        return 0.0, ""
    key, dim = (int(i) for i in wrong.nonzero()[0])
    return float(wrong.double().mean()), f"key {key} dim {dim}: {what}"
