"""Random calls of the canonical ops with fp8 operands, and what they mean in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .strict_operands import FP4, FP8, dequantized

JUNK_IDS = (-1, -1, -(2**30), 2**30, 2**31 - 1)


def random_ids(generator: torch.Generator, shape: tuple[int, ...], blocks: int) -> Tensor:
    """Block ids in no order, with duplicates, unused ones, ones out of range and junk."""
    ids = torch.randint(0, blocks + 1, shape, generator=generator)
    pick = torch.randint(0, len(JUNK_IDS), shape, generator=generator)
    bad = torch.randint(0, 4, shape, generator=generator) == 0
    return torch.where(bad, torch.tensor(JUNK_IDS)[pick], ids)


def packed_scales(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """int32 with four UE8M0 bytes near one."""
    exponent = torch.randint(120, 132, (*shape, 4), generator=generator, dtype=torch.uint8)
    return exponent.view(torch.int32).squeeze(-1)


def quantized(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random operands [..., D] of ``dtype``; MXFP4 holds two values a byte."""
    if dtype == FP4:
        half = (*shape[:-1], shape[-1] // 2)
        return torch.randint(-128, 128, half, generator=generator, dtype=torch.int8)
    return torch.randn(*shape, generator=generator).to(FP8)


@dataclass
class Case:
    """One call of ``sparse_mqa_logits``: operands, and options by name."""

    q: Tensor
    k: Tensor
    weights: Tensor
    blocks: Tensor
    end: Tensor
    options: dict[str, Any]
    scales: dict[str, Tensor] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.weights, self.blocks, self.end

    def reference(self, op: str = "sparse_mqa_logits", **changes: Any) -> Tensor:
        """The canonical op in float64, on the values that the operands stand for."""
        options = {**self.options, **changes}
        q = dequantized(self.q, self.scales.get("q_scale"))
        k = dequantized(self.k, None)
        key_scale = self.scales.get("key_scale")
        if key_scale is not None and key_scale.dtype == torch.int32:
            k = dequantized(self.k, key_scale)
        elif key_scale is not None:
            options["key_scale"] = key_scale.float().double()
        weights = self.weights.bfloat16().double()
        return getattr(torch.ops.dsa, op)(q, k, weights, self.blocks, self.end, **options)


def sparse_case(seed: int, *, dtype: torch.dtype = FP8, heads: int | None = None) -> Case:
    """A random case; every option is drawn."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, rows = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5))
    heads = heads or rng.choice((1, 3, 4, 20, 32))
    positions = rng.choice((1, 7, 8, 64, 131))
    sparse_block = rng.choice((8, 16))
    block_size = sparse_block * rng.choice((1, 2))
    anchored = rng.random() < 0.5
    ids = random_ids(
        generator,
        (rng.choice((1, batch)), rng.choice((1, rows)), rng.choice((1, 3, 9))),
        -(-positions // block_size),
    )
    options: dict[str, Any] = {"sparse_block": sparse_block, "anchored": anchored}
    if rng.random() < 0.7:
        shape = (rng.choice((1, batch)), rng.choice((1, rows)))
        start = torch.randint(-1, positions + 1, shape, generator=generator)
        options["row_start"] = start.to(rng.choice((torch.int32, torch.int64)))
    if rng.random() < 0.7:
        shape = (rng.choice((1, batch)), rng.choice((1, rows)))
        options["row_end"] = torch.randint(0, positions + 3, shape, generator=generator)
    bounds = (options.get("row_start"), options.get("row_end"))
    sizes = {"num_positions": positions, "block_size": block_size, "sparse_block": sparse_block}
    blocks, end = torch.ops.dsa.candidate_expand(ids, *bounds, anchored=anchored, **sizes)
    width = blocks.shape[2] * sparse_block
    if rng.random() < 0.4:
        options["scale"] = rng.choice((1 / 64, -0.3))
    if rng.random() < 0.4:
        options["mask"] = torch.rand(1, rows, width, generator=generator) > 0.3
    if rng.random() < 0.4:
        options["bias"] = torch.randn(batch, 1, width, generator=generator)
    key_batch = rng.choice((1, batch))
    scales: dict[str, Tensor] = {}
    if dtype == FP4 or rng.random() < 0.5:
        scales["q_scale"] = packed_scales(generator, (batch, rows, heads))
    if dtype == FP4 or rng.random() < 0.7:
        packed = dtype == FP4 or rng.random() < 0.5
        shape = (key_batch, positions)
        scales["key_scale"] = (
            packed_scales(generator, shape)
            if packed
            else torch.rand(shape, generator=generator) + 0.1
        )
    # Strides that are not those of the shape.
    weights = torch.randn(batch, heads, rows, generator=generator).mT.to(
        rng.choice((torch.bfloat16, torch.float32))
    )
    return Case(
        quantized(generator, (batch, rows, heads, 128), dtype),
        quantized(generator, (key_batch, positions, 128), dtype),
        weights,
        blocks,
        end,
        options,
        scales,
    )


def assert_scores_close(got: Tensor, case: Case) -> None:
    """Same places of -inf and NaN as the reference; the rest rounded to bf16 once."""
    want = case.reference()
    plain = case.reference(bias=None)
    assert got.dtype == torch.float32 and got.shape == want.shape
    got = got.double()
    for kind in (torch.isneginf, torch.isposinf, torch.isnan):
        assert torch.equal(kind(got), kind(want))
    finite = torch.isfinite(want)
    # One bf16 rounding of the kernel's part, some fp32 ones of the whole.
    room = plain[finite].abs() * 2**-8 + want[finite].abs() * 1e-6 + 1e-6
    assert bool(((got[finite] - want[finite]).abs() <= room).all())
