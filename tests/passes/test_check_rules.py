"""Rules on positions that only long contexts show keep a site, however small the proof's sizes."""

from __future__ import annotations

import pytest
import torch
from pass_models import (
    Rule,
    Ruled,
    calls,
    captured,
    hidden,
    same_sets,
)

from dsa_compile.passes.pipeline import run_pipeline

LONG = 700


RULES: dict[str, tuple[Rule, str]] = {
    "between whole numbers": (
        lambda keep, p: keep | ((p.float() > 599.5) & (p.float() < 631.5)),
        "floating point",
    ),
    "a small factor": (lambda keep, p: keep | ((p * 0.01).floor() == 6), "floating point"),
    "a share of all": (lambda keep, p: keep | (p / p.shape[0] > 0.99), "floating point"),
    "bits that wrap": (lambda keep, p: keep | ((p * 64).to(torch.int16) < 0), "int16"),
    "rounding": (lambda keep, p: keep | (p.bfloat16().long() != p), "bfloat16"),
    "blocks of blocks": (lambda keep, p: keep | (p // 16 // 8 == 4), "blocks of blocks"),
    "a product of constants": (
        lambda keep, p: keep | (p > torch.full_like(p, 25) * torch.full_like(p, 25)),
        "comes out of mul",
    ),
    "a count that wraps": (
        lambda keep, p: keep | ((p >= 0).to(torch.int8).cumsum(0, dtype=torch.int8) < 0),
        "int8",
    ),
    "a bend": (lambda keep, p: keep | (p * p > 400_000), "does not grow in proportion"),
}


@pytest.mark.parametrize("name", RULES)
def test_the_consumer_is_kept(name: str) -> None:
    rule, reason = RULES[name]
    model = Ruled(rule).eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    (consumer,) = [s for s in result.sites if s.kind == "consumer"]
    assert consumer.status == "kept" and consumer.reason is not None and reason in consumer.reason
    x = hidden(LONG, batch=1)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16, torch.int8])
def test_a_pin_in_few_bits_stays_with_the_model(dtype: torch.dtype) -> None:
    """Wrong for some rows of a long context: the model's own op goes on to pin."""
    model = Ruled(lambda keep, p: keep, kind=dtype).eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    assert [s.status for s in result.sites] == ["fused", "rewritten"]
    published = calls(result.graph_module, "indexer_publish")
    assert bool(published) == (dtype in (torch.int64, torch.int32))
    x = hidden(LONG, batch=1)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))
