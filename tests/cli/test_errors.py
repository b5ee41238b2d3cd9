"""Errors: one message on stderr that says what mends it, exit code 2, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import MODELS, Cli


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "missing.pt2"], "there is no such file"),
        (["inspect", "no_colon"], "neither a .pt2 file nor of the form module:attribute"),
        (["inspect", "no.such.module:model"], "name a module that can be imported"),
        (["inspect", f"{MODELS}:make_bot"], "did you mean 'make_both'"),
        (["inspect", f"{MODELS}:a_number"], "name a module, or a function that makes one"),
        (["inspect", f"{MODELS}:fails"], "ValueError: out of order"),
        (["inspect", f"{MODELS}:ends"], "SystemExit: 0"),
        (["inspect", f"{MODELS}:lacks_one"], "missing a required argument: 'cache'; give a tuple"),
        (["inspect", f"{MODELS}:make_model"], "name them with --inputs module:attribute"),
        (["inspect", f"{MODELS}:make_both", "--config", "provider"], "of the form name=value"),
        (["inspect", f"{MODELS}:make_both", "--config", "providr=1"], "did you mean 'provider'"),
        (["optimize", f"{MODELS}", "out.so"], "must end in .pt2"),
        (["export", f"{MODELS}:make_both", "no/such/folder/out.pt2"], "there is no such folder"),
        (["verify", f"{MODELS}:make_both", "other.pt2"], "a model is optimised here"),
        (["bench", "--dtype", "float8"], "--dtype must be one of float32"),
        (["bench", "--positions", "9", "--rows", "10"], "rows are the last positions"),
        (["bench", "--device", "tpu"], "--device must be cpu or cuda"),
    ],
)
def test_what_cannot_be_done(cli: Cli, arguments: list[str], told: str) -> None:
    done = cli(*arguments)
    assert done.code == 2 and told in done.err and done.err.startswith("error: ")
    assert "Traceback" not in done.err and done.out == ""


def test_a_folder_is_neither_read_nor_written(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model.pt2"
    folder.mkdir()
    done = cli("inspect", folder)
    assert done.code == 2 and "it is a folder; give the path of a .pt2 file" in done.err
    done = cli("export", f"{MODELS}:make_both", folder)
    assert done.code == 2 and "it is a folder; name a file to write" in done.err


def test_errors_in_json(cli: Cli) -> None:
    done = cli("inspect", "missing.pt2", "--json")
    error = json.loads(done.err)["error"]
    assert done.code == 2 and error["kind"] == "PackageError" and "no such file" in error["message"]


def test_needs_in_json(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "export", f"{MODELS}:make_both", tmp_path / "x.pt2", "--provider", "deepgemm", "--json"
    )
    needs = json.loads(done.err)["error"]["needs"]
    assert done.code == 2 and needs and all(need["what"] and need["mend"] for need in needs)


def test_usage_errors_end_with_2(cli: Cli) -> None:
    assert cli("inspect").code == 2
    assert cli("nothing").code == 2
    assert cli("bench", "--rows", "0").code == 2
    assert cli("bench", "--positions", "8").code == 2


def test_a_traceback_only_with_debug(script: Cli) -> None:
    plain = script("inspect", f"{MODELS}:fails")
    assert plain.code == 2 and "Traceback" not in plain.err
    debug = script("inspect", f"{MODELS}:fails", "--debug")
    assert debug.code == 1 and "Traceback" in debug.err and "out of order" in debug.err


def test_a_module_is_found_from_the_folder_that_one_is_in(script: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("there = 1\n")
    done = script("inspect", "mine:ther", cwd=tmp_path)
    assert done.code == 2 and "mine has no attribute 'ther'; did you mean 'there'" in done.err
