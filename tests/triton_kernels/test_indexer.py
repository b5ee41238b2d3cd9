"""Whole selections against the reference, on integers that every dtype computes exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsa_compile.kernels import triton_indexer
from dsa_compile.kernels.triton_dense import score_rows
from dsa_compile.kernels.triton_indexer import (
    indexer_block_max,
    indexer_publish,
    indexer_select,
)
from dsa_compile.kernels.triton_tiles import DenseTiles

from .conftest import ON_GPU
from .values import FP8, assert_scores_close, kernel_tests, reference

exact_case = kernel_tests("cases").exact_case


def arguments(case: Any, device: str) -> tuple[list[Any], dict[str, Any]]:
    """A case of the kernel tests; float64 has no kernels, and fp32 holds its numbers too."""

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return (x.float() if x.dtype == torch.float64 else x).to(device)

    kwargs = {name: moved(value) for name, value in case.kwargs.items()}
    return [moved(x) for x in (case.q, case.k, case.weights)], kwargs


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(24 if ON_GPU else 8))
def test_selection_equals_the_reference(seed: int, device: str) -> None:
    case = exact_case(seed, candidates=seed % 2 == 1)
    args, kwargs = arguments(case, device)
    rng = random.Random(seed)
    kwargs.update(topk=rng.randint(1, args[1].shape[1]), fill=rng.choice((None, -1e9)))
    if case.block_ids is not None:
        kwargs.update(
            block_ids=case.block_ids.to(device),
            block_size=case.block_size,
            anchored=case.anchored,
        )
    want = torch.ops.dsa.indexer_select(*args, **kwargs)
    if ON_GPU:
        same(indexer_select(*args, **kwargs), want)
    budget = 4 * args[1].shape[1] * rng.choice((0, 1, 2, 3))
    same(indexer_select(*args, **kwargs, budget=budget), want)


@pytest.mark.parametrize("seed", range(12 if ON_GPU else 5))
def test_blocks_of_a_source_layer_equal_the_reference(seed: int, device: str) -> None:
    args, kwargs = arguments(exact_case(100 + seed, candidates=False), device)
    rng = random.Random(seed)
    n = args[1].shape[1]
    kwargs.update(topk=rng.randint(0, n), fill=rng.choice((None, -1e9)))
    block_size = rng.choice((1, 2, 3, 8, 200))
    kwargs["block_size"] = block_size
    budget = 4 * n * rng.choice((1, 2, 1000))
    want = torch.ops.dsa.indexer_block_max(*args, **kwargs)
    same(indexer_block_max(*args, **kwargs, budget=budget), want)
    kwargs.update(
        num_blocks=rng.randint(1, -(-n // block_size)),
        pin_newest=rng.random() < 0.7,
        pin_value=rng.choice((None, 1e9)),
    )
    want = torch.ops.dsa.indexer_publish(*args, **kwargs)
    same(indexer_publish(*args, **kwargs, budget=budget), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize("heads, dim", [(3, 40), (64, 128), (128, 256)])
def test_dense_scores(heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Every score of rows with a range, by asking for as many slots as positions."""
    rows, n = 5, 70
    q = torch.randn(1, rows, heads, dim, device=device).to(dtype)
    k = torch.randn(1, n, dim, device=device).to(dtype)
    w = torch.randn(1, rows, heads, device=device)
    kwargs: dict[str, Any] = {
        "topk": n,
        "row_start": torch.tensor([[0, 3, 60, 20, 0]], device=device),
        "row_end": torch.tensor([[70, 40, 70, 20, 1]], device=device),
        "key_scale": torch.rand(1, n, device=device),
    }
    got, _ = indexer_select(q, k, w, **kwargs)
    want, _ = reference("indexer_select", q, k, w, **kwargs)
    assert_scores_close(got, want, 2e-3 if dtype == FP8 else 1e-5)


