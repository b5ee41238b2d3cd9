"""Scores of stored keys, in pages and packed, against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels import triton_stored, triton_tiles
from dsa_compile.kernels.quantise import dequantise_mxfp4, quantise_mxfp4
from dsa_compile.kernels.triton_expand import candidate_expand
from dsa_compile.kernels.triton_stored_ops import (
    mxfp4_sparse_mqa_logits,
    paged_mqa_logits,
    paged_sparse_mqa_logits,
)

from .conftest import ON_GPU
from .values import FP8, assert_scores_close, kernel_tests, random_ids

filled_cache = kernel_tests("serving_samples").filled_cache
quant_format = pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
KINDS = (FP8, torch.bfloat16, torch.float16, torch.float32, torch.uint8)
# Hopper adds 8-bit products in about 22 bits; the other products are exact in fp32.
TOLERANCE = 2e-3


def tolerance(quant: str, kind: torch.dtype) -> float:
    if quant == "fp8":
        return TOLERANCE if kind == FP8 else 1e-5
    # Fewer bits of mantissa meet here.
    return 2e-4 if kind in (FP8, torch.uint8) else 1e-5


def queries(q: Tensor, kind: torch.dtype) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Queries of a kind, what goes with them, and the same numbers in float64."""
    if kind == torch.uint8:
        values, scales = quantise_mxfp4(q)
        return values, {"q_scale": scales}, dequantise_mxfp4(values, scales).double()
    return q.to(kind), {}, q.to(kind).float().double()


