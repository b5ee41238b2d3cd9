"""What only looks like an indexer is left as it is, and the report says why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from .hosts import HOSTS, assert_as_good, check_site, describe, fresh, hosts_of, run
from .model import Spelling
from .near_misses import BASE, CONSUMER, NEAR_MISSES, TWINS, NearMiss
from .oracle import case_of
from .routers import ROUTERS

RUNS = [(name, host) for i, name in enumerate(NEAR_MISSES) for host in hosts_of(i)]


def flat(out: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(out)


def assert_unchanged(got: Any, want: Any) -> None:
    for a, b in zip(flat(got), flat(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "host"), RUNS)
def test_a_near_miss_is_kept(name: str, host: str) -> None:
    near: NearMiss = NEAR_MISSES[name]
    model, inputs = near.build(), near.inputs()
    with torch.no_grad():
        want = model(*fresh(inputs))
    got = run(model, inputs, host)
    assert len(got.sites) >= 2, describe(got.sites)
    assert_unchanged(got.outputs[1:], want[1:])
    if near.layers == CONSUMER:
        with torch.no_grad():
            assert_as_good(model, inputs[0], got.outputs[:1], want[:1])
    else:
        assert_unchanged(got.outputs, want)
    kept = got.sites if near.layers != CONSUMER else got.sites[-1:]
    assert {s.status for s in kept} == {"kept"}, describe(got.sites)
    for site in kept:
        assert site.reason and re.search(near.reason, site.reason, re.I), describe([site])
    if near.counterexample:
        assert kept[-1].counterexample and re.search(r"row \d+", kept[-1].counterexample)


@pytest.mark.parametrize("name", TWINS)
def test_its_safe_twin_is_rewritten(name: str) -> None:
    model, inputs = TWINS[name](), case_of(BASE).inputs
    with torch.no_grad():
        want = model(*fresh(inputs))
    got = run(model, inputs, "exported")
    with torch.no_grad():
        assert_as_good(model, inputs[0], got.outputs, want)
    assert [s.kind for s in got.sites] == ["source", "consumer"], describe(got.sites)
    assert [s.status for s in got.sites] == ["fused", "rewritten"], describe(got.sites)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ROUTERS)
def test_other_users_of_topk_are_kept(name: str, host: str) -> None:
    model, x = ROUTERS[name](), case_of(BASE).inputs[0]
    with torch.no_grad():
        want = model(x.clone())
    with pytest.warns(UserWarning):
        got = run(model, (x,), host)
    assert_unchanged(got.outputs, want)
    assert got.sites and {s.status for s in got.sites} == {"kept"}, describe(got.sites)
    assert all(s.reason for s in got.sites)


@pytest.mark.parametrize("result", ["-1 by value", "additive bias", "bool mask of ones"])
def test_a_near_miss_is_told_by_its_own_layer(result: str) -> None:
    """A proper indexer beside a router is still matched."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            p = Spelling(publish="ids int32", result=result)
            self.indexer, self.router = case_of(p).model, ROUTERS["ReluRouter"]()

        def forward(self, x: torch.Tensor) -> Any:
            return self.indexer(x), self.router(x)

    p = replace(BASE, publish="ids int32", result=result)
    case = case_of(p)
    got = run(Both().eval(), case.inputs, "exported")
    statuses = sorted((s.kind, s.status) for s in got.sites)
    assert statuses == [("consumer", "rewritten"), ("single", "kept"), ("source", "fused")]
    for site in got.sites:
        if site.kind == "consumer":
            check_site(site, "consumer", p)
