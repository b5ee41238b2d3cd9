"""What a C++ compiler must do for packages is checked before it compiles one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_compile
from dsa_compile.host_compiler import compiler_needs, runtime_fault

from .conftest import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files"),
]


def script(folder: Path, text: str) -> str:
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_the_compiler_here_lacks_nothing() -> None:
    assert compiler_needs() == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_runtime_of_its_own_is_told(tmp_path: Path, program: Any) -> None:
    """Packages with it end the process where they are loaded."""
    static = script(tmp_path, 'exec g++ "$@" -static-libstdc++')
    with (
        torch._inductor.config.patch({"cpp.cxx": (static,)}),
        pytest.raises(dsa_compile.ProviderError, match=r"statically.*\n?.*variable CXX"),
    ):
        dsa_compile.package(program, tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize(
    "text, fault",
    [
        ("echo no such option >&2; exit 1", "makes no shared library: no such option"),
        ("exit 0", "makes no shared library: it says nothing"),
    ],
)
def test_a_compiler_that_fails_is_told(text: str, fault: str, tmp_path: Path) -> None:
    assert fault in str(runtime_fault(script(tmp_path, text)))


def test_a_compiler_that_is_none_is_told(tmp_path: Path) -> None:
    assert "does not run" in str(runtime_fault(str(tmp_path / "missing")))
