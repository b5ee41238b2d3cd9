"""Whether a fused op's queries and weights are the model's, up to the rounding of its stages."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_compile.kernels.quantise import dequantise

# A number within the rounding of fp32 of the point between two codes may become either.
_OTHER_CODES = 0.02
_OTHER_BF16 = 0.01
_FP32 = 1e-5


def fp8_step(x: Tensor) -> Tensor:
    """Distance between neighbours of fp8 e4m3 around numbers of that grid."""
    _, exponent = torch.frexp(x.abs().double().clamp(min=2.0**-6))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 4)


def e2m1_step(x: Tensor) -> Tensor:
    """Distance between neighbours of e2m1 around numbers of that grid."""
    return torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).double()


def numbers(values: Tensor, scales: Tensor, quant: str, *, codes: bool) -> tuple[Tensor, Tensor]:
    """What quantised queries stand for (fp64), and how far off a neighbouring code is.

    Args:
        codes: the numbers of fp8 without their scale.
    """
    if quant == "fp8":
        plain = values.double()
        scale = torch.ones_like(scales) if codes else scales
        scale = scale.double()[..., None]
        return plain * scale, fp8_step(plain) * scale
    wide = dequantise(values, scales, quant).double()
    grid = scales.view(torch.float8_e8m0fnu).double().repeat_interleave(32, -1)
    return wide, e2m1_step(wide / grid) * grid


def queries_differ(
    model: Tensor, values: Tensor, scales: Tensor, quant: str, *, codes: bool
) -> tuple[float, str]:
    """Share of wrong elements, and the first of them in words (empty: equal up to rounding).

    Args:
        model: the model's own queries [B, S, H, D].
        values, scales: results of ``fused_indexer_q``.
        quant: their format.
        codes: the model's queries are fp8 numbers without their scale.
    """
    if quant == "none":
        want, step = values.double(), None
    else:
        want, step = numbers(values, scales, quant, codes=codes)
    got = model.double()
    row_is_number = got.isfinite().all(-1, keepdim=True) & want.isfinite().all(-1, keepdim=True)
    # A row that holds no number holds none in both: which of its elements are NaN is left open.
    odd = got.isfinite().all(-1) != want.isfinite().all(-1)
    if odd.any():
        at = [int(i) for i in odd.nonzero()[0]]
        finite = bool(got.isfinite().all(-1)[tuple(at)])
        return (
            1.0,
            f"row {at[1]} head {at[2]}: the model's query is {'' if finite else 'not '}finite",
        )
    error = (got - want).abs().masked_fill(~row_is_number, 0)
    size = want.abs().masked_fill(~row_is_number, 0)
    if step is None:
        eps = torch.finfo(values.dtype).eps
        limit = (4 * eps if eps > 1e-4 else _FP32) * size.amax(-1, keepdim=True)
        wrong = error > limit
    else:
        exact = error <= _FP32 * size
        wrong = ~exact & (error > 1.001 * step + _FP32 * size)
        if not wrong.any() and (~exact).sum() > _OTHER_CODES * exact.numel() + 2:
            wrong = ~exact
    return float(wrong.double().mean()), _first(wrong, got, want)


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> str:
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"row {at[1]} head {at[2]} dim {at[3]}: the model's query is {float(got[at]):.6g}, "
        f"the fused op's {float(want[at]):.6g}"
    )


def weights_differ(model: Tensor, fused: Tensor) -> str:
    """The first head weight that differs in words (empty: equal up to rounding).

    Args:
        model: the model's head weights [B, S, H].
        fused: the fused op's in fp32. Low-precision ones must be these rounded once; a number
            within fp32's rounding of a halfway point may fall to its other side.
    """
    want = fused.to(model.dtype).double()
    got = model.double()
    number = got.isfinite() & want.isfinite()
    wrong = got.isfinite() != want.isfinite()
    error = (got - want).abs().masked_fill(~number, 0)
    size = want.abs().masked_fill(~number, 0)
    if model.dtype in (torch.float32, torch.float64):
        wrong |= error > _FP32 * size
    else:
        other = error > 0
        wrong |= error > 1.01 * torch.finfo(model.dtype).eps * size
        if not wrong.any() and other.sum() > _OTHER_BF16 * other.numel() + 1:
            wrong = other
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"row {at[1]} head {at[2]}: the model's weight is {float(got[at]):.8g}, "
        f"the fused op's {float(want[at]):.8g}"
    )
