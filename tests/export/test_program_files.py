"""Files of exported programs that cannot be read or written."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_compile
from dsa_compile.program_files import read_program, save_program

from .models import NoIndexer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("programs") / "plain.pt2"
    torch.export.save(torch.export.export(NoIndexer(), (torch.randn(3, 8),)), file)
    return file


def other_op(text: bytes) -> bytes:
    return text.replace(b"aten.softmax.int", b"engine.softmax.int")


def later_schema(text: bytes) -> bytes:
    data = json.loads(text)
    data["schema_version"]["major"] = 999
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_op, "resolve torch.ops.engine.softmax.int to an operator.*libraries of its ops"),
        (later_schema, "schema version .*999.* does not match"),
        (lambda text: text[: len(text) // 2], "cannot read this program .JSONDecodeError"),
        (lambda text: b"{}", "cannot read this program"),
    ],
)
def test_the_reason_why_torch_cannot_read_a_program(
    saved: Path, tmp_path: Path, caplog: Any, change: Callable[[bytes], bytes], told: str
) -> None:
    file = tmp_path / "changed.pt2"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if "/models/" in name else data)
    with pytest.raises(dsa_compile.PackageError, match=told) as fault:
        read_program(file)
    assert "\n" not in str(fault.value)
    # A traceback of torch's on stderr would hide the message.
    assert not any(record.exc_info for record in caplog.records)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(dsa_compile.PackageError, match="it is a folder"):
        read_program(tmp_path)
    with pytest.raises(dsa_compile.PackageError, match="there is no such file"):
        read_program(tmp_path / "no.pt2")


def test_a_file_that_may_not_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    with pytest.raises(dsa_compile.PackageError, match="may not be read here"):
        read_program(saved)


def test_an_old_file_stays_where_a_new_one_cannot_be_written(saved: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "model.pt2", tmp_path / "folder.pt2"
    save_program(read_program(saved), file)
    before = file.read_bytes()
    folder.mkdir()
    with pytest.raises(dsa_compile.PackageError, match="cannot save the program"):
        save_program(object(), file)
    assert file.read_bytes() == before and sorted(tmp_path.iterdir()) == [folder, file]
    with pytest.raises(dsa_compile.PackageError, match="cannot be written: .*another place"):
        save_program(read_program(saved), folder)
    with pytest.raises(dsa_compile.PackageError, match="cannot be written: .*another place"):
        save_program(read_program(saved), tmp_path / "nowhere" / "model.pt2")


def test_torch_warns_of_nothing_that_a_user_could_mend(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("ignore", dsa_compile.NoMatchWarning)
        dsa_compile.export(saved)
