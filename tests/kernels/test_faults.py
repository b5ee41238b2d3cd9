"""Small cases of faults that others met: causality, chunks, lengths, last blocks, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_compile.kernels  # noqa: F401 (registers the ops)

pytestmark = pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])


def ops(provider: str) -> Any:
    return getattr(torch.ops, provider)


def rising(rows: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that grow with the position, the same for every row."""
    k = torch.arange(1.0, n + 1).view(1, n, 1)
    return torch.ones(1, rows, 1, 1), k, torch.ones(1, rows, 1)


def picks(indices: Tensor, values: Tensor) -> list[set[int]]:
    shown = values > -torch.inf
    return [
        set(row[keep].tolist())
        for row, keep in zip(indices.flatten(0, -2), shown.flatten(0, -2), strict=True)
    ]


def test_future_never_wins(provider: str) -> None:
    end = torch.arange(1, 17)[None]
    values, indices = ops(provider).indexer_select(*rising(16, 16), topk=4, row_end=end)
    rows = picks(indices, values)
    assert rows[3] == {0, 1, 2, 3} and rows[8] == {5, 6, 7, 8}
    assert all(max(row) <= t for t, row in enumerate(rows))


def test_later_chunks_see_earlier_keys(provider: str) -> None:
    n, chunk = 96, 32
    k = torch.rand(1, n, 4)
    k[0, 5] = 100.0
    for first in range(0, n, chunk):
        end = torch.arange(first + 1, first + chunk + 1)[None]
        q, weights = torch.ones(1, chunk, 2, 4), torch.ones(1, chunk, 2)
        context = k[:, : first + chunk]
        values, indices = ops(provider).indexer_select(q, context, weights, topk=4, row_end=end)
        rows = picks(indices, values)
        assert all(5 in row for t, row in enumerate(rows, first) if t >= 5)


def test_negative_row_ends_see_nothing(provider: str) -> None:
    end = torch.tensor([[-2, -1, 0, 1, 2, 99]])
    values, indices = ops(provider).indexer_select(*rising(6, 4), topk=4, row_end=end)
    assert [len(row) for row in picks(indices, values)] == [0, 0, 0, 1, 2, 4]
    assert indices[0, 0].tolist() == [3, 2, 1, 0]


def test_static_cache_longer_than_what_is_filled(provider: str) -> None:
    q, k, weights = rising(3, 64)
    end = torch.tensor([[11, 12, 13]], dtype=torch.int32)
    values, indices = ops(provider).indexer_select(q, k, weights, topk=16, row_end=end)
    assert [len(row) for row in picks(indices, values)] == [11, 12, 13]
    assert all(max(row) < 13 for row in picks(indices, values))
    for row in indices[0]:
        assert len(set(row.tolist())) == 16


def test_last_block_is_partial(provider: str) -> None:
    op = ops(provider)
    q, k, weights = rising(1, 1003)
    ids = torch.tensor([[[125, 3, 60]]], dtype=torch.int32)
    blocks, end = op.candidate_expand(ids, num_positions=1003, block_size=8, sparse_block=8)
    assert blocks.tolist() == [[[3, 60, 125]]] and end.tolist() == [[19]]
    place = op.candidate_columns(blocks, num_positions=1003, sparse_block=8)[0, 0].tolist()
    want = [8 * b + i for b in (3, 60, 125) for i in range(8)]
    assert place == [min(p, 1002) for p in want]
    logits = op.sparse_mqa_logits(q, k, weights, blocks, end, sparse_block=8)
    assert logits[0, 0].tolist() == [p + 1.0 for p in want[:19]] + [-torch.inf] * 5
    values, columns = op.topk(logits, end, topk=6)
    _, indices = op.topk_remap(values, columns, blocks, num_positions=1003, sparse_block=8)
    assert indices.tolist() == [[[1002, 1001, 1000, 487, 486, 485]]]
    assert op.indexer_select(q, k, weights, topk=6, block_ids=ids, block_size=8)[1].equal(indices)


def test_pinned_newest_block_does_not_show_the_future(provider: str) -> None:
    """The block of the newest position holds later ones: candidates alone are not causal."""
    q, k, weights = rising(1, 32)
    end = torch.tensor([[10]])
    _, _, _, blocks = ops(provider).indexer_publish(
        q, k, weights, topk=1, num_blocks=1, block_size=8, row_end=end
    )
    assert blocks.tolist() == [[[1]]]
    values, indices = ops(provider).indexer_select(
        q, k, weights, topk=8, row_end=end, block_ids=blocks, block_size=8
    )
    assert picks(indices, values) == [{8, 9}]


def test_rows_that_see_nothing_pin_nothing(provider: str) -> None:
    q, k, weights = rising(2, 8)
    end = torch.tensor([[0, 1]])
    _, _, best, blocks = ops(provider).indexer_publish(
        q, k, weights, topk=1, num_blocks=2, block_size=4, row_end=end
    )
    assert best.tolist() == [[[-torch.inf, -torch.inf], [torch.inf, -torch.inf]]]
    assert blocks[0, 1].tolist() == [0, 1]


