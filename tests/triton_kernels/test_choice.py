"""The one op that scores candidates alone or everything, whichever is cheaper: equal either way."""

from __future__ import annotations

import pytest
import torch

import dsa_compile.kernels.triton  # noqa: F401 (registers the ops)


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
