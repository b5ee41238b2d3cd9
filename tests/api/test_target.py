"""Which provider serves a model, and the one error that says why none does."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile import Config, ConfigError, ProviderError, Target
from dsa_compile.target import choose_provider, interpreted

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
        choose_provider(Config(provider="deepgemm", precision="fp8"), ON_CPU)
    error = caught.value
    assert len(error.needs) >= 2
    for need in error.needs:
        assert need.what in str(error) and need.mend in str(error)
    assert "deepgemm" in str(error) and "fp8" in str(error)


def test_a_buffer_elsewhere_counts() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.empty(2, device="meta"))
    with pytest.raises(ProviderError, match="'meta'"):
        choose_provider(Config(provider="cpu"), model)


@pytest.mark.parametrize("call", [dsa_compile.optimize, dsa_compile.explain])
def test_an_unserved_request_fails_before_anything_runs(call) -> None:
    with pytest.raises(ProviderError, match="triton"):
        call(ON_CPU.eval(), config=Config(provider="triton"))


def test_targets_are_known_by_name() -> None:
    assert Target("sm90").capability == (9, 0) and Target("sm120").capability == (12, 0)
    assert Target("cpu").capability is None
    with pytest.raises(ConfigError, match="did you mean 'sm90'"):
        Target("sm91")


def test_a_target_is_detected_without_a_gpu_or_with_one() -> None:
    target = Target.detect()
    assert target.name == "cpu" or target.capability is not None
    assert target.packages["torch"] == torch.__version__
    assert Target.detect("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="'meta'"):
        Target.detect("meta")


@pytest.mark.parametrize(
    ("packages", "mend"), [({}, "pip install triton"), ({"triton": "3.1.0"}, "3.4 or newer")]
)
def test_what_the_triton_kernels_need_is_listed(packages: dict[str, str], mend: str) -> None:
    assert Target("sm90", packages={"triton": "3.6.0"}).needs("triton") == ()
    (need,) = Target("sm90", packages=packages).needs("triton")
    assert mend in need.mend
    on_cpu = Target("cpu", packages={"triton": "3.6.0"}).needs("triton")
    assert interpreted() or [n for n in on_cpu if "GPUs" in n.what]


def test_the_error_survives_pickling() -> None:
    with pytest.raises(ProviderError) as caught:
        choose_provider(Config(provider="triton"), ON_CPU)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.needs == caught.value.needs and str(again) == str(caught.value)
