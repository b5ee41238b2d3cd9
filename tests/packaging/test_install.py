"""A wheel and an editable install give one top-level package, with `passes` and `kernels` in it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "dsa_compile": "dsa_compile",
    "passes": "dsa_compile/passes",
    "kernels": "dsa_compile/kernels",
}
# Imports everything below dsa_compile and says where it came from; argv[1] is the install target.
IMPORT_ALL = """
import importlib, pkgutil, site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
import dsa_compile
for info in pkgutil.walk_packages(dsa_compile.__path__, "dsa_compile."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
import dsa_compile.passes, dsa_compile.kernels
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "dsa_compile":
        print(name, module.__file__)
"""


def run(*command: str, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def imported(target: Path, cwd: Path) -> dict[str, Path]:
    """Module name -> file, in a Python that sees the target and the dependencies alone."""
    # -S keeps out the install that the tests themselves run from.
    packages = sysconfig.get_paths()["purelib"]
    out = run(sys.executable, "-S", "-c", IMPORT_ALL, str(target), packages, cwd=cwd)
    pairs = (line.split(" ", 1) for line in out.splitlines() if line.startswith("dsa_compile"))
    return {name: Path(file).resolve() for name, file in pairs}


def sources() -> set[str]:
    """Installed paths of every source file in the working tree."""
    found = set()
    for folder, package in SOURCES.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix == ".py" or file.name == "py.typed":
                found.add(f"{package}/{file.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that building leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), ".", cwd=tree)
    (built,) = out.iterdir()
    return built


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == sources()


def test_wheel_has_one_name_at_top_level(wheel: Path) -> None:
    tops = {n.split("/")[0] for n in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"dsa_compile"}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (meta,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(meta).decode()
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    requires = re.findall(r"^Requires-Dist: ([a-z]+)[^;\n]*$", text, re.MULTILINE)
    assert set(requires) == {"torch", "sympy", "rich", "typer"}


def test_installed_wheel_imports_from_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)
    modules = imported(target, cwd=tmp_path)
    assert {"dsa_compile", "dsa_compile.passes", "dsa_compile.kernels"} <= set(modules)
    for name, file in modules.items():
        assert file.is_relative_to(target.resolve()), f"{name} came from {file}"


def test_editable_install_imports_the_working_tree(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--target", str(target))
    pip("install", *options, "--editable", str(tree), cwd=tmp_path)
    added = tree / "passes" / "written_after_the_install.py"
    added.write_text("")
    try:
        modules = imported(target, cwd=tmp_path)
    finally:
        added.unlink()
    expected = {"dsa_compile": "dsa_compile", "dsa_compile.passes": "passes"}
    expected |= {"dsa_compile.kernels": "kernels"}
    for name, folder in expected.items():
        assert modules[name] == (tree / folder / "__init__.py").resolve()
    for name, file in modules.items():
        assert file.is_relative_to(tree.resolve()), f"{name} came from {file}"


def test_importing_one_layer_leaves_the_layers_above_out(tmp_path: Path) -> None:
    code = "import sys, dsa_compile.{0}; print(*[m for m in sys.modules if m.startswith('dsa_')])"
    out = run(sys.executable, "-c", code.format("kernels"), cwd=tmp_path).split()
    assert not [m for m in out if m.startswith("dsa_compile.passes")]
    above = {"dsa_compile.optimize", "dsa_compile.report", "dsa_compile.config"}
    assert not above & set(out)
    out = run(sys.executable, "-c", code.format("passes"), cwd=tmp_path).split()
    assert not above & set(out)
