"""A rule that no probe reaches keeps a site: far positions, many rows, large inputs and scores."""

from __future__ import annotations

import pytest
import torch
from pass_models import (
    BLOCK,
    NEG,
    Rule,
    Ruled,
    TwoLevel,
    calls,
    captured,
    hidden,
    same_sets,
)
from torch import Tensor

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.check_reach import check_reach
from dsa_compile.passes.pipeline import run_pipeline
from dsa_compile.passes.score_trace import Refusal

LONG = 700


def first(keep: Tensor) -> Tensor:
    return torch.arange(keep.shape[0])[:, None, None]


# What is shown, and why the site is kept; with the number of batch items that shows the rule.
RULES: dict[str, tuple[Rule, str, int]] = {
    "far, in blocks": (lambda keep, p: keep | (p // 512 >= 1), "second block of 512", 1),
    "a bit": (lambda keep, p: keep | ((p & 512) != 0), "all bits", 1),
    "a filled tensor": (lambda keep, p: keep | (p > torch.full((), 600)), "600", 1),
    "a held number": (lambda keep, p: keep | (p > torch.tensor(600)), "600", 1),
    "a size in chunks": (
        lambda keep, p: keep | (torch.full((1,), p.shape[0] // 128) > 4),
        "4 of gt",
        1,
    ),
    "the smaller of a size": (
        lambda keep, p: keep | (p >= torch.sym_min(p.shape[0], 600)),
        "600, which a size",
        1,
    ),
    "a late batch item": (lambda keep, p: keep | (first(keep) >= 20), "20 of ge", 24),
}


@pytest.mark.parametrize("name", RULES)
def test_the_consumer_is_kept(name: str) -> None:
    rule, reason, batch = RULES[name]
    model = Ruled(rule).eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    (consumer,) = [s for s in result.sites if s.kind == "consumer"]
    assert consumer.status == "kept" and consumer.reason is not None and reason in consumer.reason
    x = hidden(LONG if batch == 1 else 64, batch=batch)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))


NEAR: dict[str, Rule] = {
    "nothing": lambda keep, p: keep,
    "a size": lambda keep, p: keep & (p < p.shape[0]),
}


@pytest.mark.parametrize("name", NEAR)
def test_rules_that_probes_reach_are_proven(name: str) -> None:
    result = run_pipeline(captured(Ruled(NEAR[name]).eval(), hidden(64), dynamic=True))
    assert [s.status for s in result.sites] == ["fused", "rewritten"]


@pytest.mark.parametrize("edge", [0, 600])
def test_a_pin_that_starts_late_stays_with_the_model(edge: int) -> None:
    """The block selection is the model's own, the maxima and the scores are ours."""
    model = Ruled(NEAR["nothing"], lambda here, row: (here == 0) & (row > edge)).eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    assert [s.status for s in result.sites] == ["fused", "rewritten"]
    assert not calls(result.graph_module, "indexer_publish")
    x = hidden(LONG, batch=1)
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))


class Given(TwoLevel):
    """A consumer of ids that are given, with one more input that may let everything in."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor, ids: Tensor, extra: Tensor) -> Tensor:
        inside = (ids[..., None] == torch.arange(x.shape[1]) // BLOCK).any(-2)
        return self.picks(self.scores(x, 1).masked_fill(~self.rule(inside, extra), NEG))


INPUTS: dict[str, tuple[Rule, Tensor, Tensor]] = {
    "many steps": (lambda keep, n: keep | (n > 1000), torch.tensor(3), torch.tensor(5000)),
    "a sign": (lambda keep, n: keep | (n < 0), torch.tensor(3), torch.tensor(-1)),
    "a number": (lambda keep, n: keep | (n > 5), torch.tensor(0.0), torch.tensor(9.0)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_lets_everything_in_is_not_lost(name: str) -> None:
    rule, at_capture, later = INPUTS[name]
    x, ids = hidden(24), torch.tensor([[[0, 3]]]).expand(2, 24, 2)
    model = Given(rule).eval()
    result = run_pipeline(captured(model, x, ids, at_capture))
    (site,) = result.sites
    assert site.status == "kept" and "an input is compared with" in (site.reason or "")
    with torch.no_grad():
        assert same_sets([model(x, ids, later)], result.graph_module(x, ids, later))


class Scored(TwoLevel):
    """Blocks are let in by their scores, which a drawn score need not show."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x, 0)
        blocks = scores.unflatten(-1, (-1, BLOCK)).amax(-1)
        best = blocks.topk(min(6, blocks.shape[-1]), dim=-1)
        at = torch.where(best.values > -1e4, best.indices, blocks.shape[-1])
        table = blocks.new_full((*at.shape[:-1], blocks.shape[-1] + 1), NEG)
        keep = table.scatter(-1, at, best.values)[..., :-1] > -20
        keep = keep.repeat_interleave(BLOCK, dim=-1)
        return self.picks(scores), self.picks(self.scores(x, 1).masked_fill(~keep, NEG))


def test_a_threshold_of_block_scores_is_not_lost() -> None:
    model = Scored().eval()
    result = run_pipeline(captured(model, hidden(24)))
    assert [s.status for s in result.sites] == ["fused", "kept"]
    x = hidden(24) * 12
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))


class Added(TwoLevel):
    """A mask that is added, and far out adds a small number instead of hiding."""

    def forward(self, x: Tensor) -> Tensor:
        p = torch.arange(x.shape[1])
        return self.picks(self.scores(x, 0) + torch.where(p > 600, -3.0, 0.0))


def test_an_added_number_that_starts_late_is_no_mask() -> None:
    model = Added().eval()
    result = run_pipeline(captured(model, hidden(64), dynamic=True))
    assert [s.status for s in result.sites] == ["kept"]
    x = hidden(LONG, batch=1)
    with torch.no_grad():
        assert same_sets([model(x)], result.graph_module(x))


def test_static_sizes_are_reached_as_they_are() -> None:
    """A constant beyond all positions changes nothing where no size may grow."""
    model = Ruled(lambda keep, p: keep | (p > 600)).eval()
    result = run_pipeline(captured(model, hidden(64)))
    assert [s.status for s in result.sites] == ["fused", "rewritten"]


def test_a_part_is_looked_at_by_itself() -> None:
    graph = captured(Added().eval(), hidden(64)).graph
    (mask,) = [n for n in graph.nodes if str(n.target) == "aten.gt.Scalar"]
    check_reach([mask], [Binding({})], mask)
    graph = captured(Added().eval(), hidden(64), dynamic=True).graph
    (mask,) = [n for n in graph.nodes if str(n.target) == "aten.gt.Scalar"]
    symbols = {
        s for n in graph.nodes if n is mask for s in n.meta["val"].shape[0].node.expr.free_symbols
    }
    with pytest.raises(Refusal, match="no probe reaches 600 of gt"):
        check_reach([mask], [Binding(dict.fromkeys(symbols, 41))], mask)
