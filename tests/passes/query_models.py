"""Indexers whose query side is spelled out: rotation, Hadamard, quantisation, folded scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, DIM, ROTARY, HIDDEN, TOPK = 8, 32, 16, 24, 5
NEG = float("-inf")

# -- angles: of positions [S] and inverse frequencies [R/2] ------------------------------------


def lines(positions: Tensor, freqs: Tensor) -> Tensor:
    """Angles [S, R/2]."""
    return positions[:, None].float() * freqs


# -- rotations of x [B, S, H, R] by angles [S, R/2] ----------------------------------------------


def by_complex(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs 2i, 2i + 1 as complex numbers, times a complex table (V3.2's inference code)."""
    table = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.view(1, x.shape[1], 1, -1)).flatten(3).to(x.dtype)


def by_complex_halves(x: Tensor, angle: Tensor) -> Tensor:
    """Half-split pairs through complex numbers: V3.2's ``interleaved=False``."""
    table = torch.polar(torch.ones_like(angle), angle)
    halves = x.float().view(*x.shape[:-1], 2, -1).transpose(-1, -2).contiguous()
    turned = torch.view_as_complex(halves) * table.view(1, x.shape[1], 1, -1)
    real = torch.view_as_real(turned)
    return torch.cat([real[..., 0], real[..., 1]], dim=-1).to(x.dtype)


