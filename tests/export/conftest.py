"""Programs and packages that several tests read; making one takes seconds to minutes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import dsa_compile

from .models import TwoLevel, inputs

EXAMPLES = inputs()
OTHERS = inputs(rows=14, positions=67, seed=3)
# Tests ask for correct code, not for fast code.
QUICK = {"aot_inductor.debug_compile": True}
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="packages need a C++ compiler"
)


@pytest.fixture(scope="session")
def model() -> TwoLevel:
    return TwoLevel().eval()


@pytest.fixture(scope="session")
def program(model: TwoLevel) -> Any:
    return dsa_compile.export(model, EXAMPLES, config={"require_match": 2})


def once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """One package for all processes of a test run: the first that asks for it makes it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    file = root / name
    with FileLock(f"{file}.lock"):
        if not file.exists():
            draft = file.with_name(f"draft_{name}")
            make(draft)
            draft.rename(file)
    return file


@pytest.fixture(scope="session")
def made(model: TwoLevel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(file: Path) -> None:
        program = dsa_compile.export(model, EXAMPLES, config={"require_match": 2})
        dsa_compile.package(program, file, target="cpu", inductor_configs=QUICK)

    return once(tmp_path_factory, "model.pt2", make)


@pytest.fixture(scope="session")
def kept(model: TwoLevel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the CPU provider's ops kept."""

    def make(file: Path) -> None:
        fixed = dsa_compile.export(model, EXAMPLES, config={"dynamic": False, "require_match": 2})
        dsa_compile.package(fixed, file, portable=False, inductor_configs=QUICK)

    return once(tmp_path_factory, "kept.pt2", make)
