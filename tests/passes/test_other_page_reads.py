"""Reads of keys that are no plain reads of whole pages keep their gather, and their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_models import DIM, Paged, Several, by_index, reads_of_keys, rewritten, same, setting
from pass_models import calls
from torch import Tensor


def next_page(cache: Tensor, table: Tensor) -> Tensor:
    page, columns = cache.shape[1], table.shape[1]
    position = torch.arange(columns * page)
    slots = table[:, (position // page + 1) % columns] * page + position % page
    return cache.flatten(0, 1)[slots]


def reversed_page(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table].flip(2).flatten(1, 2)


def next_token(cache: Tensor, table: Tensor) -> Tensor:
    page = cache.shape[1]
    position = torch.arange(table.shape[1] * page)
    slots = table[:, position // page] * page + (position + 1) % page
    return cache.flatten(0, 1)[slots]


def doubled(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table) * 2


def rounded(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table).to(torch.float8_e4m3fn).float()


def scale_of_another(cache: Tensor, table: Tensor) -> Tensor:
    """Fused pages whose scales are those of the token before."""
    page, width = cache.shape[1:]
    raw = cache[table].flatten(2)
    values = raw[..., : page * (width - 4)].contiguous().view(torch.float8_e4m3fn)
    scales = raw[..., page * (width - 4) :].contiguous().view(torch.float32).roll(1, -1)
    keys = values.unflatten(-1, (page, width - 4)).float() * scales.unsqueeze(-1)
    return keys.flatten(1, 2)


def capped(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table).clamp(-1e3, 1e3)


def mended(cache: Tensor, table: Tensor) -> Tensor:
    return by_index(cache, table).nan_to_num()


def capped_scale(cache: Tensor, table: Tensor) -> Tensor:
    """Fused pages whose scales are bounded beyond ordinary ones."""
    page, width = cache.shape[1:]
    raw = cache[table].flatten(2)
    values = raw[..., : page * (width - 4)].contiguous().view(torch.float8_e4m3fn)
    scales = raw[..., page * (width - 4) :].contiguous().view(torch.float32).clamp(max=1e3)
    keys = values.unflatten(-1, (page, width - 4)).float() * scales.unsqueeze(-1)
    return keys.flatten(1, 2)


def test_another_read_keeps_its_gather() -> None:
    given = setting(unused=0)
    reads = [next_page, reversed_page, next_token, doubled, rounded, capped, mended]
    model = Several(reads).eval()
    result = rewritten(model, given)
    assert len(reads_of_keys(result.graph_module)) == len(reads)
    assert not calls(result.graph_module, "paged_sparse_mqa_logits")
    for got, wanted in zip(result.graph_module(*given), model(*given), strict=True):
        assert same(got, wanted)


@pytest.mark.parametrize("read", [scale_of_another, capped_scale])
def test_fused_pages_with_other_scales_keep_their_gather(read: Any) -> None:
    given = setting(quant="fp8", unused=0)
    model = Paged(read).eval()
    result = rewritten(model, given)
    assert reads_of_keys(result.graph_module)
    assert not calls(result.graph_module, "paged_sparse_mqa_logits")
    assert same(result.graph_module(*given), model(*given))


def test_pages_that_do_not_hold_whole_blocks_keep_their_gather() -> None:
    given = setting(page=12, unused=0)
    model = Paged(by_index).eval()
    result = rewritten(model, given)
    assert len(reads_of_keys(result.graph_module)) == 1
    assert any("pages of 12 tokens" in note for note in result.sites[0].notes)
    assert same(result.graph_module(*given), model(*given))


def test_pages_that_lie_apart_keep_their_gather() -> None:
    q, weights, cache, table, lens, ids = setting(unused=0)
    apart = torch.stack([cache, cache + 1], 1)[:, 0]
    given = (q, weights, apart, table, lens, ids)
    model = Paged(by_index).eval()
    result = rewritten(model, given)
    assert any("lie apart" in note for note in result.sites[0].notes)
    assert same(result.graph_module(*given), model(*given))


class Altered(Paged):
    """The keys pass a norm between read and product."""

    def scores(self, q: Tensor, weights: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
        return super().scores(q, weights, torch.nn.functional.rms_norm(keys, keys.shape[-1:]), lens)


class Biased(Paged):
    """A parameter that is zero today is added to the keys."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shift = torch.nn.Parameter(torch.zeros(DIM))

    def scores(self, q: Tensor, weights: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
        return super().scores(q, weights, keys + self.shift, lens)


@pytest.mark.parametrize("kind", [Altered, Biased])
def test_keys_that_are_altered_keep_their_gather(kind: type[Paged]) -> None:
    given = setting()
    model = kind(by_index).eval()
    result = rewritten(model, given)
    assert len(reads_of_keys(result.graph_module)) == 1
    assert same(result.graph_module(*given), model(*given))
