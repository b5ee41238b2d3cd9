"""In bf16 rounding is large, and must not hide a part that is wrong or missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .harness import Case, check, numbers


def tensors(heads: int, seed: int = 0) -> tuple[Tensor, ...]:
    draw = numbers(seed)
    shapes = ((2, 5, heads, 128), (2, 32, 128), (2, 5, heads))
    return tuple(draw(*s).to(torch.bfloat16) for s in shapes)


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0])
def test_a_bias_under_a_scale_keeps_the_scale(factor: float) -> None:
    def model(query: Tensor, key: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bsht", query, key).relu()
        return (((products * weights[..., None]).sum(2) + bias) * factor).topk(4).values

    bias = (numbers(1)(2, 5, 32) * 4096).to(torch.bfloat16)
    check(Case(model, (*tensors(64), bias), tolerance=0.02))


@pytest.mark.parametrize("left_out", [0, 77, 127])
def test_a_head_left_out_of_the_sum_stays_left_out(left_out: int) -> None:
    def model(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bsht", query, key).relu() * weights[..., None]
        kept = torch.cat([products[:, :, :left_out], products[:, :, left_out + 1 :]], 2)
        return kept.sum(2).topk(4).values

    query, key, weights = tensors(128)
    alone = torch.zeros_like(weights)
    alone[..., left_out] = 1
    check(Case(model, (query, key, weights), [(query, key, alone)], tolerance=0.05))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scores_of_eight_bits_stay_as_they_are(dtype: torch.dtype) -> None:
    def model(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bsht", query, key).relu()
        scores = (products * weights[..., None]).sum(2) / 64
        return scores.to(dtype).float().topk(4).values

    check(Case(model, tensors(8), [tensors(8, 1)], statuses=frozenset({"kept"})))
