"""Queries for the scorers against complex rotations, a written-out Hadamard matrix and a search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels import cpu
from dsa_compile.kernels.quantise import dequantise

from . import serving_oracle as oracle

FP8 = torch.float8_e4m3fn
provider = pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])


def op(provider: str) -> Any:
    return getattr(torch.ops, provider).fused_indexer_q


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(q: Tensor, lines: list[int], table: tuple[Tensor, Tensor], **how: Any) -> Tensor:
    """Rotated and transformed queries [B, S, H, D] in float64."""
    rope, start, hadamard = how["rope"], how["rope_start"], how["hadamard"]
    out = torch.empty(q.shape, dtype=torch.float64)
    at = iter(lines)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            line = next(at)
            for h in range(q.shape[2]):
                out[b, s, h] = oracle.rotated(
                    q[b, s, h], table[0][line], table[1][line], rope, start
                )
    return out @ oracle.hadamard_matrix(q.shape[-1]) if hadamard else out


@provider
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("rope", ["half", "interleaved", "deinterleaved"])
@pytest.mark.parametrize("start", [0, 12, 32])
def test_rotation_and_transform(provider: str, rope: str, start: int, hadamard: bool) -> None:
    q = draw(0, 2, 3, 2, 64)
    cos, sin = draw(1, 9, 16), draw(2, 9, 16)
    positions = torch.tensor([[3, 0, 8]], dtype=torch.int32)
    how: dict[str, Any] = {"rope": rope, "rope_start": start, "hadamard": hadamard}
    got, scale, _, _ = op(provider)(
        q, draw(3, 2, 3, 2), cos=cos, sin=sin, positions=positions, **how
    )
    assert got.dtype == torch.float32 and scale.numel() == 0
    want = exact(q, [3, 0, 8] * 2, (cos, sin), **how)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)
    wide, _, _, _ = op(provider)(
        q.double(), draw(3, 2, 3, 2), cos=cos, sin=sin, positions=positions, **how
    )
    torch.testing.assert_close(wide, want, rtol=0, atol=1e-13)
    lines = {"cos": cos[positions.long()], "sin": sin[positions.long()]}
    assert torch.equal(op(provider)(q, draw(3, 2, 3, 2), **lines, **how)[0], got)


@provider
def test_positions_outside_the_table_take_its_ends(provider: str) -> None:
    q, cos, sin = draw(0, 1, 3, 1, 8), draw(1, 4, 2), draw(2, 4, 2)
    run = op(provider)
    w = torch.ones(1, 3, 1)
    far = run(q, w, cos=cos, sin=sin, positions=torch.tensor([[-7, 4, 2**40]]))[0]
    near = run(q, w, cos=cos, sin=sin, positions=torch.tensor([[0, 3, 3]]))[0]
    assert torch.equal(far, near)


@provider
def test_stages_round_to_the_dtype_of_the_queries(provider: str) -> None:
    """Rotated values are rounded to bf16 before the transform, and again before quantising."""
    q = draw(0, 1, 4, 3, 32).bfloat16()
    cos, sin = draw(1, 1, 4, 16), draw(2, 1, 4, 16)
    run, w = op(provider), torch.ones(1, 4, 3)
    turned = run(q, w, cos=cos, sin=sin)[0]
    assert turned.dtype == torch.bfloat16
    spread = run(turned, w, hadamard=True)[0]
    assert spread.dtype == torch.bfloat16
    assert torch.equal(run(q, w, cos=cos, sin=sin, hadamard=True)[0], spread)
    want = run(spread, w, quant="fp8")
    got = run(q, w, cos=cos, sin=sin, hadamard=True, quant="fp8")
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@provider
@pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
@pytest.mark.parametrize("pow2_scale", [True, False])
def test_quantised_values_equal_the_search(provider: str, quant: str, pow2_scale: bool) -> None:
    q, w = draw(0, 2, 2, 2, 64) * 3, draw(1, 2, 2, 2)
    values, scale, _, _ = op(provider)(q, w, quant=quant, pow2_scale=pow2_scale, floor=1e-10)
    assert values.shape[-1] == (64 if quant == "fp8" else 32)
    back = dequantise(values, scale, quant)
    for x, y, s in zip(q.view(-1, 64), back.view(-1, 64), scale.flatten(0, 2), strict=True):
        if quant == "fp8":
            want, factor = oracle.fp8_row(x.tolist(), pow2_scale, 1e-10)
            assert s.item() == factor
            # The product with a scale that is no power of two is rounded to fp32.
            torch.testing.assert_close(y.double(), torch.tensor(want).double(), rtol=1e-7, atol=0)
        else:
            for g in range(2):
                codes, byte = oracle.mxfp4_group(x[32 * g : 32 * g + 32].tolist())
                assert int(s[g]) == byte
                signs = [(-1 if c & 8 else 1) * oracle.E2M1[c & 7] for c in codes]
                want_g = torch.tensor(signs) * 2.0 ** (byte - 127)
                assert torch.equal(y[32 * g : 32 * g + 32], want_g)


@provider
@pytest.mark.parametrize("quant", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("fold", [True, False])
def test_weights_are_scaled_and_rounded_once(provider: str, quant: str, fold: bool) -> None:
    q, w = draw(0, 2, 3, 4, 32), draw(1, 2, 3, 4)
    options = {"softmax_scale": 0.1, "head_scale": 0.3, "quant": quant, "fold_scale": fold}
    _, scale, wide, none = op(provider)(q, w, **options)
    factor = scale if quant == "fp8" and fold else torch.ones(2, 3, 4)
    assert wide.dtype == torch.float32 and none.shape == (0,)
    assert torch.equal(wide, w * factor * 0.1 * 0.3)
    exactly = w.double() * factor.double() * 0.1 * 0.3
    torch.testing.assert_close(wide.double(), exactly, rtol=4e-7, atol=0)
    _, _, low, _ = op(provider)(q, w, **options, weights_out_dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16 and torch.equal(low, wide.bfloat16())
    _, _, first, second = op(provider)(q, w, **options, bf16_weights=True)
    assert torch.equal(first, wide) and torch.equal(second, wide.bfloat16())


@provider
def test_bf16_weights_are_not_rounded_in_between(provider: str) -> None:
    """Products of bf16 steps would round three times; here the fp32 result is rounded once."""
    q, w = draw(0, 1, 64, 8, 32), draw(1, 1, 64, 8).bfloat16()
    options = {"quant": "fp8", "pow2_scale": False, "softmax_scale": 0.17, "head_scale": 0.31}
    _, scale, low, _ = op(provider)(q, w, **options, weights_out_dtype=torch.bfloat16)
    once = (w.float() * scale * 0.17 * 0.31).bfloat16()
    stepwise = w * scale.bfloat16() * 0.17 * 0.31
    assert torch.equal(low, once) and not torch.equal(low, stepwise)


def test_the_budget_changes_nothing() -> None:
    q, w = draw(0, 3, 7, 2, 64), draw(1, 3, 7, 2)
    cos, sin = draw(2, 1, 7, 16), draw(3, 1, 7, 16)
    options: dict[str, Any] = {"cos": cos, "sin": sin, "quant": "mxfp4", "hadamard": True}
    want = torch.ops.dsa.fused_indexer_q(q, w, **options)
    for size in (1, 20000):
        with cpu.limit_working_set(size):
            got = torch.ops.dsa_cpu.fused_indexer_q(q, w, **options)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