def by_rotate_half(x: Tensor, angle: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` with doubled angles."""
    double = torch.cat((angle, angle), dim=-1)
    cos, sin = double.cos()[None, :, None], double.sin()[None, :, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def by_even_and_odd(x: Tensor, angle: Tensor) -> Tensor:
    """Even and odd dims, stacked and flattened."""
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def by_even_into_halves(x: Tensor, angle: Tensor) -> Tensor:
    """Even and odd dims, written one after the other."""
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def by_repeated_angles(x: Tensor, angle: Tensor) -> Tensor:
    """Interleaved pairs with every angle twice."""
    cos = angle.cos().repeat_interleave(2, dim=-1)[:, None]
    sin = angle.sin().repeat_interleave(2, dim=-1)[:, None]
    other = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + other * sin


ROTATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "complex": (by_complex, "interleaved"),
    "complex halves": (by_complex_halves, "half"),
    "rotate half": (by_rotate_half, "half"),
    "even and odd": (by_even_and_odd, "interleaved"),
    "even into halves": (by_even_into_halves, "deinterleaved"),
    "repeated angles": (by_repeated_angles, "interleaved"),
}
"""Spelling -> how, and which pairs of dims it turns."""

# -- Hadamard transforms of x [..., D] -----------------------------------------------------------


def sylvester(dim: int, device: torch.device | None = None) -> Tensor:
    """The Hadamard matrix [dim, dim], without its scale."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def by_matrix(x: Tensor) -> Tensor:
    """A product with a matrix made in place."""
    dim = x.shape[-1]
    return (F.linear(x.float(), sylvester(dim, x.device)) * dim**-0.5).to(x.dtype)


def by_butterflies(x: Tensor) -> Tensor:
    """log2(D) stages of sums and differences."""
    shape, dim = x.shape, x.shape[-1]
    y, step = x.float(), 1
    while step < dim:
        y = y.reshape(*shape[:-1], dim // (2 * step), 2, step)
        first, second = y[..., 0, :], y[..., 1, :]
        y = torch.stack((first + second, first - second), dim=-2)
        step *= 2
    return (y.reshape(shape) * dim**-0.5).to(x.dtype)


def by_halves(x: Tensor) -> Tensor:
    """The recursion from the largest stage down, with ``cat``."""

    def stage(y: Tensor) -> Tensor:
        if y.shape[-1] == 1:
            return y
        half = y.shape[-1] // 2
        first, second = y[..., :half], y[..., half:]
        return torch.cat((stage(first + second), stage(first - second)), dim=-1)

    return (stage(x.float()) * x.shape[-1] ** -0.5).to(x.dtype)


HADAMARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": by_matrix,
    "butterflies": by_butterflies,
    "halves": by_halves,
}

# -- formats: numbers as the product takes them, and what goes into the weights (None: nothing) ----


def fp8_scale(x: Tensor, pow2: bool, floor: float) -> Tensor:
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=floor) / 448.0
    return torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale


def fp8(x: Tensor, pow2: bool = True, floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """fp8 numbers and their scales [..., 1]."""
    scale = fp8_scale(x, pow2, floor)
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def fake_fp8(x: Tensor, pow2: bool = True, floor: float = 1e-4) -> Tensor:
    """There and back."""
    codes, scale = fp8(x, pow2, floor)
    return (codes.float() * scale).to(x.dtype)


def fake_mxfp4(x: Tensor) -> Tensor:
    """MXFP4 there and back, by rounding on the e2m1 grid."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp(min=6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 6.0)))
    y = groups / scale
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    y = (torch.round(y / step) * step).clamp(-6.0, 6.0)
    return (y * scale).flatten(-2).to(x.dtype)


class QueryModel(nn.Module):
    """One dense indexer; sub-classes and arguments change what happens to its queries.

    Args:
        rotation: a name of ROTATIONS, or None.
        hadamard: a name of HADAMARDS, or None.
        form: ``"none"``, ``"fp8"`` (numbers without their scale, which goes into the weights),
            ``"fake fp8"`` or ``"fake mxfp4"``.
        last: whether the last dims are rotated instead of the first.
        dtype: of the projections.
    """

    def __init__(
        self,
        rotation: str | None = "rotate half",
        hadamard: str | None = None,
        form: str = "none",
        *,
        pow2: bool = True,
        floor: float = 1e-4,
        last: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotation, self.hadamard, self.form = rotation, hadamard, form
        self.pow2, self.floor, self.last = pow2, floor, last
        self.wq = nn.Linear(HIDDEN, HEADS * DIM, bias=False, dtype=dtype)
        self.wk = nn.Linear(HIDDEN, DIM, bias=False, dtype=dtype)
        self.ww = nn.Linear(HIDDEN, HEADS, bias=False, dtype=dtype)
        self.register_buffer("freqs", 1e2 ** -torch.linspace(0, 1, ROTARY // 2))

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        """Rotation and Hadamard transform of x [B, S, H, D]."""
        if self.rotation is not None:
            rotate = ROTATIONS[self.rotation][0]
            if self.last:
                rest, part = x[..., :-ROTARY], x[..., -ROTARY:]
                x = torch.cat((rest, rotate(part, angle)), dim=-1)
            else:
                part, rest = torch.split(x, [ROTARY, DIM - ROTARY], dim=-1)
                x = torch.cat((rotate(part, angle), rest), dim=-1)
        return x if self.hadamard is None else HADAMARDS[self.hadamard](x)

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Queries for the product, and weights with what belongs in them."""
        if self.form == "fp8":
            codes, scale = fp8(q, self.pow2, self.floor)
            w = w.float() * HEADS**-0.5
            return codes.float(), w.unsqueeze(-1).mul(scale).squeeze(-1) * DIM**-0.5
        if self.form == "fake fp8":
            q = fake_fp8(q, self.pow2, self.floor)
        elif self.form == "fake mxfp4":
            q = fake_mxfp4(q)
        return q, w * (DIM**-0.5 * HEADS**-0.5)

    def keys(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.wk(x), None

    def forward(self, x: Tensor) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)
        angle = lines(positions, self.freqs)
        q = self.wq(x).view(*x.shape[:2], HEADS, DIM)
        q, w = self.formatted(self.turn(q, angle), self.ww(x))
        k, k_scale = self.keys(x, angle)
        s = torch.einsum("bshd,btd->bsht", q, k.to(q.dtype)).relu()
        s = (s.float() * w.unsqueeze(-1).float()).sum(2)
        if k_scale is not None:
            s = s * k_scale[:, None]
        s = s.masked_fill(positions > positions[:, None], NEG)
        values, indices = s.topk(min(TOPK, x.shape[1]), dim=-1)
        return values, indices.masked_fill(values == NEG, -1)


class Released(QueryModel):
    """The indexer of DeepSeek-V3.2's inference code, its kernels written out.

    RoPE of non-interleaved pairs on the first dims, Hadamard of q and k, both quantised to fp8,
    the q scale in the head weights, the k scale on the scores.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("complex halves", "matrix", "fp8", dtype=torch.bfloat16, **options)
        self.norm = nn.LayerNorm(DIM)

    def keys(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor | None]:
        k = self.norm(self.wk(x).float()).to(x.dtype)
        k = self.turn(k[:, :, None], angle).squeeze(2)
        codes, scale = fp8(k, self.pow2, self.floor)
        return codes.float(), scale.squeeze(-1)


def hidden(length: int = 13, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Hidden states [B, S, HIDDEN]."""
    made = torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1))
    return made.to(dtype)
