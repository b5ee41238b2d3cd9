"""Dimensions of size zero and one, through the dense form and the sparse chain alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsa_compile.kernels  # noqa: F401 (registers the ops)


@pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])
@pytest.mark.parametrize("batch, rows", [(0, 2), (1, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("n", [0, 1, 9])
@pytest.mark.parametrize("heads, dim", [(0, 3), (2, 0), (1, 1), (2, 3)])
def test_empty_dimensions(
    provider: str, batch: int, rows: int, n: int, heads: int, dim: int
) -> None:
    op: Any = getattr(torch.ops, provider)
    scores = torch.randn(batch, rows, heads, dim), torch.randn(batch, n, dim)
    scores = (*scores, torch.randn(batch, rows, heads))
    values, indices = op.indexer_select(*scores, topk=n)
    assert values.shape == indices.shape == (batch, rows, n)
    if heads == 0 or dim == 0:
        assert not values.any() and indices.equal(torch.arange(n).expand(batch, rows, n))
    size, count = {"block_size": 4}, -(-n // 4)
    source = op.indexer_publish(*scores, topk=n, num_blocks=count, **size)
    assert source[0].equal(values) and source[1].equal(indices)
    assert source[2].shape == source[3].shape == (batch, rows, count)
    for ids in (source[3], source[3][..., :0], source[3].to(torch.int32) - 1):
        shape = {"num_positions": n, "sparse_block": 4}
        blocks, end = op.candidate_expand(ids, **shape, **size)
        place = op.candidate_columns(blocks, **shape)
        assert place.shape == (batch, rows, blocks.shape[-1] * 4)
        logits = op.sparse_mqa_logits(*scores, blocks, end, sparse_block=4)
        found, columns = op.topk(logits, end, topk=n)
        got = op.topk_remap(found, columns, blocks, **shape)
        want = op.indexer_select(*scores, topk=n, block_ids=ids, **size)
        torch.testing.assert_close(got, want)
