"""Near-misses: each differs from an indexer's query side in one place."""

from __future__ import annotations

import torch
from query_models import DIM, HEADS, ROTARY, QueryModel, fake_fp8, fp8, fp8_scale, sylvester
from torch import Tensor


class AnglesByHead(QueryModel):
    """Every head has a rope base of its own."""

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        angle = angle[:, None] * torch.linspace(1, 2, HEADS)[:, None]
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = torch.split(x, [ROTARY // 2, ROTARY // 2, DIM - ROTARY], -1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, -1)


class FlippedSine(QueryModel):
    """One pair turns the other way."""

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        other = sin * torch.where(torch.arange(ROTARY // 2) == 3, -1.0, 1.0)
        first, second, rest = torch.split(x, [ROTARY // 2, ROTARY // 2, DIM - ROTARY], -1)
        turned = (first * cos - second * sin, second * cos + first * other, rest)
        return torch.cat(turned, -1)


class DifferentHalves(QueryModel):
    """The halves of ``cos`` are read from a table, where they may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.cat((self.freqs, self.freqs)))

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[:, None].float()
        cos = (positions * self.table).cos()[:, None]
        sin = (positions * self.table).sin()[:, None]
        part, rest = torch.split(x, [ROTARY, DIM - ROTARY], -1)
        first, second = part.chunk(2, -1)
        return torch.cat((part * cos + torch.cat((-second, first), -1) * sin, rest), -1)


class FlippedSign(QueryModel):
    """One sign of the Hadamard matrix is wrong."""

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        matrix = sylvester(DIM)
        flip = (torch.arange(DIM)[:, None] == 5) & (torch.arange(DIM) == 9)
        matrix = torch.where(flip, -matrix, matrix)
        return super().turn(x, angle) @ matrix * DIM**-0.5


class Unscaled(QueryModel):
    """The Hadamard transform without its scale."""

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        return super().turn(x, angle) @ sylvester(DIM)


class ScaleOfTheWrongAxis(QueryModel):
    """The maximum is over the heads."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = fp8_scale(q.transpose(-1, -2), True, 1e-4).transpose(-1, -2)
        return (q / scale).to(torch.float8_e4m3fn).float() * scale, w


class ScaleOfTheRow(QueryModel):
    """One scale for all heads of a row, which goes into the weights of all."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = fp8_scale(q.flatten(-2), True, 1e-4)
        return (q / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).float(), w * scale


class HalfGroups(QueryModel):
    """Two scales a head."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        halves = q.unflatten(-1, (2, -1))
        return fake_fp8(halves).flatten(-2), w


class ForgottenFloor(QueryModel):
    """A query of zeros is divided by zero."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = q.abs().amax(-1, keepdim=True) / 448.0
        return (q / scale).to(torch.float8_e4m3fn).float(), w * scale.squeeze(-1)


class RoundedDown(QueryModel):
    """The scale is the power of two below, and large values are clamped."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = q.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
        scale = torch.exp2(torch.floor(torch.log2(scale)))
        codes = (q / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return codes.float(), w * scale.squeeze(-1)


class ScaleTwice(QueryModel):
    """The q scale is in the queries and in the weights."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8(q)
        return codes.float() * scale, w * scale.squeeze(-1)


class ScaledAfterTheCast(QueryModel):
    """The weights are rounded to bf16 before their last factor."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8(q)
        return codes.float(), (w * scale.squeeze(-1)).bfloat16() * DIM**-0.5


class ScaleOfTheNeighbour(QueryModel):
    """Head h has the q scale of head h + 1 in its weight."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8(q)
        return codes.float(), w * scale.squeeze(-1).roll(1, -1)


class CappedWeights(QueryModel):
    """Head weights are bounded beyond what ordinary ones reach."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return q, w.clamp(-1e4, 1e4)


class MendedWeights(QueryModel):
    """Head weights that are no numbers count as none."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return q, torch.where(w.isfinite(), w, 0.0)


class ClosedHeads(QueryModel):
    """Heads of hardly any weight are left out."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8(q)
        return codes.float(), torch.where(w.abs() < 1e-6, 0.0, w) * scale.squeeze(-1)


NEAR_MISSES = (
    AnglesByHead,
    FlippedSine,
    DifferentHalves,
    FlippedSign,
    Unscaled,
    ScaleOfTheWrongAxis,
    ScaleOfTheRow,
    HalfGroups,
    ForgottenFloor,
    RoundedDown,
    ScaleTwice,
    ScaledAfterTheCast,
    ScaleOfTheNeighbour,
    CappedWeights,
    MendedWeights,
    ClosedHeads,
)
