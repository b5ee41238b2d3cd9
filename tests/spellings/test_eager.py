"""The composed models themselves against the float64 oracle: what the other tests stand on."""

from __future__ import annotations

import itertools

import pytest
import torch

from .cover import ALONE, COMBINED, EVERY, chosen
from .model import Spelling, compose
from .oracle import case_of, check, draw, other_sizes, sizes_of


@pytest.mark.parametrize("name", ALONE)
def test_a_choice_alone_selects_what_the_rule_says(name: str) -> None:
    case = case_of(ALONE[name])
    with torch.no_grad():
        check(case, case.model(*case.inputs))


@pytest.mark.parametrize("name", COMBINED)
def test_combined_choices_select_what_the_rule_says(name: str) -> None:
    case = case_of(COMBINED[name])
    with torch.no_grad():
        check(case, case.model(*case.inputs))


@pytest.mark.parametrize("name", COMBINED)
def test_the_oracle_holds_at_other_sizes(name: str) -> None:
    for case in other_sizes(COMBINED[name]):
        with torch.no_grad():
            check(case, case.model(*case.inputs))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("phase", ["prefill", "chunk", "decode"])
def test_single_level_and_shared_candidates(layers: int, phase: str) -> None:
    p = Spelling(phase=phase, publish="ids int32")
    case = draw(compose(*[p] * layers), sizes_of(p))
    with torch.no_grad():
        check(case, case.model(*case.inputs))


def test_every_choice_is_met_combined() -> None:
    """The cover meets each choice at least once besides alone."""
    for axis, values in EVERY.items():
        assert {chosen(p, axis) for p in COMBINED.values()} == set(values), axis


def test_cases_decide_something() -> None:
    """Consumers differ from their sources, and rows have more positions than they keep."""
    for case in itertools.islice((case_of(p) for p in ALONE.values()), 40):
        source, consumer = case.expected.selected
        inside, all_seen = case.expected.allowed[1], case.expected.allowed[0]
        assert (inside != all_seen).any() and (source != consumer).any()
        assert (inside.sum(-1) > consumer.sum(-1)).any()
