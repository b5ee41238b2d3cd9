"""``inspect``: the report on a file or a model, and where a file comes from."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from dsa_compile.commands.output import Output
from dsa_compile.commands.sources import config_of, is_file, model_and_inputs
from dsa_compile.config import Config
from dsa_compile.report import Report


def inspect(out: Output, source: str, inputs: str | None, options: list[str], needed: int) -> None:
    """Show the report; fail where fewer than ``needed`` indexers were matched."""
    config = config_of(options)
    needed = max(needed, config.matches_needed)
    # All are shown before the number is judged.
    config = replace(config, require_match=False)
    report = _file(out, source, config) if is_file(source) else _model(out, source, inputs, config)
    if report is None:
        if needed:
            out.fail(f"{source}: dsa_compile did not export what is inside: nothing is matched")
        return
    out.show(report, report=report.to_dict())
    found = len(report.matched)
    if found < needed:
        out.fail(
            f"{found} indexers were matched and {needed} are required; {report.explain_miss()}",
            matched=found,
        )


def _model(out: Output, source: str, inputs: str | None, config: Config) -> Report:
    from dsa_compile.explainer import explain

    with out.steps(2) as step:
        step("importing the model")
        model, (args, kwargs) = model_and_inputs(source, inputs)
        step("looking for indexers")
        return explain(model, *args, config=config, **kwargs)


def _file(out: Output, source: str, config: Config) -> Report | None:
    from dsa_compile.program_files import check_archive, read_metadata, read_program

    if check_archive(source) == "package":
        metadata = read_metadata(source)
        plain = metadata.to_dict()
        made = plain.pop("provenance")
        out.show(_facts(plain), package=plain)
        if metadata.provenance is None:
            return None
        out.show(_made(made), made=_without_report(made))
        return metadata.provenance.report
    from dsa_compile.errors import NoMatchWarning
    from dsa_compile.export_rewrite import rewrite
    from dsa_compile.package_metadata import provenance_of

    with out.steps(2) as step:
        step("reading the program")
        program = read_program(source)
        provenance = provenance_of(program)
        if provenance is not None:
            made = provenance.to_dict()
            out.show(_made(made), made=_without_report(made))
            return provenance.report
        step("looking for indexers")
        with warnings.catch_warnings():
            # The report says it, too.
            warnings.simplefilter("ignore", NoMatchWarning)
            return rewrite(program, config)[1]


def _without_report(made: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in made.items() if name != "report"}


def _facts(plain: dict[str, Any]) -> Any:
    """A package in words."""
    from dsa_compile.report import plain_table

    table = plain_table(("package", ""), ("",), ())
    table.add_row("target", plain["target"])
    table.add_row("host", plain["machine"])
    table.add_row("torch", plain["torch"])
    table.add_row("dsa_compile", plain["version"])
    if plain["triton"]:
        table.add_row("kernels of Triton", plain["triton"])
    table.add_row("ops from outside", ", ".join(plain["ops"]) or "none")
    for given in plain["inputs"]:
        sizes = ", ".join(map(str, given["shape"]))
        table.add_row(f"input {given['name']}", f"{given['dtype']} \\[{sizes}]")
    if plain["conditions"]:
        table.add_row("conditions on sizes", f"{len(plain['conditions'])}, checked at each call")
    return table


def _made(made: dict[str, Any]) -> Any:
    """A provenance in words."""
    options = ", ".join(f"{name}={value!r}" for name, value in made["config"].items())
    return f"made by dsa_compile {made['version']} with torch {made['torch']}: {options}"
