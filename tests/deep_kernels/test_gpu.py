"""The real packages, where a GPU that they have kernels for and they themselves are there."""

from __future__ import annotations

import pytest
import torch

from dsa_compile.kernels import deep_gemm, deep_select
from dsa_compile.kernels.deep_dense import dense_mqa_logits
from dsa_compile.kernels.deep_needs import Need
from dsa_compile.kernels.deep_requests import FP8, ScoreRequest, TopkRequest

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
DENSE = ScoreRequest(CAPABILITY, FP8, FP8, 64, 128)
SPARSE = ScoreRequest(CAPABILITY, FP8, FP8, 32, 128, sparse_block=8)


def skip_unless_served(needs: tuple[Need, ...]) -> None:
    if needs:
        pytest.skip("; ".join(need.what for need in needs))


def operands(rows: int, heads: int, positions: int) -> tuple[torch.Tensor, ...]:
    q = torch.randn(1, rows, heads, 128, device="cuda").to(FP8)
    k = torch.randn(1, positions, 128, device="cuda").to(FP8)
    return q, k, torch.randn(1, rows, heads, device="cuda")


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert torch.equal(got.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    error = (got.double() - want)[seen].abs().max() / want[seen].abs().max()
    assert float(error) < tolerance


@pytest.mark.parametrize("ranges", [False, True])
def test_dense_scores(ranges: bool) -> None:
    if CAPABILITY is None:
        pytest.skip("no GPU")
    skip_unless_served(deep_gemm.needs(DENSE))
    q, k, weights = operands(37, 64, 1003)
    key_scale = torch.rand(1, 1003, device="cuda") + 0.1
    options = {}
    if ranges:
        options["row_start"] = torch.randint(0, 500, (1, 37), device="cuda")
        options["row_end"] = torch.randint(0, 1004, (1, 37), device="cuda")
    got = dense_mqa_logits(q, k, weights, key_scale=key_scale, **options)
    every = torch.arange(126, device="cuda", dtype=torch.int32).view(1, 1, -1)
    end = torch.full((1, 1), 1003, device="cuda")
    wide = (q.float().double(), k.float().double(), weights.double())
    scales = {"key_scale": key_scale.double()}
    want = torch.ops.dsa.sparse_mqa_logits(*wide, every, end, sparse_block=8, **scales, **options)
    assert_close(got, want[..., :1003], 2e-3 if CAPABILITY[0] == 9 else 3e-2)


@pytest.mark.parametrize("anchored", [False, True])
def test_sparse_scores(anchored: bool) -> None:
    if CAPABILITY is None:
        pytest.skip("no GPU")
    skip_unless_served(deep_gemm.needs(SPARSE, unaligned=True))
    q, k, weights = operands(37, 32, 1003)
    ids = torch.randint(-1, 126, (1, 37, 50), device="cuda")
    start = torch.randint(0, 500, (1, 37), device="cuda")
    sizes = {"num_positions": 1003, "sparse_block": 8, "anchored": anchored}
    blocks, end = torch.ops.dsa.candidate_expand(ids, start, block_size=8, **sizes)
    options = {"sparse_block": 8, "anchored": anchored, "row_start": start}
    got = deep_gemm.sparse_mqa_logits(q, k, weights, blocks, end, **options)
    wide = (q.float().double(), k.float().double(), weights.bfloat16().double())
    assert_close(got, torch.ops.dsa.sparse_mqa_logits(*wide, blocks, end, **options), 3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_top_k(dtype: torch.dtype) -> None:
    if CAPABILITY is None:
        pytest.skip("no GPU")
    skip_unless_served(deep_select.needs(TopkRequest(CAPABILITY, dtype, 512)))
    logits = torch.randn(1, 37, 5003, device="cuda").to(dtype)
    logits[0, 3, 7] = float("nan")
    end = torch.randint(0, 5004, (1, 37), device="cuda")
    values, _ = deep_select.topk(logits, end, topk=512)
    want, _ = torch.ops.dsa.topk(logits, end, topk=512)
    assert torch.allclose(values, want, rtol=0, atol=0, equal_nan=True)
