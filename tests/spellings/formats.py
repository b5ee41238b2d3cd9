"""Number formats of an indexer: parameter dtypes, casts around the product, fake quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """``tolerance`` is the relative rounding error of a score, against the sum of its terms."""

    params: torch.dtype = torch.float32
    operands: torch.dtype | None = None
    scores: torch.dtype | None = None
    weights: torch.dtype | None = None
    quantised: str = ""
    tolerance: float = 1e-5


FORMATS: dict[str, Format] = {
    "fp32": Format(),
    "fp64": Format(params=torch.float64, tolerance=1e-12),
    "bf16 then fp32 operands": Format(
        torch.bfloat16, operands=torch.float32, weights=torch.float32
    ),
    "fp16 then fp32 operands": Format(torch.float16, operands=torch.float32, weights=torch.float32),
    "bf16 product": Format(
        torch.bfloat16, scores=torch.float32, weights=torch.float32, tolerance=2**-7
    ),
    "bf16": Format(torch.bfloat16, tolerance=2**-6),
    "fp8 round trip": Format(quantised="round trip"),
    "fp8 scales outside": Format(quantised="scales outside"),
}


def fp8(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes of the last axis in float8 e4m3, as float32, and the scale of each vector."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (x / scale).to(torch.float8_e4m3fn).to(torch.float32), scale


@dataclass(frozen=True)
class Operands:
    """What one layer scores with. ``exact`` query and key are the values the rule is applied to."""

    query: Tensor
    key: Tensor
    weights: Tensor
    key_scale: Tensor | None = None


def quantise(fmt: Format, q: Tensor, k: Tensor, w: Tensor) -> Operands:
    if not fmt.quantised:
        return Operands(q, k, w)
    q8, q_scale = fp8(q, power_of_two=True)
    k8, k_scale = fp8(k, power_of_two=fmt.quantised == "round trip")
    if fmt.quantised == "round trip":
        return Operands(q8 * q_scale, k8 * k_scale, w)
    return Operands(q8, k8, w * q_scale.squeeze(-1), k_scale.squeeze(-1))


def exact_scores(x: Operands, scale: float) -> tuple[Tensor, Tensor]:
    """Scores ``[B, S, T]`` in float64 and the sum of their terms' magnitudes."""
    q, k, w = x.query.double(), x.key.double(), x.weights.double() * scale
    parts = (q @ k.transpose(-1, -2).unsqueeze(-3)).clamp_min(0)
    if x.key_scale is not None:
        parts = parts * x.key_scale.double()[..., None, None, :]
    terms = parts * w.unsqueeze(-1)
    return terms.sum(-2), terms.abs().sum(-2)
