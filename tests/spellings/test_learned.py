"""What is learned is not a constant: parameters that look harmless today may change tomorrow.

Each model is optimised, then its parameter is changed. Kept or rewritten, the optimised module must
follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .hosts import HOSTS, assert_as_good, check_site, fresh, run
from .masks import Rows
from .model import HEADS, Plain, Spelling
from .oracle import case_of

BASE = Spelling(publish="ids int64", result="-1 by value")
POSITIONS = 29


class ScoreBias(Plain):
    """A bias of each position on the summed scores, zero at first."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.zeros(POSITIONS))

    def score(self, x: Tensor, keys: Tensor, layer: int) -> Tensor:
        return super().score(x, keys, layer) + self.learned


class HeadBias(Plain):
    """A bias of each head inside the relu, zero at first."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.zeros(HEADS))

    def activate(self, parts: Tensor, axes: str, w: Tensor, layer: int) -> Tensor:
        return torch.relu(parts + self.learned.unsqueeze(-1))


class ScaleBefore(Plain):
    """A factor of the products before the relu, one at first: it may turn negative."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.ones(()))

    def activate(self, parts: Tensor, axes: str, w: Tensor, layer: int) -> Tensor:
        return torch.relu(parts * self.learned)


class ScaleAfter(Plain):
    """A factor of the summed scores, one at first."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.ones(1))

    def score(self, x: Tensor, keys: Tensor, layer: int) -> Tensor:
        return super().score(x, keys, layer) * self.learned


class KeyFactor(Plain):
    """A factor of each position on the scores, one at first: it may turn negative."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.ones(POSITIONS))

    def score(self, x: Tensor, keys: Tensor, layer: int) -> Tensor:
        return super().score(x, keys, layer) * self.learned


class Window(Plain):
    """A learned number of newest positions outside the candidates, none at first."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.zeros(()))

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        inside = super().candidates(published, rows, layer)
        return inside | (rows.ends() - rows.grid() <= self.learned)


class HeadWeights(Plain):
    """The head weights do not depend on the row: a parameter."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        self.learned = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))

    def reduced(self, q: Tensor, k: Tensor, w: Tensor, layer: int) -> Tensor:
        parts = torch.relu(torch.einsum("bshd,btd->bsht", q, k))
        return (parts * self.learned.unsqueeze(-1)).sum(2)


# model, what the parameter becomes
LEARNED: dict[str, tuple[type[Plain], Callable[[Tensor], Tensor]]] = {
    "bias of scores": (ScoreBias, lambda x: torch.linspace(-2.0, 2.0, POSITIONS).roll(11)),
    "bias of one position": (ScoreBias, lambda x: x + 100.0 * (torch.arange(POSITIONS) == 7)),
    "bias of heads": (HeadBias, lambda x: torch.linspace(-1.0, 1.0, HEADS)),
    "scale before the relu": (ScaleBefore, lambda x: x * -1.5),
    "scale of scores": (ScaleAfter, lambda x: x * -0.5),
    "factor of keys": (KeyFactor, lambda x: torch.linspace(-1.0, 2.0, POSITIONS)),
    "window": (Window, lambda x: x + 5.0),
    "head weights": (HeadWeights, lambda x: x.flip(0) - 1.1),
}


def differ(got: Any, want: Any) -> bool:
    return any(not torch.equal(a[0], b[0]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", LEARNED)
def test_a_changed_parameter_is_followed(name: str, host: str) -> None:
    kind, change = LEARNED[name]
    model, inputs = kind(BASE, BASE).eval(), case_of(BASE).inputs
    got = run(model, inputs, host)
    with torch.no_grad():
        before = model(*fresh(inputs))
        assert_as_good(model, inputs[0], got.outputs, before)
        model.learned.copy_(change(model.learned))
        after = model(*fresh(inputs))
        assert differ(after, before), "the change must show"
        assert_as_good(model, inputs[0], got.module(*fresh(inputs)), after)


@pytest.mark.parametrize("host", HOSTS)
def test_changed_projections_are_followed(host: str) -> None:
    """Parameters are shared, not copied: what is trained or loaded later is what runs."""
    case = case_of(BASE)
    model = Plain(BASE, BASE).eval()
    got = run(model, case.inputs, host)
    check_site(got.sites[1], "consumer", BASE)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.0).add_(0.01)
        want = model(*fresh(case.inputs))
        assert_as_good(model, case.inputs[0], got.module(*fresh(case.inputs)), want)
