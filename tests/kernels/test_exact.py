"""Both providers against a slow oracle on data without rounding: whole results, ties included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from . import oracle
from .cases import exact_case
from .oracle import NEG_INF, Case
from .seams import CUTS, cut

SEEDS = st.integers(0, 2**32 - 1)
many = settings(max_examples=150, deadline=None, derandomize=True)

pytestmark = pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])


def ops(provider: str) -> Any:
    return getattr(torch.ops, provider)


def filled(rng: random.Random) -> dict[str, float]:
    return rng.choice(({}, {}, {"fill": NEG_INF}, {"fill": -1e9}, {"fill": 0.0}))


def result_dtype(case: Case) -> torch.dtype:
    wide = torch.float64 in (case.q.dtype, case.k.dtype, case.weights.dtype)
    return torch.float64 if wide else torch.float32


def table(rows: list[Any], like: Tensor, width: int) -> Tensor:
    return torch.tensor(rows, dtype=like.dtype).reshape(*like.shape[:2], width)


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@many
@given(seed=SEEDS, cuts=CUTS, candidates=st.booleans())
def test_select(provider: str, seed: int, cuts: dict[str, Any], candidates: bool) -> None:
    case = exact_case(seed, candidates=candidates)
    rng = random.Random(seed)
    topk, options = rng.randint(0, case.positions), filled(rng)
    blocks: dict[str, Any] = {}
    if candidates:
        blocks = {
            "block_ids": case.block_ids,
            "block_size": case.block_size,
            "anchored": case.anchored,
        }
    with cut(**cuts):
        values, indices = ops(provider).indexer_select(
            case.q, case.k, case.weights, topk=topk, **case.kwargs, **blocks, **options
        )
    assert values.dtype == result_dtype(case) and indices.dtype == torch.int64
    fill = options.get("fill", NEG_INF)
    want = [oracle.select_row(case, b, s, topk, fill) for b, s in case.rows()]
    same(values, table([v for v, _ in want], values, topk))
    same(indices, table([i for _, i in want], indices, topk))


@many
@given(seed=SEEDS, cuts=CUTS, pin=st.sampled_from([None, torch.inf, 5.0]))
def test_publish(provider: str, seed: int, cuts: dict[str, Any], pin: float | None) -> None:
    case = exact_case(seed, candidates=False)
    rng = random.Random(seed)
    topk, options = rng.randint(0, case.positions), filled(rng)
    block_size = rng.choice((1, 2, 3, 4, 8, 64))
    count = rng.randint(0, -(-case.positions // block_size))
    args = {"topk": topk, "block_size": block_size, **case.kwargs, **options}
    pinned = {"pin_newest": pin is not None} if pin in (None, torch.inf) else {"pin_value": pin}
    with cut(**cuts):
        values, indices, block_values, block_indices = ops(provider).indexer_publish(
            case.q, case.k, case.weights, num_blocks=count, **pinned, **args
        )
        again = ops(provider).indexer_block_max(case.q, case.k, case.weights, **args)
    fill = options.get("fill", NEG_INF)
    want = [oracle.select_row(case, b, s, topk, fill) for b, s in case.rows()]
    same(values, table([v for v, _ in want], values, topk))
    same(indices, table([i for _, i in want], indices, topk))
    same(again[0], values)
    same(again[1], indices)
    maxima = [oracle.block_max_row(case, b, s, block_size, fill) for b, s in case.rows()]
    same(again[2], table(maxima, values, -(-case.positions // block_size)))
    chosen = [
        oracle.publish_row(row, oracle.bounds(case, b, s)[1], count, block_size, pin)
        for row, (b, s) in zip(maxima, case.rows(), strict=True)
    ]
    same(block_values, table([v for v, _ in chosen], values, count))
    same(block_indices, table([i for _, i in chosen], indices, count))


def chain(provider: str, case: Case, topk: int, sparse_block: int) -> dict[str, Tensor]:
    """The sparse form of a selection, op by op."""
    op = ops(provider)
    start, end = case.get("row_start"), case.get("row_end")
    shape = {"sparse_block": sparse_block, "anchored": case.anchored}
    n = case.positions
    blocks, stop = op.candidate_expand(
        case.block_ids, start, end, num_positions=n, block_size=case.block_size, **shape
    )
    place = op.candidate_columns(blocks, start, num_positions=n, **shape)
    kwargs = dict(case.kwargs)
    wide = place.expand(*case.q.shape[:2], -1)
    for name in ("mask", "bias"):
        full = case.get(name)
        if full is not None:
            kwargs[name] = full.expand(*case.q.shape[:2], -1).gather(-1, wide)
    logits = op.sparse_mqa_logits(case.q, case.k, case.weights, blocks, stop, **shape, **kwargs)
    values, columns = op.topk(logits, stop, topk=topk)
    values, indices = op.topk_remap(values, columns, blocks, start, num_positions=n, **shape)
    return {
        "blocks": blocks,
        "stop": stop,
        "place": place,
        "logits": logits,
        "columns": columns,
        "values": values,
        "indices": indices,
    }


@many
@given(seed=SEEDS, cuts=CUTS)
def test_sparse_chain_is_the_dense_selection(
    provider: str, seed: int, cuts: dict[str, Any]
) -> None:
    case = exact_case(seed, candidates=True)
    rng = random.Random(seed)
    divisors = [d for d in range(1, case.block_size + 1) if case.block_size % d == 0]
    sparse_block, topk = rng.choice(divisors), rng.randint(0, case.positions)
    with cut(**cuts):
        got = chain(provider, case, topk, sparse_block)
    want = [oracle.select_row(case, b, s, topk) for b, s in case.rows()]
    same(got["values"], table([v for v, _ in want], got["values"], topk))
    same(got["indices"], table([i for _, i in want], got["indices"], topk))
    assert got["columns"].dtype == got["blocks"].dtype == got["stop"].dtype == torch.int32
    for b, s in case.rows():
        low, high = oracle.bounds(case, b, s)
        blocks, stop = oracle.expand_row(
            oracle.at(case.block_ids, b, s).tolist(),
            low,
            high,
            case.positions,
            case.block_size,
            sparse_block,
            case.anchored,
        )
        assert oracle.at(got["blocks"], b, s).tolist() == blocks
        assert int(oracle.at(got["stop"], b, s)) == stop
        places = [
            oracle.column_position(blocks[c // sparse_block], low, c, sparse_block, case.anchored)
            for c in range(len(blocks) * sparse_block)
        ]
        inside = [min(max(p, 0), case.positions - 1) for p in places]
        assert oracle.at(got["place"], b, s).tolist() == inside
        assert len(set(places[:stop])) == stop
        row, seen = oracle.scores(case, b, s), set(oracle.visible(case, b, s))
        logits = [row[p] if c < stop and p in seen else NEG_INF for c, p in enumerate(places)]
        assert got["logits"][b, s].tolist() == logits
