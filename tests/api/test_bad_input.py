"""Inputs at the edge of what an indexer can be given, through the whole of ``optimize``.

What is selected is compared with the model's own dense selection: NaN at a visible position
ranks first, as in ``torch.topk``; hidden positions never win.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsa_compile

from .models import BLOCK, DIM, HEAD_DIM, HEADS, TOPK, TwoLevel, assert_same, inputs

STATIC = {"dynamic": False}
INF, NAN = torch.inf, torch.nan


class Consumer(torch.nn.Module):
    """A consumer alone: query [B, S, H, D], key [B, T, D], weights [B, S, H], ids [B, S, C].

    Row t sees the positions below ``lengths[t]``. Gives the selected scores and positions, -1
    where nothing was found.
    """

    def forward(
        self, query: Tensor, key: Tensor, weights: Tensor, ids: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bshd,btd->bsht", query, key).relu()
        scores = (scores * weights.unsqueeze(-1)).sum(2).float()
        position = torch.arange(key.shape[1])
        allowed = (ids[..., None, :] == (position // BLOCK)[:, None]).any(-1)
        allowed = allowed & (position < lengths[:, None])
        top = scores.masked_fill(~allowed, -INF).topk(min(TOPK, key.shape[1]), dim=-1)
        return top.values, top.indices.masked_fill(top.values == -INF, -1)


def operands(
    rows: int = 7, positions: int = 40, batch: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch, rows, HEADS, HEAD_DIM, generator=generator).to(dtype)
    key = torch.randn(batch, positions, HEAD_DIM, generator=generator).to(dtype)
    weights = torch.randn(batch, rows, HEADS, generator=generator).to(dtype)
    blocks = -(-positions // BLOCK)
    ids = torch.rand(batch, rows, blocks, generator=generator).argsort(-1)[..., : min(3, blocks)]
    lengths = torch.arange(rows) + positions - rows + 1
    return [query, key, weights, ids, lengths]


def check(args: list[Tensor], *, rewritten: bool = True) -> None:
    """Same values; same picks, unless scores tie at the last one (NaN and infinity do)."""
    model = Consumer().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    got, expected = optimized(*args), model(*args)
    torch.testing.assert_close(got[0], expected[0], equal_nan=True, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1] < 0, expected[1] < 0)
    if rewritten:
        assert [site.status for site in optimized.report.sites] == ["rewritten"]
        assert dsa_compile.verify(model, optimized, *args).largest_score_difference == 0.0
    finite = expected[0].isfinite().all(-1)
    assert torch.equal(got[1][finite].sort(-1).values, expected[1][finite].sort(-1).values)


def test_plain_operands() -> None:
    check(operands())


@pytest.mark.parametrize(
    "ids",
    [
        [-1, -1, -1],
        [2, 2, 2],
        [9, 0, 9],
        [0, 1000, 2**40],
        [-1, 3, -7],
        [-(2**40), 10**9, 1],
    ],
    ids=["unused", "same", "duplicated", "beyond", "negative", "junk"],
)
def test_candidate_ids_of_every_kind(ids: list[int]) -> None:
    args = operands()
    args[3] = torch.tensor(ids).expand(2, 7, 3).contiguous()
    check(args)


def test_a_row_that_sees_nothing() -> None:
    args = operands()
    args[4] = torch.tensor([0, -3, 1, 2, 40, 39, 0])
    check(args)


@pytest.mark.filterwarnings("ignore::dsa_compile.NoMatchWarning")
def test_fewer_positions_than_are_selected() -> None:
    check(operands(rows=3, positions=TOPK - 2), rewritten=False)


@pytest.mark.filterwarnings("ignore::dsa_compile.NoMatchWarning")
def test_one_position() -> None:
    check(operands(rows=1, positions=1), rewritten=False)


@pytest.mark.parametrize("batch", [1, 2])
def test_one_row(batch: int) -> None:
    check(operands(rows=1, batch=batch))


@pytest.mark.filterwarnings("ignore::dsa_compile.NoMatchWarning")
def test_zero_rows() -> None:
    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    assert_same(optimized(inputs()), model(inputs()))
    got = optimized(torch.zeros(0, 29, DIM))
    assert got[0].shape == (0, 29, DIM) and got[2].shape == (0, 29, TOPK)


@pytest.mark.parametrize("operand", [0, 1, 2], ids=["query", "key", "weights"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_values_that_are_not_finite(operand: int, value: float) -> None:
    args = operands()
    args[operand][1, 5, 0] = value
    check(args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = TwoLevel().eval().to(dtype)
    x = inputs(dtype=dtype)
    optimized = dsa_compile.optimize(model, config={**STATIC, "require_match": True})
    result = dsa_compile.verify(model, optimized, x)
    assert result.rows == 116
    # Where a near-tie falls the other way, the original's own scores say that it was one.
    assert result.largest_score_difference <= 64 * torch.finfo(dtype).eps


def test_a_product_that_overflows_half_precision() -> None:
    args = operands(dtype=torch.float16)
    args[0][0, 4] = 6e4
    args[1][0, 8] = 6e4
    model = Consumer().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    result = dsa_compile.verify(model, optimized, *args)
    assert result.rows == 0 or result.largest_score_difference in (0.0, INF)
