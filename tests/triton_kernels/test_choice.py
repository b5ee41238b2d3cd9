"""The one op that scores candidates alone or everything, whichever is cheaper: equal either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsa_compile.kernels.triton  # noqa: F401 (registers the ops)
from dsa_compile.kernels import triton_choice, triton_tiles
from dsa_compile.kernels.triton_sparse import sparse_mqa_logits
from dsa_compile.kernels.triton_tiles import columns_for_maxima, equal_parts


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("bounds", [False, True])
def test_both_forms_select_the_same(size: int, bounds: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    heads, dim, positions, rows, k = 4, 32, 37, 5, 6

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    q, keys, weights = draw(1, rows, heads, dim), draw(1, positions, dim), draw(1, rows, heads)
    ids = torch.randint(-1, -(-positions // size), (1, rows, 3), generator=generator)
    ids[0, 0] = -1
    ids = ids.to(device, torch.int32)
    end = torch.tensor([[20, 37, 0, 9, 31]], device=device) if bounds else None
    start = torch.tensor([[0, 3, 0, 5, 30]], device=device) if bounds else None
    blocks, valid = torch.ops.dsa.candidate_expand(
        ids, start, end, num_positions=positions, block_size=size, sparse_block=size
    )
    rest = {"topk": k, "sparse_block": size, "row_start": start, "row_end": end, "scale": 0.5}
    op = torch.ops.dsa_triton.select_columns
    sparse = op(q, keys, weights, blocks, valid, dense_below=0, **rest)
    dense = op(q, keys, weights, blocks, valid, dense_below=positions + 1, **rest)
    want = torch.ops.dsa.indexer_select(
        q,
        keys,
        weights,
        topk=k,
        scale=0.5,
        row_start=start,
        row_end=end,
        block_ids=ids,
        block_size=size,
    )
    for got in (sparse, dense):
        torch.testing.assert_close(got, tuple(want), rtol=1e-5, atol=1e-5)


def noted(form: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        called.append(form.__name__)
        return form(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    "rows, positions, below, dense",
    [(4, 35, 1, True), (4, 36, 1, False), (5, 35, 1, False), (4, 35, 0, False), (5, 35, 36, True)],
)
def test_few_rows_are_scored_densely_for_longer(
    rows: int, positions: int, below: int, dense: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 columns, so that 2.25 times as many positions are 36; 0 asks for candidates alone."""
    forms: list[str] = []
    for name in ("select_densely", "sparse_mqa_logits"):
        monkeypatch.setattr(triton_choice, name, noted(getattr(triton_choice, name), forms))
    q = torch.randn(1, rows, 2, 32, device=device)
    keys = torch.randn(1, positions, 32, device=device)
    ids = torch.tensor([[[0, 2]]], device=device).expand(1, rows, 2)
    blocks, end = torch.ops.dsa.candidate_expand(
        ids, num_positions=positions, block_size=8, sparse_block=8
    )
    weights = torch.ones(1, rows, 2, device=device)
    triton_choice.select_columns(
        q, keys, weights, blocks, end, topk=3, sparse_block=8, dense_below=below
    )
    assert forms == ["select_densely" if dense else "sparse_mqa_logits"]


@pytest.mark.parametrize("nan", [False, True])
def test_the_scorers_maxima_cut_nothing_off(nan: bool, device: str) -> None:
    """Rows so wide that the scorer hands maxima on: one plain, one of few columns, one of ties."""
    generator = torch.Generator().manual_seed(3)
    heads, dim, positions, rows, k, block = 2, 32, 12_000, 3, 40, 128
    # Whole numbers: sums are exact in any order.
    q = torch.randn(1, rows, heads, dim, generator=generator).round()
    keys = torch.randn(1, positions, dim, generator=generator).round()
    weights = torch.rand(1, rows, heads, generator=generator).mul(9).round()
    ids = torch.stack([torch.randperm(93, generator=generator)[:70] for _ in range(rows)])[None]
    ids[0, 1, 1:] = -1
    weights[0, 2] = 0.0
    if nan:
        keys[0, int(ids[0, 0, 0]) * block + 5] = float("nan")
    q, keys, weights, ids = (x.to(device) for x in (q, keys, weights, ids))
    end = torch.tensor([[12_000, 12_000, 9_500]], device=device)
    blocks, valid = torch.ops.dsa.candidate_expand(
        ids, None, end, num_positions=positions, block_size=block, sparse_block=block
    )
    assert columns_for_maxima(rows, blocks.shape[2] * block, k, 32, q.device.index) is not None
    got = torch.ops.dsa_triton.select_columns(
        q,
        keys,
        weights,
        blocks,
        valid,
        dense_below=0,
        topk=k,
        sparse_block=block,
        row_end=end,
    )
    logits = torch.ops.dsa.sparse_mqa_logits(
        q, keys, weights, blocks, valid, sparse_block=block, row_end=end
    )
    want = torch.ops.dsa.topk_remap(
        *torch.ops.dsa.topk(logits, valid, topk=k),
        blocks,
        num_positions=positions,
        sparse_block=block,
    )
    assert torch.equal(got[0].nan_to_num(9e9), want[0].nan_to_num(9e9))
    assert torch.equal(got[1], want[1])


@given(st.integers(1, 1 << 16), st.integers(1, 64))
def test_parts_of_a_row_are_equal(tiles: int, run: int) -> None:
    """No more programs than a row holds whole runs, none of them twice as long."""
    took = equal_parts(tiles, run)
    parts = max(1, tiles // run)
    assert -(-tiles // took) <= parts and took * parts < tiles + parts
    assert took < 2 * run and (tiles < run or took >= run)


@pytest.mark.parametrize("rows, tiles", [(1, 4), (64, 4), (256, 8), (2048, 16)])
def test_few_rows_keep_short_programs(
    rows: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 132 multiprocessors; 16,384 columns, top-512."""
    monkeypatch.setattr(triton_tiles, "processors", lambda index: 132)
    assert columns_for_maxima(rows, 16384, 512, 128, None) == tiles * 128


def test_maxima_are_those_of_what_is_written(device: str) -> None:
    """Of rounded scores they would be no bar."""
    q, k, w = (torch.randn(1, 2, *rest, device=device) for rest in ((4, 32), (32,), (4,)))
    blocks = torch.zeros(1, 2, 1, dtype=torch.int32, device=device)
    end = torch.full((1, 2), 2, device=device)
    maxima = torch.empty(2, 128, device=device)
    with pytest.raises(TypeError, match="maxima are those of fp32 scores"):
        sparse_mqa_logits(
            q, k, w, blocks, end, sparse_block=2, out_dtype=torch.bfloat16, maxima=maxima
        )
