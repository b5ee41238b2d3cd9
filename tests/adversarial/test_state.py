"""Parameters and buffers are data: what they hold at capture says nothing about later calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .harness import NEG, Case, Layers, check, hidden_states, picks

T = 20


def filled(name: str, number: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        getattr(model, name).data.fill_(number)

    return change


class Held(Layers):
    """Causal scores changed by a held tensor, a parameter or a buffer."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], held: Tensor, kind: str) -> None:
        super().__init__()
        self.use = use
        if kind == "parameter":
            self.held = nn.Parameter(held)
        else:
            self.register_buffer("held", held)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return picks(self.use(self.raw(x), self.held).masked_fill(~self.causal(x), NEG))


USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, float]] = {
    "scale": (lambda s, h: s * h, torch.tensor(1.0), -2.0),
    "scale of one element": (lambda s, h: s * h, torch.ones(1), 3.0),
    "divisor": (lambda s, h: s / h, torch.tensor(1.0), -0.5),
    "bias of every key, zero": (lambda s, h: s + h, torch.zeros(T), 1.0),
    "bias of one element, zero": (lambda s, h: s + h, torch.zeros(1), 1.0),
    "bias of rows and keys, zero": (lambda s, h: s + h, torch.zeros(T, T), 1.0),
    "floor of the scores": (lambda s, h: torch.maximum(s, h), torch.tensor(-1e30), 0.5),
}


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("name", USES)
def test_a_held_tensor_may_change_after_the_rewrite(name: str, kind: str) -> None:
    use, held, later = USES[name]
    check(Case(Held(use, held.clone(), kind), (hidden_states(),), states=[filled("held", later)]))


class HeldMask(Layers):
    """A float mask kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((T, T), NEG).triu(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return picks(self.raw(x) + self.get_buffer("mask"))


def test_a_float_mask_in_a_buffer_may_turn_into_a_bias() -> None:
    check(Case(HeldMask(), (hidden_states(),), states=[filled("mask", 0.5), filled("mask", NEG)]))


class HeldFill(Layers):
    """The value of hidden scores kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fill", torch.tensor(NEG))

    def forward(self, x: Tensor) -> Tensor:
        masked = torch.where(self.causal(x), self.raw(x), self.get_buffer("fill"))
        return masked.topk(4).values


def test_the_fill_of_hidden_scores_may_change() -> None:
    check(Case(HeldFill(), (hidden_states(),), states=[filled("fill", 0.25)]))


class HeldLength(Layers):
    """A length kept in a buffer, alone and added to every row's own."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("length", torch.tensor(9))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(x.shape[1])
        end = self.get_buffer("length")
        if self.rows:
            end = position[:, None] // 2 + end
        return picks(self.raw(x).masked_fill(position >= end, NEG))


@pytest.mark.parametrize("rows", [False, True])
def test_a_length_in_a_buffer_may_change(rows: bool) -> None:
    states = [filled("length", 3), filled("length", 0), filled("length", 99)]
    check(Case(HeldLength(rows), (hidden_states(),), states=states))


class HeldZero(Layers):
    """A relu spelled as the larger of the product and a buffer that holds zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query = nn.functional.linear(x, self.queries[0]).unflatten(-1, (12, 8))
        key = nn.functional.linear(x, self.key)
        products = torch.maximum(torch.einsum("bshd,btd->bsht", query, key), self.zero)
        weights = nn.functional.linear(x, self.weights[0])
        return picks((products * weights[..., None]).sum(2))


def test_a_relu_against_a_buffer_is_no_relu() -> None:
    check(Case(HeldZero(), (hidden_states(),), states=[filled("zero", 0.5)]))
