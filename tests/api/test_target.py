"""Which provider serves a model, and the one error that says why none does."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile import Config, ProviderError
from dsa_compile.target import choose_provider

ON_CPU = nn.Linear(2, 2)
ELSEWHERE = nn.Linear(2, 2, device="meta")


def test_automatic_is_cpu_for_a_model_on_the_cpu() -> None:
    assert choose_provider(Config(), ON_CPU) == "cpu"
    assert choose_provider(Config(), nn.Identity()) == "cpu"


def test_the_reference_serves_any_device_but_only_by_name() -> None:
    assert choose_provider(Config(provider="reference"), ELSEWHERE) == "reference"
    with pytest.raises(ProviderError):
        choose_provider(Config(), ELSEWHERE)


def test_one_error_lists_every_unmet_need_with_its_mend() -> None:
    with pytest.raises(ProviderError) as caught:
        choose_provider(Config(provider="triton", precision="fp8"), ON_CPU)
    error = caught.value
    assert len(error.needs) == 2
    for need in error.needs:
        assert need.what in str(error) and need.mend in str(error)
    assert "triton" in str(error) and "fp8" in str(error)


def test_a_buffer_elsewhere_counts() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.empty(2, device="meta"))
    with pytest.raises(ProviderError, match="'meta'"):
        choose_provider(Config(provider="cpu"), model)


@pytest.mark.parametrize("call", [dsa_compile.optimize, dsa_compile.explain])
def test_an_unserved_request_fails_before_anything_runs(call) -> None:
    with pytest.raises(ProviderError, match="triton"):
        call(ON_CPU.eval(), config=Config(provider="triton"))


def test_the_error_survives_pickling() -> None:
    with pytest.raises(ProviderError) as caught:
        choose_provider(Config(provider="triton"), ON_CPU)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.needs == caught.value.needs and str(again) == str(caught.value)
