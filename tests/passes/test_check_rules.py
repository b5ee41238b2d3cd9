"""Rules on positions that only long contexts show keep a site, however small the proof's sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_models import BLOCK, NEG, TwoLevel, calls, captured, hidden, same_sets
from torch import Tensor, nn

from dsa_compile.passes.pipeline import run_pipeline

Rule = Callable[[Tensor, Tensor], Tensor]
LONG = 700


class Ruled(TwoLevel):
    """Candidates, and positions that a rule lets in besides; the pin may be in few bits."""

    def __init__(self, rule: Rule, pin: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.rule, self.pin = rule, pin

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        scores = self.scores(x, 0)
        blocks = nn.functional.pad(scores, (0, -n % BLOCK), value=NEG)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
        here = torch.arange(blocks.shape[-1]).to(self.pin)
        newest = here == (torch.arange(n) // BLOCK).to(self.pin)[:, None]
        best = blocks.masked_fill(newest, float("inf")).topk(min(3, blocks.shape[-1]), dim=-1)
        table = torch.zeros_like(blocks, dtype=torch.bool)
        table = table.scatter(-1, best.indices, best.values > NEG)
        keep = self.rule(table.repeat_interleave(BLOCK, dim=-1)[..., :n], torch.arange(n))
        return self.picks(scores), self.picks(self.scores(x, 1).masked_fill(~keep, NEG))


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
    model = Ruled(lambda keep, p: keep, dtype).eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    assert [s.status for s in result.sites] == ["fused", "rewritten"]
    published = calls(result.graph_module, "indexer_publish")
    assert bool(published) == (dtype in (torch.int64, torch.int32))
    x = hidden(LONG, batch=1)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))
