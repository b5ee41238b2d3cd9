"""``.pt2`` files: what kind they are, whether they are whole, and the programs among them."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsa_compile.errors import PackageError
from dsa_compile.package_metadata import FILE, PackageMetadata

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_CHUNK = 1 << 20


def check_archive(path: str | os.PathLike[str]) -> Literal["program", "package"]:
    """What a ``.pt2`` file holds: an exported program, or a compiled package. Imports no torch.

    Every byte is read and held against its checksum, since code from a damaged package would run.

    Raises:
        PackageError: there is no such file, it is cut off or damaged, or it is something else.
    """
    file = Path(path)
    if not file.is_file():
        kind = "it is a folder" if file.is_dir() else "there is no such file"
        raise PackageError(f"{file}: {kind}; give the path of a .pt2 file")
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            for name in names:
                with archive.open(name) as entry:
                    while entry.read(_CHUNK):
                        pass
    except PermissionError as fault:
        raise PackageError(f"{file}: it may not be read here; change its permissions") from fault
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as fault:
        whole = (
            "it is damaged or cut off; copy or make it again"
            if _starts_like(file)
            else ("it is no .pt2 file; torch.export.save and dsa_compile.package write such files")
        )
        raise PackageError(f"{file}: {whole} ({type(fault).__name__}: {fault})") from fault
    inside = [name.partition("/")[2] for name in names]
    if any(name.startswith("data/aotinductor/") for name in inside):
        return "package"
    if any(name.startswith("models/") for name in inside) or "serialized_exported_program.json" in (
        *names,
        *inside,
    ):
        return "program"
    raise PackageError(
        f"{file}: it is an archive without an exported program or a package; torch.export.save and "
        "dsa_compile.package write such files"
    )


def _starts_like(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def read_metadata(path: str | os.PathLike[str]) -> PackageMetadata:
    """The metadata of a package, without loading it.

    Raises:
        PackageError: the file is no whole package, or dsa_compile did not make it.
    """
    if check_archive(path) != "package":
        raise PackageError(
            f"{path}: it holds an exported program and no compiled code; give it to "
            "dsa_compile.package, or run torch.export.load after import dsa_compile.kernels"
        )
    with zipfile.ZipFile(path) as archive:
        found = [n for n in archive.namelist() if n.endswith(f"/extra/{FILE}")]
        if not found:
            raise PackageError(
                f"{path}: dsa_compile did not make this package; load it with "
                "torch._inductor.aoti_load_package"
            )
        try:
            return PackageMetadata.from_json(archive.read(found[0]))
        except PackageError as fault:
            raise PackageError(f"{path}: {fault}") from fault


def read_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """The exported program of a file, our ops registered first.

    Raises:
        PackageError: the file is no whole exported program, or this torch cannot read it.
    """
    if check_archive(path) != "program":
        raise PackageError(
            f"{path}: it holds a compiled package and no exported program; dsa_compile.load runs it"
        )
    import torch

    register_ops()
    log, kept = logging.getLogger("torch.export"), _Kept()
    log.addFilter(kept)
    try:
        with torch.no_grad():
            return torch.export.load(os.fspath(path))
    except Exception as raised:  # noqa: BLE001 - torch raises many kinds
        fault: BaseException = kept.fault or raised
        while fault.__cause__ is not None:
            fault = fault.__cause__
        # What follows the first sentence is the whole node, or advice to file a report.
        text = (str(fault).strip().splitlines() or [""])[0].partition(". ")[0]
        raise PackageError(
            f"{path}: torch {torch.__version__} cannot read this program ({type(fault).__name__}: "
            f"{text}); export it again with this version, and import the libraries of its ops first"
        ) from fault
    finally:
        log.removeFilter(kept)


class _Kept(logging.Filter):
    """Keeps the error that torch logs, with its traceback, before it raises one without a cause."""

    fault: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            self.fault = record.exc_info[1]
            return False
        return True


def register_ops() -> None:
    """Register the ops of every provider that can be registered here."""
    import importlib

    importlib.import_module("dsa_compile.kernels")
    for name in ("triton", "deep"):
        try:
            importlib.import_module(f"dsa_compile.kernels.{name}")
        except ImportError:
            # Its package is missing here: a program that calls its ops is told by torch.
            continue


def save_program(program: Any, path: str | os.PathLike[str]) -> None:
    """Write an exported program to a file; an old one stays where this fails.

    Raises:
        PackageError: the file cannot be written, or torch cannot save the program.
    """
    import torch

    file = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            draft = Path(folder, file.name)
            torch.export.save(program, draft)
            os.replace(draft, file)
    except OSError as fault:
        raise PackageError(
            f"{path}: the file cannot be written: {fault.strerror or fault}; name another place"
        ) from fault
    except Exception as fault:  # noqa: BLE001 - torch raises many kinds
        raise PackageError(f"{path}: torch cannot save the program: {fault}") from fault
