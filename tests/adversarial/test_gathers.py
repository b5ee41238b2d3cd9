"""Gathers at the picks are replaced only where they read what the selection already holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .harness import NEG, Case, check, numbers, operands, scores

T = 20
Visible = torch.rand(2, 6, T, generator=torch.Generator().manual_seed(3)) > 0.4
Bias = numbers(4)(2, 6, T)


def hiding(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    hidden = ~visible.clone()
    hidden = hidden | (bias > 9)
    values, indices = scores(q, k, w).masked_fill(hidden, NEG).topk(9)
    return values, indices.masked_fill(hidden.gather(-1, indices), -1)


def showing(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    values, indices = scores(q, k, w).masked_fill(~visible, NEG).topk(9)
    return values, torch.where(visible.gather(-1, indices), indices, -1)


def shown_by_where(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    hidden = bias > 0.5
    values, indices = torch.where(~hidden, scores(q, k, w), NEG).topk(9)
    return values, indices.masked_fill(hidden.gather(-1, indices), -1)


def one_mask_of_two(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k, w).masked_fill(bias > 0.5, NEG).masked_fill(~visible, NEG)
    values, indices = logits.topk(2)
    return values, visible.gather(-1, indices).masked_fill(values == NEG, True)


def added_mask(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    added = torch.zeros(2, 6, T).masked_fill(~visible, NEG)
    values, indices = (scores(q, k, w) + added).topk(9)
    return values, indices.masked_fill(values == NEG, -1), added.gather(-1, indices)


def added_bias(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    values, indices = (scores(q, k, w) + bias).topk(9)
    return values, indices, bias.gather(-1, indices)


def clamped(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k, w)
    return logits.gather(-1, logits.topk(4).indices.clamp(max=3))


def clamped_in_range(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k, w)
    return logits.gather(-1, logits.topk(4).indices.clamp(0, T - 1))


def other_dim(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k, w)
    return logits.gather(1, logits.topk(4).indices % 6)


def other_dim_of_a_square(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k[:, :6], w)
    return logits.gather(1, logits.topk(4).indices)


def transposed(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k[:, :6], w)
    return logits.gather(-1, logits.topk(6).indices.transpose(1, 2))


def reversed_slots(q: Tensor, k: Tensor, w: Tensor, visible: Tensor, bias: Tensor) -> Any:
    logits = scores(q, k, w)
    return logits.gather(-1, logits.topk(6).indices.flip(-1))


MODELS: list[Callable[..., Any]] = [
    hiding,
    showing,
    shown_by_where,
    one_mask_of_two,
    added_mask,
    added_bias,
    clamped,
    clamped_in_range,
    other_dim,
    other_dim_of_a_square,
    transposed,
    reversed_slots,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_a_gather_at_the_picks_keeps_its_meaning(model: Callable[..., Any]) -> None:
    other = (*operands(seed=5), ~Visible, -Bias)
    check(Case(model, (*operands(), Visible, Bias), [other]))
