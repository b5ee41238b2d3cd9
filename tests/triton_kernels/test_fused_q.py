"""Rotation, Hadamard, quantisation and head weights in one launch, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels.quantise import dequantise
from dsa_compile.kernels.triton_fused_q import fused_indexer_q

from .conftest import ON_GPU

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x


def same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()
        assert torch.equal(bits(x), bits(y))


def close(got: Any, want: Any, quant: str, steps: float = 1.0) -> None:
    """Equal but for values that a last bit of the rotation moved to the next number."""
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    if quant == "none":
        far = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got[0].dtype]
        torch.testing.assert_close(got[0], want[0], rtol=far, atol=far)
    else:
        x, y = (dequantise(r[0], r[1], quant) for r in (got, want))
        assert float((x != y).float().mean()) < 0.03
        largest = y.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        assert float(((x - y).abs() / largest).max()) <= steps * (0.26 if quant == "mxfp4" else 0.1)
        scales = (got[1] != want[1]).float().mean()
        assert float(scales) < 0.03
    torch.testing.assert_close(got[2].float(), want[2].float(), rtol=0.6, atol=1e-6)


def draw(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


@pytest.mark.parametrize("quant", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pow2_scale", [True, False])
def test_bits_are_those_of_the_reference(
    quant: str, dtype: torch.dtype, pow2_scale: bool, device: str
) -> None:
    """Without a rotation nothing is summed, and every bit is defined."""
    q = draw(device, 2, 3, 5, 64).mul(4).to(dtype)
    q[0, 0, 0] = 0
    q[1, 2, 4] *= 1e-3
    options: dict[str, Any] = {
        "quant": quant,
        "pow2_scale": pow2_scale,
        "floor": 1e-10,
        "softmax_scale": 0.3,
        "head_scale": 0.11,
        "bf16_weights": True,
    }
    w = draw(device, 2, 5, 3, seed=1).mT
    want = torch.ops.dsa.fused_indexer_q(q, w, **options)
    same(fused_indexer_q(q, w, **options), want)
    options |= {"weights_out_dtype": torch.bfloat16, "fold_scale": False, "bf16_weights": False}
    same(
        fused_indexer_q(q, w.to(dtype), **options),
        torch.ops.dsa.fused_indexer_q(q, w.to(dtype), **options),
    )


def test_every_tie_rounds_to_even(device: str) -> None:
    """Halfway points of e4m3 and e2m1, in rows whose scale is 1."""
    codes = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.cat(((codes[1:] + codes[:-1]) / 2, codes))
    line = torch.cat((middle, torch.zeros(5 * 63 - middle.numel()))).view(1, 5, 1, 63)
    q = torch.cat((torch.full((1, 5, 1, 1), 448.0), -line), -1).to(device)
    w = torch.ones(1, 5, 1, device=device)
    same(
        fused_indexer_q(q, w, quant="fp8"),
        torch.ops.dsa.fused_indexer_q(q, w, quant="fp8"),
    )
    fine = torch.arange(-6, 6.01, 1 / 16)[:192].view(1, 6, 1, 32).clone()
    fine[..., 0] = 6.0
    fine = fine.to(device)
    w = torch.ones(1, 6, 1, device=device)
    same(
        fused_indexer_q(fine, w, quant="mxfp4"),
        torch.ops.dsa.fused_indexer_q(fine, w, quant="mxfp4"),
    )


SHAPES = [(3, 64, 32, 0), (5, 64, 32, 32), (2, 96, 24, 7), (2, 16, 4, 4), (1, 128, 64, 64)]
if ON_GPU:
    SHAPES += [(64, 128, 64, 0), (32, 128, 64, 64), (33, 128, 128, 0), (2, 256, 64, 64)]


@pytest.mark.parametrize("heads, dim, rotary, start", SHAPES)
@pytest.mark.parametrize("rope", ["half", "interleaved", "deinterleaved"])
@pytest.mark.parametrize("table", [True, False])
def test_rotation_and_transform(
    heads: int, dim: int, rotary: int, start: int, rope: str, table: bool, device: str
) -> None:
    batch, rows = 2, 3
    combinations = list(zip(FLOATS, ("fp8", "mxfp4", "none"), strict=True))
    if not ON_GPU:
        # Interpreted kernels are slow.
        combinations = [combinations[(heads + len(rope)) % 3]]
    start -= start % 2 if rope == "interleaved" else 0
    cos, sin = draw(device, 40, rotary // 2, seed=2), draw(device, rotary // 2, 40, seed=3).mT
    positions = torch.tensor([[5, -3, 41]], device=device)
    angles: dict[str, Any] = {"cos": cos, "sin": sin, "positions": positions}
    if not table:
        at = positions.clamp(0, 39)
        angles = {"cos": cos[at], "sin": sin[at].expand(batch, -1, -1)}
    hadamard = dim & (dim - 1) == 0
    for dtype, quant in combinations:
        if (quant == "mxfp4" and dim % 32) or (quant == "fp8" and dim > 128):
            continue
        q = draw(device, batch, heads, rows, dim, seed=4).to(dtype).transpose(1, 2)
        w = draw(device, batch, rows, heads, seed=5)
        options = {"rope": rope, "rope_start": start, "hadamard": hadamard, "quant": quant}
        got = fused_indexer_q(q, w, **angles, **options)
        close(got, torch.ops.dsa.fused_indexer_q(q, w, **angles, **options), quant)


@pytest.mark.parametrize("rows", [1, 64, 300] if ON_GPU else [1, 4])
def test_the_rotation_of_long_positions_is_within_rounding(rows: int, device: str) -> None:
    """fp32 queries, angles up to a million positions, against float64."""
    angle = torch.arange(rows).double()[:, None] * 3000 * 10000.0 ** (-torch.arange(32) / 32)
    cos, sin = angle.cos().float().to(device)[None], angle.sin().float().to(device)[None]
    q, w = draw(device, 1, rows, 4, 128), draw(device, 1, rows, 4, seed=1)
    options: dict[str, Any] = {"rope": "half", "rope_start": 64, "hadamard": True}
    got = fused_indexer_q(q, w, cos=cos, sin=sin, **options)[0]
    want = torch.ops.dsa.fused_indexer_q(
        q.double(), w, cos=cos.double(), sin=sin.double(), **options
    )[0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_results_go_into_given_buffers(device: str) -> None:
    q, w = draw(device, 1, 4, 3, 32), draw(device, 1, 4, 3, seed=1)
    want = fused_indexer_q(q, w, quant="fp8", bf16_weights=True)
    room = tuple(torch.empty_like(x) for x in want)
    got = fused_indexer_q(q, w, quant="fp8", bf16_weights=True, out=room)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(got, room, strict=True))
    same(room, want)
    with pytest.raises(ValueError, match="fused_indexer_q: out must be"):
        fused_indexer_q(q, w, quant="mxfp4", out=(room[0], None, None, None))


def test_missing_numbers_stay_in_their_row(device: str) -> None:
    q = torch.ones(1, 4, 1, 64, device=device)
    q[0, 1, 0, 3], q[0, 2, 0, 40] = torch.nan, torch.inf
    w = torch.ones(1, 4, 1, device=device)
    for quant in ("fp8", "mxfp4"):
        values, scale, weights, _ = fused_indexer_q(q, w, quant=quant)
        back = dequantise(values, scale, quant)
        clean = torch.ones(64, device=device)
        assert torch.equal(back[0, 0, 0], clean) and torch.equal(back[0, 3, 0], clean)
        assert not bool(back[0, 1, 0, :32].isfinite().any())
        assert not bool(back[0, 2, 0, 32:].isfinite().any())
        if quant == "fp8":
            assert bool(weights[0, 1].isnan().all()) and bool(weights[0, 0].isfinite().all())


def test_limits_are_named(device: str) -> None:
    q, w = torch.ones(1, 1, 2, 512, device=device), torch.ones(1, 1, 2, device=device)
    with pytest.raises(ValueError, match="head dim is 512"):
        fused_indexer_q(q, w)
    with pytest.raises(TypeError, match="the Triton kernels take q as"):
        fused_indexer_q(q[..., :8].double(), w)
