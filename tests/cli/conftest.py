"""Runs ``dsa-compile`` as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).resolve().parent / "named_models.py"


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Done]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command in this process, as the installed script calls it."""
    from typer.testing import CliRunner

    from dsa_compile.cli import app

    monkeypatch.setenv("COLUMNS", "200")
    # A command puts the folder it runs in on the path. Left there, it would show our own kernels to
    # whoever looks for a package of that name, as transformers does.
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: object) -> Done:
        result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def script() -> Cli:
    """The command in a process of its own."""

    def run(*arguments: object, cwd: Path | None = None) -> Done:
        code = "from dsa_compile.cli import app; app(prog_name='dsa-compile')"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
