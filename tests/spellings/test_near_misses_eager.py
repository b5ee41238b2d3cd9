"""The near-misses run, and differ from the proper indexer where they say so."""

from __future__ import annotations

import pytest
import torch

from .masks import INF
from .near_misses import BASE, NEAR_MISSES, TWINS
from .oracle import as_sets, case_of, sizes_of
from .routers import ROUTERS

SAME_SELECTION = {"scores returned", "scores in a loss", "fill within reach"}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_selects_something_else(name: str) -> None:
    near = NEAR_MISSES[name]
    inputs = near.inputs()
    with torch.no_grad():
        got = near.build()(*inputs)
        proper = case_of(BASE).model(*inputs)
    sizes = sizes_of(BASE)
    every = torch.ones(sizes.batch, sizes.rows, sizes.positions, dtype=torch.bool)
    differ = [
        not torch.equal(*(as_sets(x[i][0], sizes, every, "") for x in (got, proper)))
        for i in (0, 1)
    ]
    if name in SAME_SELECTION or name.startswith("added"):
        assert not any(differ)
    else:
        assert differ[1], "the consumer selects what a proper one selects"
        assert differ[0] or near.layers == ("consumer",)


@pytest.mark.parametrize("name", ["budget below k, by index", "budget one below k, by index"])
def test_a_small_budget_leaks_by_index(name: str) -> None:
    """The model's own rule keeps visible positions from outside the candidates."""
    inputs = NEAR_MISSES[name].inputs()
    allowed = case_of(BASE).expected.allowed[1]
    with torch.no_grad():
        leaky = as_sets(NEAR_MISSES[name].build()(*inputs)[1][0], sizes_of(BASE), allowed, "")
        safe = as_sets(
            TWINS["budget below k, by value"]()(*inputs)[1][0], sizes_of(BASE), allowed, ""
        )
    assert (leaky & ~allowed).any()
    assert not (safe & ~allowed).any()


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_run(name: str) -> None:
    x = case_of(BASE).inputs[0]
    with torch.no_grad():
        indices, values = ROUTERS[name]()(x)
    assert indices.dtype == torch.int64 and (values > -INF).all()
