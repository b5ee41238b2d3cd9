"""Scores of ordinary numbers: rounding, low precision, extreme values, and realistic shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from . import oracle
from .oracle import NEG_INF, Case
from .seams import cut

PROVIDERS = ["dsa", "dsa_cpu"]
pytestmark = pytest.mark.parametrize("provider", PROVIDERS)


def ops(provider: str) -> Any:
    return getattr(torch.ops, provider)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def agrees(case: Case, values: Tensor, indices: Tensor, topk: int, tolerance: float = 1e-4) -> None:
    """Every row picks visible positions only, and none that it left out is clearly better."""
    for b, s in case.rows():
        row, seen = oracle.scores(case, b, s), oracle.visible(case, b, s)
        picked, got = indices[b, s].tolist(), values[b, s].tolist()
        found = min(topk, len(seen))
        chosen = picked[:found]
        assert len(set(picked)) == topk and set(chosen) <= set(seen)
        assert got[:found] == sorted(got[:found], reverse=True)
        for value, place in zip(got, chosen, strict=False):
            assert math.isclose(value, row[place], rel_tol=tolerance, abs_tol=tolerance)
        rest = [row[p] for p in set(seen) - set(chosen)]
        if rest and chosen:
            assert max(rest) <= min(row[p] for p in chosen) + tolerance
        assert got[found:] == [NEG_INF] * (topk - found)
        hidden = sorted(set(range(case.positions)) - set(chosen), reverse=True)
        if found < topk:
            assert picked[found:] == hidden[: topk - found]


@pytest.mark.parametrize("path", ["gather", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("n", [200, 203, 1003])
def test_consumer(provider: str, dtype: torch.dtype, n: int, path: str) -> None:
    batch, rows, heads, dim, block_size = 2, 6, 8, 32, 8
    blocks = -(-n // block_size)
    ids = torch.stack([torch.randperm(blocks)[:9] for _ in range(batch * rows)])
    ids = ids.view(batch, rows, 9).to(torch.int32)
    ids[:, :, 0] = blocks - 1
    end = torch.randint(0, n + 1, (batch, rows))
    end[0] = n
    case = Case(
        randn(batch, rows, heads, dim, dtype=dtype),
        randn(batch, n, dim, dtype=dtype),
        randn(batch, rows, heads, dtype=dtype),
        {"scale": dim**-0.5, "row_end": end},
        ids,
        block_size,
    )
    with cut(path=path):
        values, indices = ops(provider).indexer_select(
            case.q,
            case.k,
            case.weights,
            topk=32,
            block_ids=ids,
            block_size=block_size,
            **case.kwargs,
        )
    agrees(case, values, indices, 32, 1e-9 if dtype == torch.float64 else 1e-4)


def test_low_precision_products_are_exact(provider: str) -> None:
    """bf16 and fp16 inputs give the scores of the same numbers in fp32."""
    q, k, w = randn(1, 3, 4, 16), randn(1, 50, 16), randn(1, 3, 4)
    for dtype in (torch.bfloat16, torch.float16):
        low = [x.to(dtype) for x in (q, k, w)]
        got = ops(provider).indexer_select(*low, topk=50)
        want = ops(provider).indexer_select(*(x.float() for x in low), topk=50)
        assert got[0].dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_half_precision_does_not_overflow(provider: str) -> None:
    q = torch.full((1, 1, 2, 64), 200.0, dtype=torch.float16)
    k = torch.full((1, 4, 64), 200.0, dtype=torch.float16) * torch.arange(1, 5).half()[:, None]
    weights = torch.ones(1, 1, 2, dtype=torch.float16)
    values, indices = ops(provider).indexer_select(q, k, weights, topk=2)
    assert indices.tolist() == [[[3, 2]]]
    assert values.tolist() == [[[2 * 64 * 200.0 * 800.0, 2 * 64 * 200.0 * 600.0]]]


def test_double_precision_is_kept(provider: str) -> None:
    """A difference that fp32 cannot hold decides."""
    k = torch.tensor([[[1.0], [1.0 + 1e-12], [1.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, 1, 1)
    for q, weights in ((one.double(), one[..., 0]), (one, one[..., 0])):
        values, indices = ops(provider).indexer_select(q, k, weights, topk=1)
        assert values.dtype == torch.float64 and indices.tolist() == [[[1]]]


def test_not_a_number_wins_where_visible_only(provider: str) -> None:
    q = torch.ones(1, 3, 1, 1)
    k = torch.tensor([[[1.0], [math.nan], [3.0], [math.inf], [2.0]]])
    weights = torch.ones(1, 3, 1)
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1, 1] = False
    mask[0, 2, [1, 3]] = False
    values, indices = ops(provider).indexer_select(q, k, weights, topk=3, mask=mask)
    assert indices.tolist() == [[[1, 3, 2], [3, 2, 4], [2, 4, 0]]]
    assert math.isnan(values[0, 0, 0]) and values[0, 1:].tolist() == [
        [math.inf, 3.0, 2.0],
        [3.0, 2.0, 1.0],
    ]


def test_not_a_number_in_the_sparse_chain(provider: str) -> None:
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    k = torch.tensor([1.0, math.nan, 3.0, math.nan, 2.0, 5.0]).view(1, 6, 1)
    ids = torch.tensor([[[2, 0]]])
    op = ops(provider)
    blocks, end = op.candidate_expand(ids, num_positions=6, block_size=2, sparse_block=2)
    for path in ("gather", "dense"):
        with cut(path=path):
            logits = op.sparse_mqa_logits(q, k, weights, blocks, end, sparse_block=2)
        values, columns = op.topk(logits, end, topk=5)
        _, indices = op.topk_remap(values, columns, blocks, num_positions=6, sparse_block=2)
        assert columns.tolist() == [[[1, 3, 2, 0, -1]]]
        assert indices.tolist() == [[[1, 5, 4, 0, 3]]]


def test_blocks_with_not_a_number_are_published_first(provider: str) -> None:
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    k = torch.tensor([1.0, 2.0, math.nan, 0.5, 7.0, 1.0, 3.0]).view(1, 7, 1)
    values, _, best, blocks = [
        x[0, 0].tolist()
        for x in ops(provider).indexer_publish(q, k, weights, topk=1, num_blocks=4, block_size=2)
    ]
    assert math.isnan(values[0]) and math.isnan(best[0])
    assert blocks == [1, 3, 2, 0] and best[1:] == [math.inf, 7.0, 2.0]


def test_score_of_minus_infinity_found_nothing(provider: str) -> None:
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    k = torch.arange(1.0, 5.0).view(1, 4, 1)
    bias = torch.tensor([[[0.0, -math.inf, 0.0, -math.inf]]])
    values, indices = ops(provider).indexer_select(q, k, weights, topk=4, bias=bias, fill=-1e9)
    assert indices.tolist() == [[[2, 0, 3, 1]]]
    assert values.tolist() == [[[3.0, 1.0, -1e9, -1e9]]]


def test_negative_scores_beat_every_hidden_position(provider: str) -> None:
    """A hidden zero must not pass a visible negative score, whatever the fill."""
    q, weights = torch.ones(1, 1, 1, 1), -torch.ones(1, 1, 1)
    k = torch.arange(1.0, 6.0).view(1, 5, 1)
    mask = torch.tensor([[[True, False, True, False, False]]])
    for fill in (-math.inf, -1e9, 0.0):
        values, indices = ops(provider).indexer_select(q, k, weights, topk=3, mask=mask, fill=fill)
        assert indices.tolist() == [[[0, 2, 4]]]
        assert values.tolist() == [[[-1.0, -3.0, fill]]]
