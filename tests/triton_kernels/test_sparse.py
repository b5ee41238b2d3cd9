"""Scores of candidate columns against the reference in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsa_compile.kernels.triton_expand import candidate_expand
from dsa_compile.kernels.triton_sparse import sparse_mqa_logits

from .conftest import ON_GPU
from .values import FP8, assert_scores_close, random_ids, reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, FP8)
# fp16, bf16 and fp8 products are exact in fp32; Hopper adds fp8 products in about 22 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5, FP8: 2e-3}


def case(seed: int, q: torch.dtype, k: torch.dtype, heads: int, dim: int, device: str) -> Any:
    """Arguments of one call, every option drawn."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, rows = rng.choice((1, 2)), rng.choice((1, 3))
    n = rng.choice((1, 30, 257))
    sparse_block = rng.choice((1, 3, 8, 16))
    block_size = sparse_block * rng.choice((1, 2))
    anchored = rng.random() < 0.4
    ids = random_ids(generator, (batch, rows, rng.choice((3, 40))), -(-n // block_size))
    kwargs: dict[str, Any] = {}
    if rng.random() < 0.6:
        kwargs["row_start"] = torch.randint(-1, n, (batch, 1), generator=generator)
    if rng.random() < 0.6:
        kwargs["row_end"] = torch.randint(0, n + 2, (1, rows), generator=generator).int()
    shape = {"num_positions": n, "block_size": block_size, "sparse_block": sparse_block}
    bounds = (kwargs.get("row_start"), kwargs.get("row_end"))
    blocks, end = torch.ops.dsa.candidate_expand(ids, *bounds, anchored=anchored, **shape)
    blocks, end = blocks.expand(batch, rows, -1), end.expand(batch, rows)
    width = blocks.shape[-1] * sparse_block
    if rng.random() < 0.5:
        kwargs["key_scale"] = randn(rng.choice((1, batch)), n).abs()
    if rng.random() < 0.4:
        kwargs["mask"] = randn(1, rows, width) > -1
    if rng.random() < 0.4:
        kwargs["bias"] = randn(batch, 1, width).to(rng.choice(FLOATS[:3]))
    if rng.random() < 0.5:
        kwargs["scale"] = 0.125
    query = (
        randn(batch, heads, rows, dim).transpose(1, 2)
        if seed % 2
        else randn(batch, rows, heads, dim)
    )
    key = randn(rng.choice((1, batch)), n, dim + 3)[..., 2:-1]
    weights = randn(batch, heads, rows).mT.to(rng.choice(FLOATS[:3]))
    args = (query.to(q), key.to(k), weights, blocks, end)
    kwargs.update(sparse_block=sparse_block, anchored=anchored)
    return (
        tuple(x.to(device) for x in args),
        {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()},
    )


SHAPES = [(3, 40), (64, 128), (17, 256), (1, 32)]
if ON_GPU:
    SHAPES += [(5, 128), (32, 128), (128, 64), (2, 2)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads, dim", SHAPES)
def test_scores_equal_the_reference(heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    for seed in range(3 if ON_GPU else 1):
        args, kwargs = case(seed * 31 + heads, dtype, dtype, heads, dim, device)
        got = sparse_mqa_logits(*args, **kwargs)
        assert got.dtype == torch.float32 and got.is_contiguous()
        want = reference("sparse_mqa_logits", *args, **kwargs)
        assert_scores_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "q, k",
    [(q, k) for i, q in enumerate(FLOATS) for j, k in enumerate(FLOATS) if (i - j) % 4 in (1, 2)],
    ids=str,
)
def test_queries_and_keys_of_different_dtypes(q: torch.dtype, k: torch.dtype, device: str) -> None:
    args, kwargs = case(7, q, k, 4, 64, device)
    want = reference("sparse_mqa_logits", *args, **kwargs)
    assert_scores_close(sparse_mqa_logits(*args, **kwargs), want, TOLERANCE[q if q == k else k])


def test_bf16_scores_into_a_given_buffer(device: str) -> None:
    args, kwargs = case(3, torch.bfloat16, torch.bfloat16, 4, 64, device)
    full = sparse_mqa_logits(*args, **kwargs)
    out = torch.empty(full.shape, dtype=torch.bfloat16, device=device)
    got = sparse_mqa_logits(*args, **kwargs, out=out, out_dtype=torch.bfloat16)
    assert got is out
    # The interpreter rounds to bf16 towards zero.
    assert_scores_close(got, full.double(), 2**-7)


def test_nothing_is_written_outside_the_result(device: str) -> None:
    args, kwargs = case(5, torch.bfloat16, torch.bfloat16, 4, 64, device)
    want = sparse_mqa_logits(*args, **kwargs)
    guarded = torch.full((want.numel() + 256,), 1e30, device=device)
    out = guarded[128:-128].view(want.shape)
    sparse_mqa_logits(*args, **kwargs, out=out)
    assert torch.equal(out, want)
    assert bool((guarded[:128] == 1e30).all() and (guarded[-128:] == 1e30).all())


def test_infinite_and_missing_numbers_go_through(device: str) -> None:
    q = torch.randn(1, 1, 3, 32, device=device)
    k = torch.randn(1, 16, 32, device=device)
    k[0, 2, 1], k[0, 5, 0], k[0, 7, 3] = torch.nan, torch.inf, -torch.inf
    w = torch.randn(1, 1, 3, device=device)
    blocks = torch.arange(2, device=device, dtype=torch.int32).view(1, 1, 2)
    end = torch.tensor([[16]], device=device)
    got = sparse_mqa_logits(q, k, w, blocks, end, sparse_block=8)
    want = reference("sparse_mqa_logits", q, k, w, blocks, end, sparse_block=8)
    assert_scores_close(got, want, 1e-5)


def test_keys_beyond_two_to_the_31_bytes(device: str) -> None:
    step = 2**30 + 64
    room = torch.empty(3 * step + 64, dtype=torch.uint8, device=device)
    k = room.as_strided((1, 4, 64), (0, step, 1)).view(FP8)
    value = torch.randn(1, 4, 64, device=device)
    for row in range(4):
        k[:, row] = value[:, row].to(FP8)
    q = torch.randn(1, 1, 2, 64, device=device).to(FP8)
    w = torch.ones(1, 1, 2, device=device)
    blocks = torch.tensor([[[3, 1]]], dtype=torch.int32, device=device)
    end = torch.tensor([[2]], dtype=torch.int32, device=device)
    got = sparse_mqa_logits(q, k, w, blocks, end, sparse_block=1)
    want = reference("sparse_mqa_logits", q, k.contiguous(), w, blocks, end, sparse_block=1)
    assert_scores_close(got, want, TOLERANCE[FP8])


@pytest.mark.parametrize("width", [2048, 16384] if ON_GPU else [2048])
def test_long_rows(width: int, device: str) -> None:
    """Runs of tiles that several programs share, and ends inside of tiles."""
    n, rows = 3 * width, 2
    ids = torch.stack([torch.randperm(n // 8)[: width // 8] for _ in range(rows)])[None]
    ends = torch.tensor([[n, n // 2 + 3]], dtype=torch.int32)
    ids, ends = ids.to(device), ends.to(device)
    shape = {"num_positions": n, "block_size": 8, "sparse_block": 8}
    blocks, end = candidate_expand(ids, None, ends, **shape)
    q = torch.randn(1, rows, 32, 32, device=device).to(FP8)
    k = torch.randn(1, n, 32, device=device).to(FP8)
    w = torch.randn(1, rows, 32, device=device)
    args = (q, k, w, blocks, end)
    got = sparse_mqa_logits(*args, sparse_block=8, row_end=ends)
    want = reference("sparse_mqa_logits", *args, sparse_block=8, row_end=ends)
    assert_scores_close(got, want, TOLERANCE[FP8])


def test_limits_are_named(device: str) -> None:
    args, kwargs = case(3, torch.float32, torch.float32, 4, 64, device)
    q, k, w, *rest = args
    with pytest.raises(ValueError, match="heads is 129"):
        sparse_mqa_logits(q[:, :, :1].expand(-1, -1, 129, -1), k, w, *rest, **kwargs)
    with pytest.raises(TypeError, match="float64"):
        sparse_mqa_logits(q.double(), k, w, *rest, **kwargs)
    with pytest.raises(ValueError, match="the number of positions is 2147483648"):
        sparse_mqa_logits(q, k[:, :1].expand(-1, 2**31, -1), w, *rest, **kwargs)
    with pytest.raises(ValueError, match="head dim is 257"):
        sparse_mqa_logits(q[..., :1].expand(-1, -1, -1, 257), k, w, *rest, **kwargs)
