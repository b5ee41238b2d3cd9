"""``optimize``, ``export`` and ``package``: files in, or a model; a file out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dsa_compile.commands.output import Output
from dsa_compile.commands.sources import is_file, model_and_inputs
from dsa_compile.config import Config
from dsa_compile.errors import PackageError
from dsa_compile.report import Report


def _check_target(path: str) -> None:
    """Raise PackageError where a file cannot be written, before any work is done."""
    if not path.endswith(".pt2"):
        raise PackageError(f"{path}: the name of the file to write must end in .pt2")
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise PackageError(f"{path}: there is no such folder; make it first")
    if Path(path).is_dir():
        raise PackageError(f"{path}: it is a folder; name a file to write")
    if not os.access(folder, os.W_OK):
        raise PackageError(f"{path}: its folder cannot be written to; name another place")


def _done(out: Output, path: str, report: Report | None) -> None:
    if report is not None:
        out.show(report, report=report.to_dict())
    out.show(f"wrote {path}", wrote=path)


def optimize(out: Output, source: str, target: str, config: Config) -> None:
    """Rewrite the indexers of an exported program."""
    from dsa_compile.exporter import export
    from dsa_compile.package_metadata import report_of
    from dsa_compile.program_files import read_program, save_program

    _check_target(target)
    with out.steps(3) as step:
        step("reading the program")
        program = read_program(source)
        step("rewriting the indexers")
        program = export(program, config=config)
        step("writing the program")
        save_program(program, target)
    _done(out, target, report_of(program))


def export_model(out: Output, source: str, target: str, inputs: str | None, config: Config) -> None:
    """Export a model, rewritten."""
    from dsa_compile.package_metadata import report_of
    from dsa_compile.program_files import save_program

    _check_target(target)
    with out.steps(3) as step:
        program = _exported(step, source, inputs, config)
        step("writing the program")
        save_program(program, target)
    _done(out, target, report_of(program))


def package_source(
    out: Output,
    source: str,
    target: str,
    inputs: str | None,
    device: str | None,
    portable: bool,
    config: Config,
) -> None:
    """Compile a program or a model into a package."""
    from dsa_compile.packager import package
    from dsa_compile.program_files import read_program

    _check_target(target)
    with out.steps(3) as step:
        if is_file(source):
            step("reading the program")
            program = read_program(source)
        else:
            program = _exported(step, source, inputs, config)
        step("compiling the package, which takes minutes for a large model")
        made = package(program, target, target=device, portable=portable)
    plain = made.to_dict()
    plain.pop("provenance")
    out.show("", package=plain)
    _done(out, target, None if made.provenance is None else made.provenance.report)


def _exported(step: Any, source: str, inputs: str | None, config: Config) -> Any:
    from dsa_compile.exporter import export

    step("importing the model")
    model, (args, kwargs) = model_and_inputs(source, inputs)
    step("exporting it and rewriting its indexers")
    return export(model, args, kwargs, config=config)
