"""Models without an indexer, or beside one, come through the pipeline unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .harness import NEG, Case, Layers, check, hidden_states, operands, picks, scores


def test_calls_that_differ_in_the_type_of_a_number_stay_apart() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x * 2.0, x + 1, x + True, x * 0.0, x * -0.0

    result = check(Case(model, (torch.arange(4),)))
    outputs = result.graph_module(torch.arange(1, 5))
    assert [o.dtype.is_floating_point for o in outputs] == [False, True, False, False, True, True]
    assert not torch.signbit(outputs[4]).any() and torch.signbit(outputs[5]).all()


def test_random_draws_stay_apart() -> None:
    def model(query: Tensor, key: Tensor, weights: Tensor) -> Any:
        draws = [torch.empty(64).exponential_(), torch.empty(64).exponential_()]
        draws += [torch.empty(64).uniform_(), torch.empty(64).uniform_()]
        draws += [torch.rand(64), torch.rand(64), torch.bernoulli(torch.full((64,), 0.5))]
        draws += [torch.bernoulli(torch.full((64,), 0.5))]
        same = [(a == b).all() for a, b in zip(draws[::2], draws[1::2], strict=True)]
        return *same, picks(scores(query, key, weights))

    result = check(Case(model, operands()))
    outputs = result.graph_module(*operands())
    assert not any(outputs[:4])


def test_scores_used_elsewhere_stay() -> None:
    def model(query: Tensor, key: Tensor, weights: Tensor) -> Any:
        logits = scores(query, key, weights)
        return picks(logits), logits.max(), logits.softmax(-1)

    check(Case(model, operands()))


class Recomputed(Layers):
    """Keeps what scores at least as much as the last pick, in scores that are computed anew."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.raw(x).masked_fill(~self.causal(x), NEG)
        again = self.raw(x + 0.0).masked_fill(~self.causal(x), NEG)
        return again >= first.topk(4).values[..., -1:]


def test_scores_compared_with_others_stay() -> None:
    result = check(Case(Recomputed(), (hidden_states(),)))
    (site,) = result.sites
    assert site.status == "kept" and "compared with scores computed elsewhere" in (
        site.reason or ""
    )
