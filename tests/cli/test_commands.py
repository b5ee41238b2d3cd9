"""Every command: what it prints, as a table and as JSON, what it writes, and how it ends."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import dsa_compile
from dsa_compile.commands.verification import _differences

from .conftest import MODELS, Cli
from .named_models import Router, make_both

FIXED = ("--config", "dynamic=false")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plain program and its rewritten form."""
    folder = tmp_path_factory.mktemp("files")
    model, args = make_both()
    plain = torch.export.export(model, args)
    torch.export.save(plain, folder / "plain.pt2")
    torch.export.save(dsa_compile.export(plain), folder / "done.pt2")
    return folder


def test_help_imports_no_torch() -> None:
    import subprocess

    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom dsa_compile.cli import app\n"
        "for name in ('', 'doctor', 'inspect', 'optimize', 'export', 'package', 'verify', 'bench', "
        "'demo'):\n"
        "    result = CliRunner().invoke(app, [*([name] if name else []), '--help'])\n"
        "    assert result.exit_code == 0 and '--help' in result.output, result.output\n"
        "heavy = {'torch', 'sympy', 'transformers', 'triton', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_doctor(cli: Cli) -> None:
    assert cli("doctor", "--json").data["providers"]["cpu"] == []
    assert "target" in cli("doctor").out
    done = cli("doctor", "--target", "sm9")
    assert done.code == 2 and done.out == "" and "did you mean 'sm90'" in done.err


def test_inspect_a_model(cli: Cli) -> None:
    done = cli("inspect", f"{MODELS}:make_both")
    assert done.code == 0 and "1 rewritten, 1 fused, 0 kept" in done.out and done.err == ""


def test_inspect_with_named_inputs(cli: Cli) -> None:
    done = cli(
        "inspect",
        f"{MODELS}:make_model",
        "--inputs",
        f"{MODELS}:example",
        "--json",
        "--at-least",
        2,
    )
    assert done.code == 0 and len(done.data["report"]["sites"]) == 2


def test_inspect_programs(cli: Cli, files: Path) -> None:
    for name in ("plain.pt2", "done.pt2"):
        done = cli("inspect", files / name, "--json", "--require-match")
        assert done.code == 0
        assert [s["status"] for s in done.data["report"]["sites"]] == ["fused", "rewritten"]
    assert done.data["made"]["torch"] == torch.__version__.partition("+")[0]
    assert "made by dsa_compile" in cli("inspect", files / "done.pt2").out


def test_a_required_match_that_is_not_there_ends_with_1(cli: Cli, files: Path) -> None:
    source = f"{MODELS}:router"
    assert cli("inspect", source).code == 0
    done = cli("inspect", source, "--require-match")
    assert done.code == 1 and "0 indexers were matched and 1 are required" in done.err
    assert "nearest miss" in done.err and "selection" in done.out
    done = cli("inspect", files / "done.pt2", "--at-least", 3, "--json")
    assert done.code == 1 and done.data["matched"] == 2
    assert '"kind": "check"' in done.err
    for source in (files / "plain.pt2", f"{MODELS}:make_both"):
        done = cli("inspect", source, "--config", "require_match=3")
        assert done.code == 1 and "2 indexers were matched and 3 are required" in done.err


def test_optimize(cli: Cli, files: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt2"
    done = cli("optimize", files / "plain.pt2", target, "--json", "--at-least", 2)
    assert done.code == 0 and done.data["wrote"] == str(target)
    model, args = make_both()
    program = torch.export.load(target)
    assert torch.equal(program.module()(*args).sort(-1).values, model(*args).sort(-1).values)
    done = cli("optimize", target, tmp_path / "again.pt2")
    assert done.code == 2 and "rewritten already" in done.err
    assert not (tmp_path / "again.pt2").exists()


def test_export(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "out.pt2"
    done = cli("export", f"{MODELS}:make_both", target, *FIXED, "--provider", "reference")
    assert done.code == 0 and f"wrote {target}" in done.out and "provider reference" in done.out
    report = dsa_compile.report_of(torch.export.load(target))
    assert report.provider == "reference" and len(report.matched) == 2
    done = cli("export", f"{MODELS}:router", tmp_path / "no.pt2", "--require-match", *FIXED)
    assert done.code == 2 and "require_match" in done.err and not (tmp_path / "no.pt2").exists()


def test_verify_a_model(cli: Cli) -> None:
    done = cli("verify", f"{MODELS}:make_both", "--json", *FIXED)
    found = done.data["verification"]
    assert done.code == 0 and len(found["sites"]) == 2
    done = cli("verify", f"{MODELS}:router")
    assert done.code == 1 and "no rewritten selection was run" in done.err


def test_verify_programs(cli: Cli, files: Path, tmp_path: Path) -> None:
    assert cli("verify", files / "plain.pt2").code == 0
    done = cli("verify", files / "plain.pt2", files / "done.pt2", "--json")
    assert done.code == 0 and done.data["verification"]["differing_rows"] == 0
    model, args = make_both()
    with torch.no_grad():
        model.wk.weight.neg_()
    torch.export.save(torch.export.export(model, args), tmp_path / "other.pt2")
    done = cli("verify", files / "plain.pt2", tmp_path / "other.pt2")
    assert done.code == 1 and "the two forms differ" in done.err
    # One that takes other arguments.
    torch.export.save(torch.export.export(Router(), (torch.randn(3, 8),)), tmp_path / "alien.pt2")
    done = cli("verify", files / "plain.pt2", tmp_path / "alien.pt2")
    assert done.code == 2 and "does not run on the arguments that" in done.err
    masks = torch.tensor([[True, False]]), torch.tensor([[False, True]])
    assert _differences([masks[0]], [masks[1]]) == (0.0, 1)
    assert _differences([masks[0].int()], [masks[1].int()]) == (0.0, 0)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="packages need a C++ compiler"
)
def test_package_and_inspect_it(cli: Cli, files: Path, tmp_path: Path) -> None:
    from torch._inductor import config

    target = tmp_path / "package.pt2"
    # Correct code is asked for, not fast code.
    with config.patch({"aot_inductor.debug_compile": True}):
        done = cli("package", files / "done.pt2", target, "--target", "cpu", "--keep-ops", "--json")
    assert done.code == 0 and done.data["package"]["target"] == "cpu"
    shown = cli("inspect", target)
    assert shown.code == 0 and "dsa_cpu::sparse_mqa_logits" in shown.out
    assert "1 rewritten, 1 fused" in shown.out and "made by dsa_compile" in shown.out
    assert "dsa_cpu::topk" in cli("inspect", target, "--json").data["package"]["ops"]
    assert cli("verify", files / "plain.pt2", target).code == 0
    done = cli("package", files / "done.pt2", target, "--target", "sm90")
    assert done.code == 2 and "export the model from that device" in done.err


def test_bench(cli: Cli) -> None:
    done = cli(
        "bench", "--positions", 300, "--rows", 4, "--form", "compiled", "--runs", 1, "--threads", 1,
        "--json",
    )  # fmt: skip
    (row,) = done.data["bench"]
    assert done.code == 0 and row["form"] == "compiled" and row["faster_than_compiled"] == 1
    assert row["seconds"] > 0 and row["picks_equal_dense"] is None


def test_demo(cli: Cli) -> None:
    done = cli("demo", "--positions", 300, "--rows", 3, "--threads", 1, "--json")
    assert done.code == 0 and len(done.data["verification"]["sites"]) == 5
    dense, ours = done.data["bench"]
    assert dense["form"] == "dense" and ours["picks_equal_dense"]
