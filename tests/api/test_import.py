"""Importing the package is quick and pulls in no compiler; names come when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dsa_compile

PROBE = """
import sys, dsa_compile
assert "torch" not in sys.modules, "torch was imported"
dsa_compile.Config, dsa_compile.DsaError
assert "torch._dynamo" not in sys.modules
{use}
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("use", ["", "dsa_compile.Report()", "dsa_compile.optimize"])
def test_importing_pulls_in_no_compiler(use: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(use=use)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_every_public_name_is_there() -> None:
    for name in dsa_compile.__all__:
        assert getattr(dsa_compile, name).__name__ == name
        assert name in dir(dsa_compile)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="optimise"):
        dsa_compile.optimise  # noqa: B018


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    code = (
        "import dsa_compile, dsa_compile.verifier, dsa_compile.optimizer, dsa_compile.explainer\n"
    )
    code += "assert all(map(callable, (dsa_compile.optimize, dsa_compile.explain, "
    code += "dsa_compile.verify)))"
    subprocess.run([sys.executable, "-c", code], check=True)
