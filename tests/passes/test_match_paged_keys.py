"""Reads of keys through a block table become scores of the cache itself, where that is proven."""

from __future__ import annotations

from typing import Any

import paged_models
import pytest
import torch
from paged_models import (
    BLOCK,
    NEG,
    TOPK,
    Paged,
    Several,
    by_index,
    by_slots,
    fused_fp8,
    reads_of_keys,
    rewritten,
    same,
    setting,
)
from pass_models import calls
from torch import Tensor

from dsa_compile.kernels.key_cache_reference import find_pages, read_tokens
from dsa_compile.kernels.quantise import dequantise

EVERY = (
    "by_index",
    "by_slots",
    "by_lines",
    "clamped",
    "shortened",
)
# A model that reads a page of -1 fails in these ops: its unused entries are 0.
NO_NEGATIVE = ("by_index_select", "by_gather")


def exact(inputs: tuple[Tensor, ...], candidates: bool = True) -> Tensor:
    """Picks [Q, S, k] from float64 scores of keys that are read token by token."""
    q, weights, cache, table, lens, ids = inputs[:6]
    positions = table.shape[1] * cache.shape[1]
    position = torch.arange(positions).expand(q.shape[0], -1)
    line = torch.arange(q.shape[0])[:, None]
    page, token, found = find_pages(cache, table, line, position)
    if cache.dtype == torch.uint8:
        quant = "fp8" if cache.shape[-1] == paged_models.DIM + 4 else "mxfp4"
        keys = dequantise(*read_tokens(cache, page, token, found, quant), quant).double()
    else:
        keys = cache[torch.where(found, page, 0), torch.where(found, token, 0)].double()
    product = torch.einsum("bshd,btd->bsht", q.double(), keys).relu()
    scores = torch.einsum("bsht,bsh->bst", product, weights.double())
    ends = lens[:, None] - q.shape[1] + 1 + torch.arange(q.shape[1])
    hidden = position[:, None] >= ends[..., None]
    if candidates:
        hidden = hidden | ~(ids[..., None] == position[0] // BLOCK).any(-2)
    values, places = scores.masked_fill(hidden, NEG).topk(TOPK, dim=-1)
    return places.masked_fill(values == NEG, -1)


@pytest.mark.parametrize("names", [EVERY, NO_NEGATIVE, ("fused_fp8",), ("fused_mxfp4",)])
def test_every_spelling_is_scored_where_it_lies(names: tuple[str, ...]) -> None:
    quant = names[0].removeprefix("fused_") if "fused" in names[0] else "none"
    unused = 0 if names is NO_NEGATIVE else -1
    model = Several([getattr(paged_models, name) for name in names]).eval()
    result = rewritten(model, setting(quant=quant, unused=unused))
    assert len(result.sites) == len(names)
    for site in result.sites:
        assert (site.kind, site.status) == ("consumer", "rewritten")
        assert any("never gathered" in note for note in site.notes)
    assert not reads_of_keys(result.graph_module)
    scorer = "sparse_mqa_logits" if quant == "none" else "paged_sparse_mqa_logits"
    assert len(calls(result.graph_module, scorer)) == len(names)
    for seed in (0, 1):
        other = setting(quant=quant, unused=unused, seed=seed)
        for name, got, wanted in zip(
            names, result.graph_module(*other), model(*other), strict=True
        ):
            assert same(got, wanted)
            if name != "shortened":
                assert same(got, exact(other))


@pytest.mark.parametrize("page", [32, 64, 128])
def test_pages_of_every_size(page: int) -> None:
    given = setting(page=page, seed=page)
    result = rewritten(Paged(by_index).eval(), given)
    assert not reads_of_keys(result.graph_module)
    assert same(result.graph_module(*given), exact(given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_cache_is_kept(dtype: torch.dtype) -> None:
    given = setting(dtype=dtype)
    model = Paged(by_slots).eval()
    result = rewritten(model, given)
    assert not reads_of_keys(result.graph_module)
    assert calls(result.graph_module, "sparse_mqa_logits")[0].args[1].meta["val"].dtype == dtype
    assert same(result.graph_module(*given), model(*given))


@pytest.mark.parametrize("read", [by_index, fused_fp8])
def test_the_table_may_have_any_length(read: Any) -> None:
    quant = "fp8" if read is fused_fp8 else "none"
    given = setting(quant=quant)
    model = Paged(read, cache=given[2]).eval()
    result = rewritten(model, given, dynamic=True)
    assert not reads_of_keys(result.graph_module)
    assert same(result.graph_module(*given), exact(given))
    q, weights, cache, table, lens, ids = given
    shorter = (q[:2], weights[:2], cache, table[:2, :3], lens[:2].clamp(max=40), ids[:2] % 6)
    assert same(result.graph_module(*shorter), model(*shorter))
    assert same(result.graph_module(*shorter), exact(shorter))


def test_requests_may_be_some_lines_of_a_larger_table() -> None:
    q, weights, cache, table, lens, ids = setting()
    large = torch.cat([table.flip(0), torch.randint(0, cache.shape[0], (3, table.shape[1]))])
    request = torch.tensor([2, 1, 0])
    model = Paged(by_index, lines=True).eval()
    given = (q, weights, cache, large, lens, ids, request)
    result = rewritten(model, given)
    assert not reads_of_keys(result.graph_module)
    assert same(result.graph_module(*given), model(*given))
    assert same(result.graph_module(*given), exact((q, weights, cache, table, lens, ids)))


def test_an_unused_page_inside_the_context_is_read_as_the_model_reads_it() -> None:
    q, weights, cache, table, _, ids = setting()
    lens = torch.full((3,), table.shape[1] * cache.shape[1])
    for read in (by_index, paged_models.clamped):
        model = Paged(read).eval()
        given = (q, weights, cache, table, lens, ids)
        result = rewritten(model, given)
        assert not reads_of_keys(result.graph_module)
        assert same(result.graph_module(*given), model(*given))


class Publishing(Paged):
    """A source: it publishes the best blocks beside its own selection."""

    def forward(self, *inputs: Tensor) -> Any:  # type: ignore[override]
        q, weights, _, table, lens, _ = inputs
        cache = inputs[2] if self.cache is None else self.cache
        scores = self.scores(q, weights, self.read(cache, table), lens)
        best = scores.unflatten(-1, (-1, BLOCK)).amax(-1)
        ends = lens[:, None] - q.shape[1] + 1 + torch.arange(q.shape[1])
        newest = torch.div(ends - 1, BLOCK, rounding_mode="floor")
        here = torch.arange(best.shape[-1]) == newest[..., None]
        top = best.masked_fill(here, float("inf")).topk(3, dim=-1)
        values, places = scores.topk(TOPK, dim=-1)
        picks = places.masked_fill(values == NEG, -1)
        return picks, top.indices.masked_fill(top.values == NEG, -1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_pages_are_scored_densely_where_they_lie(dynamic: bool) -> None:
    given = setting(quant="fp8")
    models = [Publishing(fused_fp8, cache=given[2]), Paged(fused_fp8, False, cache=given[2])]
    for model in models[: 1 if dynamic else 2]:
        result = rewritten(model.eval(), given, dynamic=dynamic)
        (site,) = result.sites
        assert site.kind == ("source" if isinstance(model, Publishing) else "single")
        assert any("never gathered" in note for note in site.notes)
        assert not reads_of_keys(result.graph_module)
        assert len(calls(result.graph_module, "paged_mqa_logits")) == 1
        got, wanted = result.graph_module(*given), model(*given)
        assert same(got, exact(given, candidates=False))
        if isinstance(model, Publishing):
            assert same(got[1], wanted[1])


def test_dense_scores_of_numbers_keep_their_gather_and_say_so() -> None:
    given = setting()
    model = Paged(by_index, candidates=False).eval()
    result = rewritten(model, given)
    (site,) = result.sites
    assert site.status == "fused" and any("no paged form" in note for note in site.notes)
    assert len(reads_of_keys(result.graph_module)) == 1
    assert same(result.graph_module(*given), model(*given))


def moved(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, (table.roll(1, 1) + 1) % cache.shape[0])


def test_a_table_that_is_computed_is_read_as_it_is() -> None:
    given = setting(unused=0)
    model = Paged(moved).eval()
    result = rewritten(model, given)
    assert not reads_of_keys(result.graph_module)
    assert same(result.graph_module(*given), model(*given))
    assert not same(result.graph_module(*given), exact(given))


class Written(Paged):
    """The cache gets new keys before the read (``early``) or between read and product."""

    def __init__(self, early: bool) -> None:
        super().__init__(by_index)
        self.early = early

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        q, weights, cache, table, lens, ids = inputs
        new = q[:, 0, 0]
        slots = table[:, 0] * cache.shape[1]
        if not self.early:
            keys = self.read(cache, table)
        cache.flatten(0, 1).index_copy_(0, slots, new * 3)
        if self.early:
            keys = self.read(cache, table)
        scores = self.scores(q, weights, keys, lens)
        block = torch.arange(scores.shape[-1]) // BLOCK
        scores = scores.masked_fill(~(ids[..., None] == block).any(-2), NEG)
        values, places = scores.topk(TOPK, dim=-1)
        return places.masked_fill(values == NEG, -1)


@pytest.mark.parametrize("early", [True, False])
def test_a_write_between_is_seen_exactly_where_the_model_sees_it(early: bool) -> None:
    given = setting(seed=5)
    given[3][1, 0] = (given[3][0, 0] + 1) % given[2].shape[0]
    given[3][2, 0] = (given[3][0, 0] + 2) % given[2].shape[0]
    model = Written(early).eval()
    result = rewritten(model, tuple(t.clone() for t in given))
    mine, theirs = (tuple(t.clone() for t in given) for _ in range(2))
    wanted = model(*theirs)
    outs = result.graph_module(*mine)
    assert torch.equal(outs[0], theirs[2])
    assert torch.equal(outs[1].sort(-1).values, wanted.sort(-1).values)
    assert not torch.equal(theirs[2], given[2])