def test_results_go_into_given_buffers(device: str) -> None:
    args = [torch.randn(1, 3, 2, 4), torch.randn(1, 9, 4), torch.randn(1, 3, 2)]
    args = [x.round().to(device) for x in args]
    want = torch.ops.dsa.indexer_select(*args, topk=3)
    out = tuple(torch.empty_like(x) for x in want)
    got = indexer_select(*args, topk=3, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    same(got, want)


@pytest.mark.parametrize("pair", [1, 2, 4])
def test_rows_that_share_a_product(pair: int, device: str) -> None:
    rows, n = 7, 40
    q = torch.randn(2, rows, 3, 32, device=device).bfloat16()
    k = torch.randn(2, n, 32, device=device).bfloat16()
    w = torch.randn(2, rows, 3, device=device)
    bias = torch.randn(1, rows, n, device=device)
    mask = torch.rand(2, 1, n, device=device) < 0.7
    out = torch.full((2, rows + 1, 48), 1e30, device=device)
    score_rows(
        q,
        k,
        w,
        out[:, :rows],
        scale=0.5,
        key_scale=None,
        row_start=None,
        row_end=None,
        mask=mask,
        bias=bias,
        group=3,
        tiles=DenseTiles(32, pair, 4, 3),
    )
    assert bool((out[:, rows] == 1e30).all() and (out[..., n:] == 1e30).all())
    product = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu()
    want = torch.einsum("bsht,bsh->bst", product, w.double()) * 0.5 + bias
    want = want.masked_fill(~mask, -torch.inf)
    assert_scores_close(out[:, :rows, :n], want, 1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("tiles", [DenseTiles(128, 2, 4, 2), DenseTiles(256, 4, 8, 2)], ids=str)
def test_the_dense_scorers_maxima(tiles: DenseTiles, bounds: bool, device: str) -> None:
    """Each is the largest of its group's scores; groups of a tile hold equally many positions."""
    rows, n = 7, 300
    q = torch.randn(2, rows, 3, 32, device=device).bfloat16()
    k = torch.randn(2, n, 32, device=device).bfloat16()
    w = torch.randn(2, rows, 3, device=device)
    starts = ends = None
    if bounds:
        starts = torch.tensor([[0, 40, 299, 5, 290, 0, 128]], device=device)
        ends = torch.tensor([[300, 45, 300, 5, 310, 127, 256]], device=device)
    out = torch.full((2, rows, n), torch.nan, device=device)
    share = 8 * tiles.warps
    count = -(-n // tiles.tile) * share
    maxima = torch.full((2 * rows, count), torch.nan, device=device)
    rest: dict[str, Any] = dict.fromkeys(("key_scale", "mask", "bias"))
    rest |= {"row_start": starts, "row_end": ends, "group": 3, "tiles": tiles, "scale": 0.5}
    score_rows(q, k, w, out, maxima=maxima, **rest)
    place = torch.arange(count // share * tiles.tile, device=device)
    seen = (place < n).expand(2, rows, -1)
    if starts is not None and ends is not None:
        seen = seen & (place >= starts[..., None]) & (place < ends[..., None])
    wide = torch.full(seen.shape, -torch.inf, device=device)
    wide[..., :n] = out
    wide = wide.masked_fill(~seen, -torch.inf)
    want = wide.unflatten(-1, (-1, 2, tiles.warps, 2, 8)).amax((3, 5)).flatten(2).flatten(0, 1)
    tile_seen = seen.unflatten(-1, (-1, tiles.tile)).any(-1).repeat_interleave(share, -1)
    assert bool(tile_seen.any())
    # NaN stands for a group of no position, and unseen tiles hold anything.
    nothing = maxima.isnan() & (want == -torch.inf)
    got = torch.where(tile_seen.flatten(0, 1) & ~nothing, maxima, want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bounds", "mask", "few", "whole", "tiles"])
def test_selections_whose_bar_the_dense_scorer_found(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of wide rows, taken by narrow ones."""
    monkeypatch.setattr(triton_indexer, "groups_before", lambda *_: 64)
    rows, n = 6, 900
    q = torch.randint(-3, 4, (1, rows, 2, 32), device=device).bfloat16()
    k = torch.randint(-3, 4, (1, n, 32), device=device).bfloat16()
    w = torch.randint(-2, 3, (1, rows, 2), device=device).float()
    kwargs: dict[str, Any] = {"topk": 20}
    if kind == "bounds":
        kwargs["row_start"] = torch.tensor([[0, 3, 700, 20, 899, 128]], device=device)
        kwargs["row_end"] = torch.tensor([[900, 40, 900, 20, 900, 512]], device=device)
    elif kind == "mask":
        kwargs["mask"] = torch.rand(1, rows, n, device=device) < 0.1
    elif kind == "few":
        kwargs["row_end"] = torch.tensor([[3, 0, 1, 900, 20, 21]], device=device)
    want = torch.ops.dsa.indexer_select(q, k, w, **kwargs)
    budget = {"budget": 4 * n * 5} if kind == "tiles" else {}
    same(indexer_select(q, k, w, **kwargs, **budget), want)
