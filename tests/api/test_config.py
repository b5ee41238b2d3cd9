"""Options: defaults, and errors that name every bad one."""

from __future__ import annotations

import dataclasses

import pytest

from dsa_compile import Config, ConfigError
from dsa_compile.config import as_config


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().provider = "cpu"  # type: ignore[misc]


def test_plain_options_give_the_same_configuration() -> None:
    options = {"provider": "reference", "require_match": 2, "dynamic": None}
    assert Config.from_options(options) == Config(
        provider="reference", require_match=2, dynamic=None
    )
    assert as_config(options) == Config.from_options(options)
    assert as_config(None) == Config()


@pytest.mark.parametrize(
    ("name", "meant"), [("providr", "provider"), ("require_matches", "require_match")]
)
def test_an_unknown_option_is_named_with_its_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean '{meant}'"):
        Config.from_options({name: 1})


def test_every_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_options({"providr": "cpu", "colour": 1})
    assert "providr" in str(caught.value) and "colour" in str(caught.value)
    assert "known options" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("provider", "gpu"),
        ("provider", None),
        ("precision", "int3"),
        ("require_match", -1),
        ("require_match", "all"),
        ("dynamic", "yes"),
        ("probe_memory_bytes", 0),
        ("probe_memory_bytes", 1.5),
        ("probe_memory_bytes", True),
        ("probe_seed", -1),
        ("probe_draws", 0),
        ("chunk_bytes", 0),
        ("chunk_bytes", "64M"),
    ],
)
def test_a_bad_value_is_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}: .*got {value!r}"):
        Config.from_options({option: value})


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(provider="cpuu", precision="fp9", probe_draws=0)
    text = str(caught.value)
    assert "did you mean 'cpu'" in text and "did you mean 'fp8'" in text and "probe_draws" in text


def test_a_configuration_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="got str"):
        as_config("cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "needed"), [(False, 0), (True, 1), (0, 0), (5, 5)])
def test_required_matches_as_a_number(given: bool | int, needed: int) -> None:
    assert Config(require_match=given).matches_needed == needed
