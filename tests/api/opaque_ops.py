"""Ops as an engine registers them: what they compute cannot be seen in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_compile
from dsa_compile.kernels.key_cache_reference import parts_of_pages

LIBRARY = torch.library.Library("dsa_test_engine", "DEF")
NEG = float("-inf")


def _define(name: str, schema: str, kernel, fake, key: str = "CompositeExplicitAutograd") -> None:  # type: ignore[no-untyped-def]
    LIBRARY.define(name + schema)
    if kernel is not None:
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"dsa_test_engine::{name}", fake, lib=LIBRARY)


def dense(
    q: Tensor, kv: list[Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean: bool = True
) -> Tensor:
    """DeepGEMM's dense form: q [M, H, D] fp8, kv (data [T, D] fp8, scale [T])."""
    product = torch.einsum("mhd,td->mht", q.float(), kv[0].float()).relu()
    scores = torch.einsum("mht,mh->mt", product, weights.float()) * kv[1]
    position = torch.arange(kv[0].shape[0])
    shown = (position >= ks[:, None]) & (position < ke[:, None])
    return torch.where(shown, scores, NEG if clean else 7.5)


def unsigned(
    q: Tensor, kv: list[Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean: bool = True
) -> Tensor:
    """Like it, but without the relu of an indexer on the last head."""
    product = torch.einsum("mhd,td->mht", q.float(), kv[0].float())
    product = torch.cat([product[:, :-1].relu(), product[:, -1:]], 1)
    scores = torch.einsum("mht,mh->mt", product, weights.float()) * kv[1]
    position = torch.arange(kv[0].shape[0])
    return scores.masked_fill((position < ks[:, None]) | (position >= ke[:, None]), NEG)


def cut(
    q: Tensor, kv: list[Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean: bool = True
) -> Tensor:
    """Like it, but for scores beyond what operands near one give."""
    return dense(q, kv, weights, ks, ke).clamp(max=600.0)


def raising(
    q: Tensor, kv: list[Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean: bool = True
) -> Tensor:
    raise RuntimeError("wants a GPU of compute capability 9.0")


def dense_fake(
    q: Tensor, kv: list[Tensor], weights: Tensor, ks: Tensor, ke: Tensor, clean: bool = True
) -> Tensor:
    return q.new_empty((q.shape[0], kv[0].shape[0]), dtype=torch.float32)


_DENSE = "(Tensor q, Tensor[] kv, Tensor weights, Tensor ks, Tensor ke, bool clean=True) -> Tensor"
_define("mqa_logits", _DENSE, dense, dense_fake)
_define("unsigned_logits", _DENSE, unsigned, dense_fake)
_define("cut_logits", _DENSE, cut, dense_fake)
_define("raising_logits", _DENSE, raising, dense_fake)
_define("gpu_logits", _DENSE, dense, dense_fake, "CUDA")


def paged(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor, plan: Tensor, width: int
) -> Tensor:
    """DeepGEMM's paged form: q [Q, S, H, D], cache [pages, page, 1, D + 4], weights [Q*S, H]."""
    requests, rows, heads, _ = q.shape
    values, scales = parts_of_pages(cache.squeeze(2), "fp8")
    page = cache.shape[1]
    position = torch.arange(width)
    at = table.long().clamp(0, cache.shape[0] - 1)[:, position // page]
    keys = values.contiguous().view(torch.float8_e4m3fn).float()[at, position % page]
    factor = scales.contiguous().view(torch.float32)[..., 0][at, position % page]
    product = torch.einsum("bshd,btd->bsht", q.float(), keys).relu()
    scores = torch.einsum("bsht,bsh->bst", product, weights.view(requests, rows, heads))
    scores = scores * factor[:, None]
    ends = lens[:, None] - rows + 1 + torch.arange(rows)
    return scores.masked_fill(position >= ends[..., None], NEG).flatten(0, 1)


def paged_fake(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor, plan: Tensor, width: int
) -> Tensor:
    return q.new_empty((q.shape[0] * q.shape[1], width), dtype=torch.float32)


_define(
    "paged_mqa_logits",
    "(Tensor q, Tensor cache, Tensor weights, Tensor lens, Tensor table, Tensor plan, SymInt width)"
    " -> Tensor",
    paged,
    paged_fake,
)


def candidate_mask(ids: Tensor, ke: Tensor, width: int, block: int) -> Tensor:
    """True where a position is hidden: outside of the blocks, or from the row's end on."""
    position = torch.arange(width)
    inside = (ids[..., None] == position // block).any(-2)
    return ~(inside & (position < ke[:, None]))


_define(
    "candidate_mask",
    "(Tensor ids, Tensor ke, SymInt width, int block) -> Tensor",
    candidate_mask,
    lambda ids, ke, width, block: ids.new_empty((ids.shape[0], width), dtype=torch.bool),
)


def best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions int32 [M, k], unordered, -1 where nothing was found, and their scores."""
    values, places = logits.topk(k)
    return torch.where(values == NEG, -1, places).int().flip(-1), values.flip(-1)


def ascending(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The worst ones."""
    values, places = logits.topk(k, largest=False)
    return places.int(), values


def best_fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


_TOPK = "(Tensor logits, int k) -> (Tensor, Tensor)"
_define("topk", _TOPK, best, best_fake)
_define("worst", _TOPK, ascending, best_fake)


DENSE = {
    "query": "q",
    "key": "kv.0",
    "key_scale": "kv.1",
    "weights": "weights",
    "row_start": "ks",
    "row_end": "ke",
}
PAGED = {
    "query": "q",
    "cache": "cache",
    "weights": "weights",
    "context_lens": "lens",
    "block_table": "table",
}


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    yield
    for name in dsa_compile.registered_adapters():
        dsa_compile.remove_adapter(name)


def dense_adapter(op: str = "mqa_logits", **options: Any) -> None:
    dsa_compile.register_adapter(
        f"dsa_test_engine::{op}", "dense_logits", DENSE, ignored=("clean",), **options
    )
