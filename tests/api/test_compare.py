"""Selections are compared as sets, and judged by the scores they came from."""

from __future__ import annotations

import pytest
import torch

from dsa_compile.compare import Agreement, compare_selections, hidden, largest_difference

INF, NAN = torch.inf, torch.nan


def compare(scores: list, before: list, after: list) -> Agreement:
    return compare_selections(torch.tensor(scores), torch.tensor(before), torch.tensor(after))


def test_order_does_not_matter() -> None:
    assert compare([[3.0, 1.0, 2.0]], [[0, 2]], [[2, 0]]) == Agreement(1, 1, 0.0)


def test_a_worse_pick_is_a_difference_of_scores() -> None:
    assert compare([[3.0, 1.0, 2.5]], [[0, 2]], [[0, 1]]) == Agreement(1, 0, 1.5)


def test_a_tie_differs_as_a_set_by_nothing() -> None:
    assert compare([[3.0, 2.0, 2.0]], [[0, 2]], [[0, 1]]) == Agreement(1, 0, 0.0)


@pytest.mark.parametrize("fill", [-INF, -1e9, -1e4, torch.finfo(torch.float32).min])
def test_slots_that_found_nothing_do_not_count(fill: float) -> None:
    scores = [[3.0, fill, fill, fill], [3.0, -2.0, fill, fill]]
    assert compare(scores, [[0, 1], [0, 1]], [[0, 3], [0, -1]]) == Agreement(2, 1, INF)


def test_a_hidden_pick_in_place_of_a_visible_one_is_infinitely_wrong() -> None:
    assert compare([[3.0, 1.0, -INF]], [[0, 1]], [[0, 2]]) == Agreement(1, 0, INF)


def test_nan_is_a_score_like_others_and_ranks_first() -> None:
    assert compare([[NAN, 1.0, 2.0]], [[0, 2]], [[0, 2]]) == Agreement(1, 1, 0.0)
    assert compare([[NAN, 1.0, 2.0]], [[0, 2]], [[1, 2]]).same_rows == 0


def test_leading_dimensions_are_rows_and_widths_may_differ() -> None:
    scores = torch.arange(24.0).view(2, 3, 4)
    before = torch.tensor([3, 2]).expand(2, 3, 2)
    after = torch.tensor([2, 3, -1], dtype=torch.int32).expand(2, 3, 3)
    assert compare_selections(scores, before, after) == Agreement(6, 6, 0.0)


def test_no_rows_and_no_positions() -> None:
    empty = torch.zeros(0, 4)
    picks = torch.zeros(0, 2, dtype=torch.int64)
    assert compare_selections(empty, picks, picks) == Agreement(0, 0, 0.0)
    none = torch.zeros(3, 0, dtype=torch.int64)
    assert compare_selections(torch.zeros(3, 0), none, none) == Agreement(3, 3, 0.0)


def test_ordinary_low_scores_are_not_hidden() -> None:
    assert not hidden(torch.tensor([-9000.0, 0.0, NAN])).any()
    assert hidden(torch.tensor([-INF, -3e38, 1.0])).tolist() == [True, True, False]


def test_agreements_add_up() -> None:
    assert Agreement(2, 1, 0.5).joined(Agreement(3, 3, 0.0)) == Agreement(5, 4, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        ([1.0, INF], [1.5, INF], 0.5),
        ([NAN], [NAN], 0.0),
        ([NAN], [1.0], INF),
        ([-INF], [INF], INF),
        ([1.0], [1.0, 2.0], INF),
        ([], [], 0.0),
    ],
)
def test_largest_difference(a: list, b: list, gap: float) -> None:
    assert largest_difference(torch.tensor(a), torch.tensor(b)) == gap


def test_half_precision_does_not_overflow() -> None:
    a = torch.tensor([60000.0], dtype=torch.half)
    assert largest_difference(a, -a) == 2 * a.item()
