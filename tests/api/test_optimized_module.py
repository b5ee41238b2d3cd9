"""The optimised module is the user's module with another forward."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile import ConfigError, OptimizedModule

from .models import NoIndexer, TwoLevel, assert_same, inputs

STATIC = {"dynamic": False}


class Generator(TwoLevel):
    """A model whose other methods call the model."""

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x)[0])[0]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Documented forward."""
        return super().forward(x)


@pytest.fixture
def model() -> Generator:
    return Generator().eval()


def test_parameters_are_the_very_same(model: Generator) -> None:
    optimized = dsa_compile.optimize(model)
    for (name, mine), (other, theirs) in zip(
        optimized.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other and mine is theirs
    assert optimized.state_dict().keys() == model.state_dict().keys()
    exported = dsa_compile.optimize(model, example_inputs=(inputs(),), config=STATIC)
    held = {id(p) for p in exported._dsa_engine.session.graphs[0].result.graph_module.parameters()}
    assert held == {id(p) for p in model.parameters()}


def test_it_is_an_instance_of_the_model_and_shares_its_attributes(model: Generator) -> None:
    optimized = dsa_compile.optimize(model)
    assert isinstance(optimized, OptimizedModule) and isinstance(optimized, Generator)
    assert optimized.tag == model.tag and optimized.source is model.source
    optimized.tag = "renamed"
    optimized.register_buffer("late", torch.ones(1))
    assert model.tag == "renamed" and model.late is optimized.late
    model.train()
    assert optimized.training


def test_the_signature_is_kept(model: Generator) -> None:
    optimized = dsa_compile.optimize(model)
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert optimized.forward.__doc__ == "Documented forward."


def test_methods_of_the_model_run_the_optimised_form(model: Generator) -> None:
    x = inputs()
    optimized = dsa_compile.optimize(model, config=STATIC)
    got = optimized.twice(x)
    assert optimized.report.matched
    torch.testing.assert_close(got, model.twice(x).detach())


def test_hooks_of_the_model_run_once(model: Generator) -> None:
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    for examples in (None, (inputs(),)):
        optimized = dsa_compile.optimize(model, example_inputs=examples, config=STATIC)
        calls.clear()
        optimized(inputs())
        assert calls == [1]


def test_a_forward_set_on_the_instance_is_the_one_optimised(model: Generator) -> None:
    plain = model.forward
    model.forward = lambda x: plain(x + 1)  # type: ignore[method-assign]
    optimized = dsa_compile.optimize(model, config=STATIC)
    assert_same(optimized(inputs()), model(inputs()))
    assert optimized.report.matched


def test_two_models_of_one_class_do_not_disturb_each_other() -> None:
    x = inputs()
    models = [TwoLevel(seed).eval() for seed in range(3)]
    optimized = [dsa_compile.optimize(m, config=STATIC) for m in models]
    for _ in range(2):
        for mine, theirs in zip(optimized, models, strict=True):
            assert_same(mine(x), theirs(x))
            assert mine.report.graphs == 1


def test_optimising_an_optimised_module_starts_from_the_original(model: Generator) -> None:
    once = dsa_compile.optimize(model)
    again = dsa_compile.optimize(once, config=STATIC)
    assert type(again).__mro__.count(OptimizedModule) == 1
    assert_same(again(inputs()), model(inputs()))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_is_refused_with_what_to_do_instead(model: Generator, duplicate) -> None:
    with pytest.raises(TypeError, match="copy the original"):
        duplicate(dsa_compile.optimize(model))
    copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_is_not_a_plain_module_is_refused(model: Generator) -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got function"):
        dsa_compile.optimize(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="torch.compile"):
        dsa_compile.optimize(torch.compile(model))
    compiled = NoIndexer().eval()
    compiled.compile()
    with pytest.raises(ConfigError, match="torch.compile"):
        dsa_compile.optimize(compiled)
    with pytest.raises(ConfigError, match="scripted"):
        dsa_compile.optimize(torch.jit.script(nn.Linear(2, 2)))
