"""The serving ops once more, in float64 and by exhaustive search over codes.

Nothing here is shared with the package: a mistake would have to be made twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_value(code: int) -> float:
    """Value of an e4m3 code without its sign: exponent bias 7, no infinity, 0x7F is NaN."""
    exponent, fraction = code >> 3, code & 7
    if code == 0x7F:
        return math.nan
    if exponent == 0:
        return fraction / 8 * 2.0**-6
    return (1 + fraction / 8) * 2.0 ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(0x7F)]


def nearest_code(x: float, values: list[float]) -> int:
    """Code of the nearest value, ties to the even code; the largest beyond it."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - abs(x)), code & 1))


def power_of_two_above(x: float) -> float:
    """Smallest power of two that is at least ``x``."""
    fraction, exponent = math.frexp(x)
    return 2.0 ** (exponent - 1) if fraction == 0.5 else 2.0**exponent


def fp8_row(row: list[float], power_of_two: bool, floor: float) -> tuple[list[float], float]:
    """Values of a row after a round trip, and its scale; the scale is an fp32 number."""
    amax = max(max(abs(x) for x in row), float(torch.tensor(floor)))
    scale = float(torch.tensor(amax, dtype=torch.float64).div(448).float())
    if power_of_two:
        scale = power_of_two_above(scale)
    out = []
    for x in row:
        quotient = float(torch.tensor(x / scale, dtype=torch.float64).float())
        out.append(math.copysign(E4M3[nearest_code(quotient, E4M3)], x) * scale)
    return out, scale


def mxfp4_group(group: list[float]) -> tuple[list[int], int]:
    """Codes of 32 numbers, and their scale's byte."""
    amax = max(max(abs(x) for x in group), 6 * 2.0**-126)
    scale = power_of_two_above(float(torch.tensor(amax / 6, dtype=torch.float64).float()))
    codes = [nearest_code(x / scale, E2M1) | (8 if math.copysign(1, x) < 0 else 0) for x in group]
    return codes, int(math.log2(scale)) + 127


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rope: str, start: int) -> Tensor:
    """RoPE of one vector [D] by angles [R/2], as products of complex numbers, in float64."""
    half = cos.shape[0]
    out = x.double().clone()
    for i in range(half):
        near = rope == "half"
        a, b = (start + i, start + half + i) if near else (start + 2 * i, start + 2 * i + 1)
        number = complex(float(x[a]), float(x[b])) * complex(float(cos[i]), float(sin[i]))
        if rope == "deinterleaved":
            a, b = start + i, start + half + i
        out[a], out[b] = number.real, number.imag
    return out


def hadamard_matrix(order: int) -> Tensor:
    """Orthonormal, by counting common bits of row and column."""
    rows = [[(-1.0) ** ((i & j).bit_count() % 2) for j in range(order)] for i in range(order)]
    return torch.tensor(rows, dtype=torch.float64) / math.sqrt(order)


def token(cache: Tensor, page: int, place: int, quant: str) -> Tensor:
    """Key in a place of a page, in float64, read byte by byte."""
    width = cache.shape[2]
    raw = cache[page].reshape(-1).tolist()
    count = cache.shape[1]
    if quant == "fp8":
        dim = width - 4
        at = count * dim + 4 * place
        scale = torch.tensor(raw[at : at + 4], dtype=torch.uint8).view(torch.float32).item()
        codes = raw[place * dim : (place + 1) * dim]
        signed = [math.copysign(e4m3_value(c & 0x7F), -1 if c >> 7 else 1) for c in codes]
        return torch.tensor(signed, dtype=torch.float64) * scale
    half, groups = width // 17 * 16, width // 17
    out = []
    for i in range(2 * half):
        byte = raw[place * half + i // 2]
        code = byte >> 4 if i % 2 else byte & 15
        scale = 2.0 ** (raw[count * half + place * groups + i // 32] - 127)
        out.append((-1 if code & 8 else 1) * E2M1[code & 7] * scale)
    return torch.tensor(out, dtype=torch.float64)


def score(q: Tensor, key: Tensor, weights: Tensor, scale: float) -> float:
    """Score of one key for the heads [H, D] of one row."""
    return float((torch.relu(q.double() @ key) * weights.double()).sum() * scale)
