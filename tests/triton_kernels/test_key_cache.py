"""Keys into the pages of a cache and back, against the reference and bit for bit where defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels.quantise import dequantise
from dsa_compile.kernels.triton_gather import gather_indexer_k
from dsa_compile.kernels.triton_key_cache import indexer_k_quant, indexer_k_quant_and_cache

from .conftest import ON_GPU
from .values import kernel_tests

token_bytes = kernel_tests("serving_samples").token_bytes
quant_format = pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
PAGES = (16, 32, 64, 128)


def draw(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


def new_cache(device: str, pages: int, page: int, dim: int, quant: str, gap: int = 16) -> Tensor:
    width = token_bytes(dim, quant)
    stride = page * width + gap
    room = torch.full((pages * stride + 64,), 171, dtype=torch.uint8, device=device)
    return room.as_strided((pages, page, width), (stride, width, 1))


def everything(cache: Tensor) -> Tensor:
    """All bytes of a cache's memory, gaps and what follows included."""
    return cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)


@quant_format
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dim", [64, 128] if ON_GPU else [64])
def test_bits_are_those_of_the_reference(quant: str, page: int, dim: int, device: str) -> None:
    """Writes skip -1 and slots out of range, and touch nothing else."""
    pages = 260 // page + 1
    k = draw(device, 37, dim).bfloat16()
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(1))[:37]
    slots[3], slots[8], slots[20] = -1, pages * page, -(2**33)
    slots = slots.to(device)
    mine, other = (new_cache(device, pages, page, dim, quant) for _ in range(2))
    indexer_k_quant_and_cache(k, mine, slots, quant=quant)
    torch.ops.dsa.indexer_k_quant_and_cache(k, other, slots, quant=quant)
    assert torch.equal(everything(mine), everything(other))
    assert not torch.equal(everything(mine), everything(new_cache(device, pages, page, dim, quant)))
    got = indexer_k_quant(k, quant=quant)
    want = torch.ops.dsa.indexer_k_quant(k, quant=quant)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


KEYS = [("layer", "half"), ("rms", "interleaved"), ("layer", "deinterleaved"), ("none", "half")]


@quant_format
@pytest.mark.parametrize("norm, rope", KEYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_rotation_and_transform(
    quant: str, norm: str, rope: str, dtype: torch.dtype, device: str
) -> None:
    n, dim = (300, 128) if ON_GPU else (11, 64)
    k = (draw(device, dim, n).mT * 2 + 0.5).to(dtype)
    options: dict[str, Any] = {
        "norm": norm,
        "cos": draw(device, 40, 16, seed=1),
        "sin": draw(device, 40, 16, seed=2),
        "positions": torch.arange(n, device=device, dtype=torch.int32) % 43 - 1,
        "rope": rope,
        "rope_start": 32,
        "hadamard": norm != "rms",
        "quant": quant,
        "pow2_scale": rope == "half",
    }
    if norm != "none":
        options["norm_weight"] = draw(device, 2 * dim, seed=3)[::2]
        options["norm_bias"] = draw(device, dim, seed=4).bfloat16()
    got = indexer_k_quant(k, **options)
    want = torch.ops.dsa.indexer_k_quant(k, **options)
    x, y = (dequantise(*pair, quant) for pair in (got, want))
    # A last bit of a mean or of a rotation moves few numbers, to the next one.
    scales = (pair[1].float() for pair in (got, want))
    assert float((~torch.isclose(*scales, rtol=1e-5)).float().mean()) < 0.03
    assert float((~torch.isclose(x, y, rtol=1e-5)).float().mean()) < 0.05
    step = y.abs().amax(-1, keepdim=True) * (0.26 if quant == "mxfp4" else 0.1)
    assert bool(((x - y).abs() <= step).all())
    lines = {name: options[name][options["positions"].clamp(0, 39)] for name in ("cos", "sin")}
    again = indexer_k_quant(k, **{**options, **lines, "positions": None})
    for a, b in zip(again, got, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@quant_format
@pytest.mark.parametrize("page", PAGES)
def test_a_workspace_is_packed_request_by_request(quant: str, page: int, device: str) -> None:
    dim, pages = 64, 9
    cache = new_cache(device, pages, page, dim, quant)
    everything(cache).copy_(
        torch.randint(0, 256, everything(cache).shape, dtype=torch.uint8).to(device)
    )
    table = torch.tensor([[4, 0, 7], [2, -1, 99], [1, 3, 8], [6, 6, 6]], device=device)
    first = 2 * page + 1
    starts = torch.tensor([0, first, first + 40, first + 40, first + 47], device=device).int()
    count = first + 60
    for kind in (torch.int64, torch.int32):
        options: dict[str, Any] = {"num_tokens": count, "quant": quant}
        got = gather_indexer_k(cache, table.to(kind), starts, **options)
        want = torch.ops.dsa.gather_indexer_k(cache, table.to(kind), starts, **options)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    room = tuple(torch.empty_like(x) for x in got)
    assert gather_indexer_k(cache, table, starts, out=room, **options)[0] is room[0]
    assert torch.equal(room[1].view(torch.uint8), got[1].view(torch.uint8))


@quant_format
def test_what_was_written_comes_back(quant: str, device: str) -> None:
    k = draw(device, 40, 32)
    cache = new_cache(device, 3, 16, 32, quant, gap=0)
    slots = torch.arange(40, device=device)
    indexer_k_quant_and_cache(k, cache, slots, quant=quant)
    starts = torch.tensor([0, 40], device=device)
    table = torch.tensor([[0, 1, 2]], device=device)
    got = gather_indexer_k(cache, table, starts, num_tokens=40, quant=quant)
    for x, y in zip(got, indexer_k_quant(k, quant=quant), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_pages_beyond_two_to_the_31_bytes(device: str) -> None:
    """Page numbers times strides need 64 bits, in the write and in the read."""
    stride = 2**30 + 64
    room = torch.empty(3 * stride + 16 * 36, dtype=torch.uint8, device=device)
    cache = room.as_strided((4, 16, 36), (stride, 36, 1))
    k, slots = draw(device, 3, 32), torch.tensor([50, 17, 63], device=device)
    indexer_k_quant_and_cache(k, cache, slots)
    table = torch.tensor([[3, 1]], device=device, dtype=torch.int32)
    starts = torch.tensor([0, 32], device=device)
    values, scales = gather_indexer_k(cache, table, starts, num_tokens=32)
    want = indexer_k_quant(k)
    for token, n in ((2, 0), (17, 1), (15, 2)):
        assert torch.equal(values[token].view(torch.uint8), want[0][n].view(torch.uint8))
        assert float(scales[token]) == float(want[1][n])
