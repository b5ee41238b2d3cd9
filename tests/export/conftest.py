"""Programs and packages that several tests read; making one takes seconds to minutes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def made(program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("packages") / "model.pt2"
    dsa_compile.package(program, file, target="cpu", inductor_configs=QUICK)
    return file


@pytest.fixture(scope="session")
def kept(model: TwoLevel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the CPU provider's ops kept."""
    file = tmp_path_factory.mktemp("packages") / "kept.pt2"
    fixed = dsa_compile.export(model, EXAMPLES, config={"dynamic": False, "require_match": 2})
    dsa_compile.package(fixed, file, portable=False, inductor_configs=QUICK)
    return file
