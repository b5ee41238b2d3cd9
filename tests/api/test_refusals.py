"""Training and gradients are refused, at each call, in words that say what to do."""

from __future__ import annotations

import pytest
import torch

import dsa_compile
from dsa_compile import GradientError, OptimizedModule, TrainingModeError

from .models import ByKeyword, inputs

STATIC = {"dynamic": False}


@pytest.fixture(params=["first call", "examples"])
def optimized(request) -> OptimizedModule:
    examples = None if request.param == "first call" else (inputs(),)
    return dsa_compile.optimize(ByKeyword().eval(), example_inputs=examples, config=STATIC)


def test_training_mode_is_refused_at_each_call(optimized: OptimizedModule) -> None:
    optimized(inputs())
    optimized.train()
    for _ in range(2):
        with pytest.raises(TrainingModeError, match="the model is in training mode.*eval"):
            optimized(inputs())
    optimized.eval()
    optimized.consumer.wq.train()
    with pytest.raises(TrainingModeError, match="submodule consumer.wq"):
        optimized(inputs())
    optimized.eval()
    optimized(inputs())


def test_an_input_that_needs_gradients_is_named(optimized: OptimizedModule) -> None:
    x = inputs().requires_grad_()
    for _ in range(2):
        with pytest.raises(GradientError, match=r"input x requires gradients"):
            optimized(x)
    with pytest.raises(GradientError, match=r"input extra\['shift'\] requires gradients"):
        optimized(inputs(), extra={"shift": torch.ones(24, requires_grad=True)})
    optimized(x.detach())


def test_without_gradients_such_an_input_is_a_plain_one(optimized: OptimizedModule) -> None:
    with torch.no_grad():
        assert not optimized(inputs().requires_grad_())["y"].requires_grad


def test_explain_and_verify_refuse_training_mode(optimized: OptimizedModule) -> None:
    model = ByKeyword()
    with pytest.raises(TrainingModeError):
        dsa_compile.explain(model, inputs())
    with pytest.raises(TrainingModeError):
        dsa_compile.verify(model, optimized, inputs())