def test_anchored_blocks_follow_the_start_of_the_row(provider: str) -> None:
    """Two packed samples: ids count from each sample's own start, which no block divides."""
    q, k, weights = rising(2, 20)
    start, end = torch.tensor([[0, 7]]), torch.tensor([[7, 20]])
    ids = torch.tensor([[[1], [1]]])
    op = ops(provider)
    shape = {"num_positions": 20, "sparse_block": 4, "anchored": True}
    blocks, stop = op.candidate_expand(ids, start, end, block_size=4, **shape)
    assert blocks.tolist() == [[[1], [2]]] and stop.tolist() == [[3, 4]]
    place = op.candidate_columns(blocks, start, **shape)
    assert place.tolist() == [[[4, 5, 6, 7], [11, 12, 13, 14]]]
    values, indices = op.indexer_select(
        q,
        k,
        weights,
        topk=4,
        row_start=start,
        row_end=end,
        block_ids=ids,
        block_size=4,
        anchored=True,
    )
    assert picks(indices, values) == [{4, 5, 6}, {11, 12, 13, 14}]


def test_selection_is_reproducible(provider: str) -> None:
    rows = 33
    for visible in (480, 512, 768, 1500):
        logits = torch.rand(1, rows, visible) * 1e-3
        end = torch.full((1, rows), visible)
        first = ops(provider).topk(logits, end, topk=512)
        for _ in range(5):
            again = ops(provider).topk(logits, end, topk=512)
            assert all(a.equal(b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("topk", [1, 3, 7, 100, 2044, 3000])
def test_topk_of_long_rows_with_ties(provider: str, topk: int) -> None:
    logits = torch.randint(0, 40, (1, 3, 2500)).float()
    ends = [2500, 1200, 5]
    values, columns = ops(provider).topk(logits, torch.tensor([ends]), topk=topk)
    for s, end in enumerate(ends):
        row = logits[0, s].tolist()
        order = sorted(range(end), key=lambda c: (-row[c], c))[:topk]
        empty = topk - len(order)
        assert columns[0, s].tolist() == order + [-1] * empty
        assert values[0, s].tolist() == [row[c] for c in order] + [-torch.inf] * empty


@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_topk_of_long_rows_with_nan(provider: str, count: int) -> None:
    """NaN first, in order of column, whether the list holds all of them or not."""
    logits = torch.randint(0, 9, (1, 2, 2500)).float()
    place = torch.randperm(2500)[:count]
    logits[0, :, place] = torch.nan
    logits[0, 0, 5:900] = -torch.inf
    end = torch.tensor([[2500, 2400]])
    _, columns = ops(provider).topk(logits, end, topk=40)
    for s in range(2):
        row = logits[0, s, : int(end[0, s])].tolist()
        shown = [c for c, x in enumerate(row) if x != -torch.inf]
        order = sorted(
            shown, key=lambda c: (row[c] == row[c], -row[c] if row[c] == row[c] else 0, c)
        )
        assert columns[0, s].tolist() == order[:40]


def test_topk_honours_strides(provider: str) -> None:
    wide = torch.randn(5, 300)
    for logits in (torch.randn(300, 7).t()[None], wide[:, 3:203][None], wide.t()[::3, 1:3][None]):
        end = torch.full(logits.shape[:2], logits.shape[2])
        kept = min(5, logits.shape[2])
        got = ops(provider).topk(logits, end, topk=kept)
        want = torch.topk(logits.contiguous(), kept)
        assert got[0].equal(want.values) and got[1].long().equal(want.indices)


def test_topk_of_rows_past_the_32_bit_offset(provider: str) -> None:
    rows, stride = 33, 2**26
    storage = torch.empty(stride * (rows - 1) + 4096, dtype=torch.float16)
    logits = storage.as_strided((1, rows, 4096), (0, stride, 1))
    logits[0, :: rows - 1] = torch.randperm(4096).half() / 4096
    end = torch.zeros(1, rows, dtype=torch.int32)
    end[0, :: rows - 1] = 4096
    values, columns = ops(provider).topk(logits, end, topk=16)
    want = torch.topk(logits[0, rows - 1].float(), 16).values
    assert values[0, rows - 1].equal(want)
    assert logits[0, rows - 1].float()[columns[0, rows - 1].long()].equal(want)


def test_junk_ids_are_harmless(provider: str) -> None:
    q, k, weights = rising(1, 20)
    junk = [2**30, -(2**30), -1, 2**31 - 1, 3, 3, 3, 2**62, 5, -(2**63)]
    ids = torch.tensor([[junk]])
    op = ops(provider)
    values, indices = op.indexer_select(q, k, weights, topk=6, block_ids=ids, block_size=4)
    assert picks(indices, values) == [{12, 13, 14, 15}]
    blocks, end = op.candidate_expand(ids, num_positions=20, block_size=4, sparse_block=2)
    assert blocks.tolist() == [[[6, 7] + [7] * 18]] and end.tolist() == [[4]]


def test_blocks_past_the_end_may_hold_anything(provider: str) -> None:
    """Only the valid prefix of a block list is read."""
    q, k, weights = rising(1, 20)
    end = torch.tensor([[4]], dtype=torch.int32)
    for dtype, junk in ((torch.int32, 2**31 - 1), (torch.int64, 2**62), (torch.int64, -(2**62))):
        blocks = torch.tensor([[[2, junk, junk]]], dtype=dtype)
        logits = ops(provider).sparse_mqa_logits(q, k, weights, blocks, end, sparse_block=4)
        assert logits.tolist() == [[[9.0, 10.0, 11.0, 12.0] + [-torch.inf] * 8]]


def test_last_chunk_of_keys_shorter_than_a_block(provider: str) -> None:
    q, k, weights = rising(2, 3)
    ids = torch.zeros(1, 1, 1, dtype=torch.int32)
    values, indices = ops(provider).indexer_select(
        q, k, weights, topk=3, block_ids=ids, block_size=64
    )
    assert indices.tolist() == [[[2, 1, 0], [2, 1, 0]]]