def ragged(
    seed: int, quant: str, page: int, heads: int, dim: int, device: str, positions: int = 150
) -> dict[str, Any]:
    """Requests with several rows each, pages in no order, contexts that end inside of pages."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-positions // page)
    cache = filled_cache(3 * columns + 1, page, dim, quant, seed)
    table = torch.randperm(3 * columns, generator=generator).view(3, columns).int()
    lengths = torch.tensor([[positions, positions - 1], [33, 32], [1, 0]])
    ids = random_ids(generator, (3, 2, 7), -(-positions // 8))
    shape = {"num_positions": positions, "block_size": 8, "sparse_block": 8}
    blocks, end = torch.ops.dsa.candidate_expand(ids, None, lengths, **shape)
    given: dict[str, Any] = {
        "table": table,
        "lengths": lengths,
        "blocks": blocks,
        "end": end,
        "q": torch.randn(3, 2, heads, dim, generator=generator),
        "weights": torch.randn(3, 2, heads, generator=generator),
    }
    given = {name: x.to(device) for name, x in given.items()}
    room = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0).to(device)
    return {**given, "cache": room.as_strided(cache.shape, cache.stride()), "positions": positions}


SHAPES = [(3, 64), (17, 32)]
if ON_GPU:
    SHAPES += [(32, 128), (64, 128), (128, 64), (5, 96)]


CASES = [(*shape, kind, page) for shape in SHAPES for kind in KINDS for page in (16, 32, 64, 128)]
if not ON_GPU:
    # Every page size, dtype and shape once: interpreted kernels are slow.
    CASES = [(17, 32, FP8, 16), (3, 64, FP8, 128), (3, 64, torch.bfloat16, 32)]
    CASES += [(17, 32, torch.uint8, 64), (3, 64, torch.float16, 16), (3, 64, torch.float32, 64)]


@quant_format
@pytest.mark.parametrize("heads, dim, kind, page", CASES)
def test_scores_equal_the_reference(
    quant: str, page: int, kind: torch.dtype, heads: int, dim: int, device: str
) -> None:
    s = ragged(page + heads, quant, page, heads, dim, device)
    q, more, exact = queries(s["q"], kind)
    shared: dict[str, Any] = {"quant": quant, "scale": 0.25}
    sparse = {"sparse_block": 8, "row_end": s["lengths"], **shared}
    rest = (s["blocks"], s["end"], s["table"])
    got = paged_sparse_mqa_logits(q, s["cache"], s["weights"], *rest, **more, **sparse)
    want = torch.ops.dsa.paged_sparse_mqa_logits(exact, s["cache"], s["weights"], *rest, **sparse)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert_scores_close(got, want, tolerance(quant, kind))
    dense = {"num_positions": s["positions"], **shared}
    rest = (s["lengths"], s["table"])
    got = paged_mqa_logits(q, s["cache"], s["weights"], *rest, **more, **dense)
    want = torch.ops.dsa.paged_mqa_logits(exact, s["cache"], s["weights"], *rest, **dense)
    assert_scores_close(got, want, tolerance(quant, kind))


@pytest.mark.parametrize(
    "rows, tiles, most, want",
    [(64, 128, 16, 16), (256, 128, 64, 64), (256, 128, 16, 7), (100, 128, 64, 26), (1, 128, 64, 1)],
)
def test_programs_that_fill_the_gpu_once(
    rows: int, tiles: int, most: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as 132 multiprocessors hold at a time, if none is longer than ``most`` tiles."""
    for module in (triton_stored, triton_tiles):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    run = triton_stored.stored_columns(rows, tiles * 128, 128, None, most)
    assert run == want * 128
    if run > 16 * 128:
        assert rows * -(-tiles // want) <= 4 * 132


@quant_format
def test_garbage_in_padded_rows_is_hidden(quant: str, device: str) -> None:
    """Rows of no request, tables that name no page, ids that overflow, nothing read outside."""
    s = ragged(2, quant, 16, 3, 64, device)
    table = s["table"].long()
    table[0, 1], table[1, 0], table[2, 3] = -1, 10**6, 2**40
    owner = torch.tensor([[0, 0], [1, 3], [-5, 2**31 - 1]], device=device)
    blocks = s["blocks"].long()
    blocks[0, 0, 1:3] = torch.tensor([-(2**30), 2**40])
    end = torch.full((1, 1), 50, device=device)
    args = (s["q"], s["cache"], s["weights"])
    shared: dict[str, Any] = {"quant": quant, "requests": owner}
    got = paged_sparse_mqa_logits(*args, blocks, end, table, sparse_block=8, **shared)
    want = torch.ops.dsa.paged_sparse_mqa_logits(
        s["q"].double(), *args[1:], blocks, end, table, sparse_block=8, **shared
    )
    assert_scores_close(got, want, 1e-5)
    whole = torch.full((1, 2), 150, device=device)
    got = paged_mqa_logits(*args, whole, table, num_positions=150, **shared)
    want = torch.ops.dsa.paged_mqa_logits(
        s["q"].double(), *args[1:], whole, table, num_positions=150, **shared
    )
    assert_scores_close(got, want, 1e-5)


@pytest.mark.parametrize("heads, dim", SHAPES)
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("kind", [torch.uint8] if not ON_GPU else KINDS, ids=str)
def test_packed_keys(heads: int, dim: int, anchored: bool, kind: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(heads)
    n = 150
    keys, scales = quantise_mxfp4(torch.randn(1 + heads % 2, n, dim, generator=generator) * 5)
    ids = random_ids(generator, (2, 3, 9), -(-n // 16))
    start, stop = torch.tensor([[2], [11]]), torch.tensor([[n, 77, 3]])
    shape = {"num_positions": n, "block_size": 16, "sparse_block": 16, "anchored": anchored}
    blocks, end = torch.ops.dsa.candidate_expand(ids, start, stop, **shape)
    q = torch.randn(2, 3, heads, dim, generator=generator).to(device)
    keys = torch.cat((keys, keys), 1)[:, :n] if heads == 3 else keys
    k, k_scale, blocks, end, start, stop = (
        x.to(device) for x in (keys[:2], scales[:2], blocks, end, start, stop)
    )
    weights = torch.randn(2, heads, 3, generator=generator).mT.to(device)
    low, more, exact = queries(q, kind)
    options: dict[str, Any] = {"sparse_block": 16, "row_start": start, "row_end": stop}
    options |= {"anchored": anchored, "scale": 0.5}
    got = mxfp4_sparse_mqa_logits(low, k, k_scale, weights, blocks, end, **more, **options)
    want = torch.ops.dsa.sparse_mqa_logits(
        exact, dequantise_mxfp4(k, k_scale).double(), weights, blocks, end, **options
    )
    assert_scores_close(got, want, tolerance("mxfp4", kind))


def test_every_code_widens_exactly(device: str) -> None:
    """Keys that hold one number each: every code, with scales from 2**-118 to 2**122."""
    codes = torch.arange(16).to(torch.uint8)
    exponents = torch.arange(9, 254, 12).to(torch.uint8)
    n = 16 * exponents.numel()
    keys = torch.zeros(1, n, 16, dtype=torch.uint8)
    scales = torch.full((1, n, 1), 127, dtype=torch.uint8)
    for i in range(n):
        code, dim = codes[i % 16], i * 7 % 32
        keys[0, i, dim // 2] = code << 4 if dim % 2 else code
        scales[0, i, 0] = exponents[i // 16]
    exact = dequantise_mxfp4(keys, scales)[0].sum(-1)
    q = torch.ones(1, 2, 1, 32, dtype=torch.bfloat16, device=device)
    q[0, 1] = -1
    blocks = torch.arange(-(-n // 8), device=device).view(1, 1, -1)
    end = torch.full((1, 1), n, device=device)
    weights = torch.ones(1, 2, 1, device=device)
    got = mxfp4_sparse_mqa_logits(
        q, keys.to(device), scales.to(device), weights, blocks, end, sparse_block=8
    )
    for row, sign in ((0, 1), (1, -1)):
        assert torch.equal(got[0, row, :n].cpu(), (sign * exact).relu())


@pytest.mark.parametrize("kind", [torch.uint8, FP8] if ON_GPU else [torch.uint8], ids=str)
def test_scales_of_a_key_may_differ_by_26_powers_of_two(kind: torch.dtype, device: str) -> None:
    """Keys of one number each, in a group whose scale lies far below that of another."""
    n = 16 * 27
    keys = torch.zeros(1, n, 64, dtype=torch.uint8)
    scales = torch.full((1, n, 4), 100, dtype=torch.uint8)
    for i in range(n):
        code, dim, group = i % 16, i * 5 % 32, i % 4
        keys[0, i, group * 16 + dim // 2] = code << 4 if dim % 2 else code
        scales[0, i, group] = 140 - i // 16
        scales[0, i, (group + 1 + i % 3) % 4] = 140
    exact = dequantise_mxfp4(keys, scales)[0].sum(-1)
    q = torch.ones(1, 2, 2, 128, device=device)
    q[0, 1] = -1
    low, more, _ = queries(q, kind)
    blocks = torch.arange(-(-n // 8), device=device).view(1, 1, -1)
    end = torch.full((1, 1), n, device=device)
    weights = torch.tensor([1.0, 0.0], device=device).expand(1, 2, 2)
    got = mxfp4_sparse_mqa_logits(
        low, keys.to(device), scales.to(device), weights, blocks, end, sparse_block=8, **more
    )
    for row, sign in ((0, 1), (1, -1)):
        assert torch.equal(got[0, row, :n].cpu(), (sign * exact).relu())


@quant_format
def test_a_scale_that_is_no_number_shows(quant: str, device: str) -> None:
    s = ragged(3, quant, 16, 3, 64, device)
    flat = s["cache"].as_strided((s["cache"].shape[0], 16 * s["cache"].shape[2]),
                                 (s["cache"].stride(0), 1))  # fmt: skip
    page, size = int(s["table"][0, 0]), 16 * (64 if quant == "fp8" else 32)
    flat[page, size + (4 * 5 if quant == "fp8" else 2 * 5) :][: 4 if quant == "fp8" else 2] = 255
    got = paged_mqa_logits(
        s["q"], s["cache"], s["weights"], s["lengths"], s["table"], num_positions=150, quant=quant
    )
    assert bool(got[0, :, 5].isnan().all()) and int(got.isnan().sum()) == 2


@quant_format
def test_scores_into_a_given_buffer(quant: str, device: str) -> None:
    s = ragged(5, quant, 32, 4, 64, device)
    args = (s["q"].bfloat16(), s["cache"], s["weights"], s["blocks"], s["end"], s["table"])
    options: dict[str, Any] = {"sparse_block": 8, "quant": quant, "row_end": s["lengths"]}
    want = paged_sparse_mqa_logits(*args, **options)
    guarded = torch.full((want.numel() + 256,), 1e30, device=device)
    out = guarded[128:-128].view(want.shape)
    assert paged_sparse_mqa_logits(*args, **options, out=out) is out
    assert torch.equal(out, want)
    assert bool((guarded[:128] == 1e30).all() and (guarded[-128:] == 1e30).all())
    low = paged_sparse_mqa_logits(*args, **options, out_dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    # The interpreter rounds to bf16 towards zero.
    assert_scores_close(low, want.double(), 2**-7)


@quant_format
@pytest.mark.parametrize("width", [2048, 16384] if ON_GPU else [256])
def test_long_rows(quant: str, width: int, device: str) -> None:
    """Runs of tiles that several programs share, and ends inside of tiles."""
    s = ragged(6, quant, 64, 4, 32, device, positions=2 * width)
    lengths = s["lengths"]
    ids = torch.stack([torch.randperm(2 * width // 8)[: width // 8] for _ in range(2)])
    shape = {"num_positions": 2 * width, "block_size": 8, "sparse_block": 8}
    blocks, end = candidate_expand(ids[None].to(device), None, lengths, **shape)
    q, more, exact = queries(s["q"], FP8)
    options: dict[str, Any] = {"sparse_block": 8, "quant": quant, "row_end": lengths}
    got = paged_sparse_mqa_logits(q, s["cache"], s["weights"], blocks, end, s["table"], **options)
    want = torch.ops.dsa.paged_sparse_mqa_logits(
        exact, s["cache"], s["weights"], blocks, end, s["table"], **options
    )
    assert_scores_close(got, want, tolerance(quant, FP8))


def test_pages_beyond_two_to_the_31_bytes(device: str) -> None:
    stride = 2**30 + 64
    room = torch.empty(3 * stride + 16 * 36, dtype=torch.uint8, device=device)
    cache = room.as_strided((4, 16, 36), (stride, 36, 1))
    small = filled_cache(4, 16, 32, "fp8").to(device)
    for page in range(4):
        cache[page] = small[page]
    q, w = torch.randn(1, 1, 2, 32, device=device), torch.ones(1, 1, 2, device=device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    end = torch.tensor([[32]], device=device)
    got = paged_mqa_logits(q, cache, w, end, table, num_positions=32)
    want = torch.ops.dsa.paged_mqa_logits(q.double(), small, w, end, table, num_positions=32)
    assert_scores_close(got, want, 1e-5)


def test_limits_are_named(device: str) -> None:
    s = ragged(3, "fp8", 16, 3, 64, device)
    rest = (s["lengths"], s["table"])
    with pytest.raises(ValueError, match="paged_mqa_logits: the number of heads is 129"):
        wide = s["q"][:, :, :1].expand(-1, -1, 129, -1)
        paged_mqa_logits(wide, s["cache"], s["weights"], *rest, num_positions=9)
    with pytest.raises(TypeError, match="the Triton kernels take q as"):
        paged_mqa_logits(s["q"].double(), s["cache"], s["weights"], *rest, num_positions=9)
    with pytest.raises(ValueError, match="the number of positions is 2147483648"):
        long = s["table"][:, :1].expand(-1, 2**31 // s["cache"].shape[1])
        paged_mqa_logits(s["q"], s["cache"], s["weights"], s["lengths"], long, num_positions=9)
    k = torch.zeros(1, 8, 32, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="last dimension of k must be contiguous"):
        mxfp4_sparse_mqa_logits(
            s["q"], k.mT.contiguous().mT, k[..., :2], s["weights"], s["blocks"], s["end"],
            sparse_block=8,
        )  # fmt: skip
