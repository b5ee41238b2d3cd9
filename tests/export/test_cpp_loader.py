"""The C++ example: built with CMake, runs a package without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsa_compile

from .conftest import EXAMPLES, OTHERS
from .models import TwoLevel, assert_same

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "cpp_loader"
TOOLS = Path(sys.executable).parent


def tool(name: str) -> str | None:
    """A program beside this Python, or on the path."""
    return shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")


pytestmark = pytest.mark.skipif(
    tool("cmake") is None or tool(os.environ.get("CXX", "g++")) is None,
    reason="needs cmake and a C++ compiler",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    cmake = tool("cmake")
    assert cmake is not None
    # Ninja where there is one; else what CMake takes by itself.
    ninja = tool("ninja")
    maker = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    made = run(
        cmake,
        *maker,
        "-S",
        str(SOURCE),
        "-B",
        str(build),
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        "-DCMAKE_BUILD_TYPE=Debug",
    )
    if made.returncode != 0 and "CUDA cannot be found" in made.stdout + made.stderr:
        pytest.skip("CMake takes this CUDA build of PyTorch only where the CUDA toolkit is")
    assert made.returncode == 0, made.stdout + made.stderr
    made = run(cmake, "--build", str(build))
    assert made.returncode == 0, made.stdout + made.stderr
    return build / "run_package"


def test_a_package_runs_from_cpp(runner: Path, model: TwoLevel, made: Path, tmp_path: Path) -> None:
    version = dsa_compile.load(made).metadata.version
    for number, args in enumerate((EXAMPLES, OTHERS)):
        given, results = tmp_path / f"in{number}.pt", tmp_path / f"out{number}.pt"
        torch.save(list(args), given)
        done = run(str(runner), str(made), str(given), str(results))
        assert done.returncode == 0, done.stderr
        assert f"package of dsa_compile {version} for cpu" in done.stdout
        assert_same(torch.load(results), model(*args))


def test_a_foreign_file_is_told(runner: Path, tmp_path: Path) -> None:
    file = tmp_path / "foreign.pt2"
    file.write_bytes(b"no package")
    done = run(str(runner), str(file), str(file), str(file))
    assert done.returncode == 1 and done.stderr.startswith("run_package: ")
    assert run(str(runner)).stderr.startswith("usage: run_package")
