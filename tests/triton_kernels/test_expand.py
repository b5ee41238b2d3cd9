"""Expansion of candidate ids: exactly what the reference gives."""

from __future__ import annotations

import random

import pytest
import torch

from dsa_compile.kernels.triton_columns import candidate_columns
from dsa_compile.kernels.triton_expand import candidate_expand

from .conftest import ON_GPU
from .values import random_ids


@pytest.mark.parametrize("seed", range(32 if ON_GPU else 16))
def test_expansion_equals_the_reference(seed: int, device: str) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, rows = rng.choice((1, 2)), rng.choice((1, 3))
    n = rng.choice((1, 7, 64, 333, 1000))
    sparse_block = rng.choice((1, 2, 3, 4, 8, 16))
    block_size = sparse_block * rng.choice((1, 1, 2, 4, 8))
    count = rng.choice((1, 2, 5, 16, 33, 100))
    shape = (rng.choice((1, batch)), rng.choice((1, rows)), count)
    ids = random_ids(generator, shape, -(-n // block_size))
    ids = ids.to(rng.choice((torch.int32, torch.int64)), copy=True)
    if rng.random() < 0.3:
        ids = ids.mT.contiguous().mT
    start = torch.randint(-2, n + 2, (batch, 1), generator=generator) if seed % 2 else None
    end = torch.randint(-2, n + 3, (1, rows), generator=generator).int() if seed % 3 else None
    given = [x if x is None else x.to(device) for x in (ids, start, end)]
    kwargs = {
        "num_positions": n,
        "block_size": block_size,
        "sparse_block": sparse_block,
        "anchored": rng.random() < 0.5,
    }
    got = candidate_expand(*given, **kwargs)
    want = torch.ops.dsa.candidate_expand(*given, **kwargs)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    kwargs.pop("block_size")
    assert torch.equal(
        candidate_columns(got[0], given[1], **kwargs),
        torch.ops.dsa.candidate_columns(got[0], given[1], **kwargs),
    )


@pytest.mark.parametrize("count", [2048, 4096] if ON_GPU else [3000])
def test_as_many_candidates_as_models_have(count: int, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = random_ids(generator, (1, 1, count), 6000).int().to(device)
    end = torch.tensor([[47_003]], dtype=torch.int32, device=device)
    kwargs = {"num_positions": 48_000, "block_size": 8, "sparse_block": 8}
    got = candidate_expand(ids, None, end, **kwargs)
    want = torch.ops.dsa.candidate_expand(ids, None, end, **kwargs)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_source_of_the_partial_last_block(device: str) -> None:
    ids = torch.tensor([[[125, 3, 60, -1]]], dtype=torch.int32, device=device)
    blocks, end = candidate_expand(ids, num_positions=1003, block_size=8, sparse_block=8)
    assert blocks.tolist() == [[[3, 60, 125, 125]]]
    assert end.tolist() == [[19]]


def test_results_go_into_given_buffers(device: str) -> None:
    ids = torch.tensor([[[2, 0, 1]]], device=device)
    blocks = torch.full((1, 1, 3), 99, dtype=torch.int32, device=device)
    end = torch.full((1, 1), 99, dtype=torch.int32, device=device)
    kwargs = {"num_positions": 20, "block_size": 8, "sparse_block": 8}
    got = candidate_expand(ids, **kwargs, out=(blocks, end))
    assert got[0] is blocks and got[1] is end
    assert blocks.tolist() == [[[0, 1, 2]]] and end.tolist() == [[20]]
    with pytest.raises(ValueError, match="out must be"):
        candidate_expand(ids, **kwargs, out=(blocks[..., :2], end))


def test_more_candidates_than_are_held_at_once(device: str) -> None:
    # Neither the ids nor the blocks of the context fit a program's tiles, and two bounds are cut.
    ids = torch.arange(0, 40_000, 8, device=device).int().flip(0)[None, None].contiguous()
    start = torch.tensor([[24_003]], device=device)
    end = torch.tensor([[317_001]], device=device)
    kwargs = {"num_positions": 320_000, "block_size": 8, "sparse_block": 4}
    got = candidate_expand(ids, start, end, **kwargs)
    want = torch.ops.dsa.candidate_expand(ids, start, end, **kwargs)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
