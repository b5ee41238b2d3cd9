"""Buffers, parameters and attributes: updated by optimised calls, untouched by the rest."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile import InputError
from dsa_compile.state import ModelState

from .models import (
    DIM,
    HEAD_DIM,
    CacheArgument,
    CacheBuffer,
    TwoLevel,
    WithBreak,
    assert_same,
    inputs,
)

STATIC = {"dynamic": False}
HOSTS = ["first call", "examples"]


def optimized_by(host: str, model: nn.Module, *args: object, **options: object):
    examples = None if host == "first call" else args
    return dsa_compile.optimize(model, example_inputs=examples, config={**STATIC, **options})


@pytest.mark.parametrize("host", HOSTS)
def test_buffers_are_updated_in_place(host: str) -> None:
    model, plain = CacheBuffer().eval(), CacheBuffer().eval()
    held = model.keys
    optimized = optimized_by(host, model, inputs(2, 16))
    assert int(model.calls) == 0
    for seed in range(3):
        x = inputs(2, 16, seed)
        assert_same(optimized(x), plain(x))
    assert model.keys is held and optimized.keys is held and int(model.calls) == 3
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize("host", HOSTS)
def test_new_parameter_values_are_used(host: str) -> None:
    model, other = TwoLevel(0).eval(), TwoLevel(1).eval()
    optimized = optimized_by(host, model, inputs())
    optimized(inputs())
    optimized.load_state_dict(other.state_dict())
    assert_same(optimized(inputs()), other(inputs()))
    model.wk.weight = nn.Parameter(torch.randn_like(model.wk.weight))
    assert_same(optimized(inputs()), model(inputs()))


def test_a_replaced_buffer_is_followed() -> None:
    model = CacheBuffer().eval()
    optimized = optimized_by("examples", model, inputs(2, 16))
    model.keys = torch.zeros_like(model.keys)
    optimized(inputs(2, 16))
    assert model.keys.any()


def test_a_model_that_changed_its_dtype_is_refused_by_name() -> None:
    model = TwoLevel().eval()
    optimized = optimized_by("examples", model, inputs())
    model.wk.double()
    with pytest.raises(InputError, match="parameter wk.weight was captured as torch.float32"):
        optimized(inputs())


def test_attributes_set_by_python_are_kept() -> None:
    model = WithBreak().eval()
    optimized = optimized_by("first call", model)
    optimized(inputs())
    assert len(model.seen) == 1


class Size(NamedTuple):
    height: int
    names: tuple[str, ...]


def test_attributes_that_tracing_only_rebuilds_are_unchanged() -> None:
    class Plain(TwoLevel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(DIM)
            self.sizes, self.options = Size(3, ("a", "b")), {"eps": 1e-6, "axes": (0, 1)}
            self.held = (object(), torch.ones(1), [torch.zeros(2)])

    model = Plain().eval()
    held = dict(vars(model))
    optimized = optimized_by("examples", model, inputs())
    assert_same(optimized(inputs()), model(inputs()))
    assert all(vars(model)[name] is value for name, value in held.items())


def test_explain_leaves_no_trace() -> None:
    model = CacheBuffer().eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held = dict(model.named_buffers())
    x = inputs(2, 16)
    report = dsa_compile.explain(model, x, config=STATIC)
    assert len(report.matched) == 2
    for name, buffer in model.named_buffers():
        assert buffer is held[name] and torch.equal(buffer, before[name])
    broken = WithBreak().eval()
    dsa_compile.explain(broken, inputs(), config=STATIC)
    assert broken.seen == []


def test_explain_and_verify_leave_caches_untouched() -> None:
    model = CacheArgument().eval()
    caches = torch.zeros(2, 32, HEAD_DIM), torch.zeros(2, 32, DIM)
    report = dsa_compile.explain(model, inputs(2, 12), *caches, 0, config=STATIC)
    assert len(report.matched) == 2 and not any(cache.any() for cache in caches)
    optimized = optimized_by("examples", model, inputs(2, 12), *caches, 0)
    result = dsa_compile.verify(model, optimized, inputs(2, 12), *caches, 0)
    assert result.rows == result.same_rows > 0 and not any(cache.any() for cache in caches)


def test_verify_leaves_buffers_untouched() -> None:
    model = CacheBuffer().eval()
    optimized = optimized_by("examples", model, inputs(2, 16))
    optimized(inputs(2, 16))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    result = dsa_compile.verify(model, optimized, inputs(2, 16, seed=3))
    assert result.largest_output_difference < 1e-5
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_state_is_put_back_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.zeros(3))
            self.plain, self.items, self.names = torch.zeros(3), [torch.zeros(2)], {"a"}

        def forward(self) -> None:
            self.buffer += 1
            self.plain.fill_(2)
            self.items[0].add_(1)
            self.items.append(torch.ones(1))
            self.names.add("b")
            self.fresh = 1
            self.buffer = torch.ones(3)
            raise ValueError

    model = Fails()
    held = model.buffer
    with pytest.raises(ValueError), ModelState(model).kept():
        model()
    assert model.buffer is held and not held.any() and not model.plain.any()
    assert len(model.items) == 1 and not model.items[0].any() and model.names == {"a"}
    assert not hasattr(model, "fresh")
