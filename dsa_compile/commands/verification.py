"""``verify``: the original and the rewritten form side by side, on a typical call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsa_compile.commands.output import Output
from dsa_compile.commands.sources import is_file, model_and_inputs
from dsa_compile.config import Config
from dsa_compile.errors import ConfigError, DsaError


def verify(
    out: Output,
    source: str,
    other: str | None,
    inputs: str | None,
    tolerance: float,
    config: Config,
) -> None:
    """Fail where the two differ by more than ``tolerance``."""
    if is_file(source):
        if inputs is not None:
            raise ConfigError("--inputs is for a model; a program holds the arguments itself")
        _files(out, source, other, tolerance, config)
        return
    if other is not None:
        raise ConfigError("a second file is compared with a program; a model is optimised here")
    from dsa_compile.optimizer import optimize
    from dsa_compile.verifier import verify as compare

    with out.steps(3) as step:
        step("importing the model")
        model, (args, kwargs) = model_and_inputs(source, inputs)
        step("finding and rewriting its indexers")
        optimized = optimize(model, config=config)
        step("running both")
        found = compare(model, optimized, *args, **kwargs)
    out.show(found, verification=found.to_dict())
    if not found.sites:
        out.fail(f"no rewritten selection was run; {optimized.report.explain_miss()}")
    # Rows that select otherwise are told by their scores: equal scores may be picked differently.
    if found.largest_score_difference > tolerance:
        out.fail(
            f"selections differ by up to {found.largest_score_difference:.3g} in score; "
            f"--tolerance is {tolerance:g}"
        )
    if found.same_rows == found.rows and found.largest_output_difference > tolerance:
        out.fail(
            f"outputs differ by up to {found.largest_output_difference:.3g}; --tolerance is "
            f"{tolerance:g}"
        )


def _files(out: Output, source: str, other: str | None, tolerance: float, config: Config) -> None:
    import torch

    from dsa_compile.exporter import export
    from dsa_compile.program_files import check_archive, read_program

    with out.steps(4) as step:
        step("reading the program")
        program = read_program(source)
        if program.example_inputs is None:
            raise ConfigError(f"{source}: the program holds no example inputs to run it with")
        step("reading or making the rewritten form")
        run: Callable[..., Any]
        if other is None:
            run = export(program, config=config).module()
        elif check_archive(other) == "package":
            from dsa_compile.loader import load

            run = load(other)
        else:
            run = read_program(other).module()
        step("running the original")
        expected = _run(program.module(), program)
        step("running the rewritten form")
        try:
            got = _run(run, program)
        except DsaError:
            raise
        except Exception as fault:
            raise ConfigError(
                f"{other or source}: it does not run on the arguments that {source} holds "
                f"({type(fault).__name__}); name a form of that program, with inputs of its sizes"
            ) from fault
    if len(got) != len(expected):
        out.fail(f"the original returned {len(expected)} tensors and the other {len(got)}")
    worst, differing = _differences(expected, got)
    text = f"largest difference of {len(expected)} outputs: {worst:.3g}"
    if differing:
        text += f"; {differing} rows of whole numbers or truth values differ"
    out.show(
        text,
        verification={
            "outputs": len(expected),
            "largest_output_difference": worst,
            "differing_rows": differing,
            "torch": torch.__version__,
        },
    )
    if not worst <= tolerance or differing:
        out.fail(f"the two forms differ ({text}); --tolerance is {tolerance:g}")


def _run(run: Callable[..., Any], program: Any) -> list[Any]:
    """Tensors that a call with the program's own arguments gives, the written inputs among them."""
    import copy

    import torch
    import torch.utils._pytree as pytree

    args, kwargs = copy.deepcopy(program.example_inputs)
    with torch.no_grad():
        leaves = pytree.tree_leaves((run(*args, **kwargs), args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _differences(expected: list[Any], got: list[Any]) -> tuple[float, int]:
    """Largest difference of floats, and rows of whole numbers or truth values that differ.

    Whole numbers are compared as sets: selected positions come in no promised order.
    """
    import torch

    from dsa_compile.compare import largest_difference

    worst, differing = 0.0, 0
    for a, b in zip(expected, got, strict=True):
        if a.is_floating_point() or a.is_complex():
            worst = max(worst, largest_difference(a, b))
        elif a.shape != b.shape:
            differing += max(a.numel(), b.numel())
        elif a.dim() == 0:
            differing += int(a != b)
        elif a.dtype == torch.bool:
            differing += int((a != b).any(-1).sum())
        else:
            differing += int((a.sort(-1).values != b.sort(-1).values).any(-1).sum())
    return worst, differing
