"""What a machine can serve, for people and for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dsa_compile import host_compiler
from dsa_compile.cli import app
from dsa_compile.config import PROVIDERS
from dsa_compile.doctor import examine
from dsa_compile.errors import ConfigError, Need


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_every_provider_is_looked_at() -> None:
    found = examine("sm90")
    assert set(found.needs) == set(PROVIDERS) - {"auto"}
    assert found.needs["cpu"] == found.needs["reference"] == ()
    assert all(need.mend for needs in found.needs.values() for need in needs)


def test_what_packages_lack_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine("cpu").compiler == tuple(host_compiler.compiler_needs())
    lacking = [Need("the C++ compiler is none", "name another")]
    monkeypatch.setattr("dsa_compile.doctor.compiler_needs", lambda: lacking)
    assert examine("cpu").to_dict()["packaging"] == [
        {"what": "the C++ compiler is none", "mend": "name another"}
    ]


def test_it_prints_a_table_or_json() -> None:
    code, text = run("doctor", "--target", "sm100")
    assert code == 0 and "target sm100" in text and "deepgemm" in text and "ready" in text
    assert "C++ compiler of packages" in text
    code, text = run("doctor", "--target", "sm100", "--json")
    assert code == 0 and json.loads(text) == examine("sm100").to_dict()


def test_an_unknown_target_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError):
        examine("sm9")
    code, text = run("doctor", "--target", "sm9")
    assert code == 2 and "did you mean 'sm90'" in text and "Traceback" not in text
