"""The command ``dsa-compile``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Compile DeepSeek Sparse Attention indexers in PyTorch models.\n\n"
    "A SOURCE is a .pt2 file, or module:attribute (file.py:attribute) that names a model, or a "
    "function that gives a model, or a model and the arguments of a typical call.\n\n"
    "Exit codes: 0 done, 1 a check does not hold, 2 it could not be carried out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
Inputs = Annotated[
    str | None,
    typer.Option(help="module:attribute that names the arguments of a typical call."),
]
Options = Annotated[
    list[str],
    typer.Option("--config", metavar="NAME=VALUE", help="An option of dsa_compile.Config."),
]
Provider = Annotated[str | None, typer.Option(help="Whose kernels run, as in dsa_compile.Config.")]
Require = Annotated[bool, typer.Option("--require-match", help="Fail where no indexer is matched.")]
AtLeast = Annotated[
    int, typer.Option(min=0, help="Fail where fewer indexers are matched than this.")
]


@app.callback()
def main() -> None:
    """Compile DeepSeek Sparse Attention indexers in PyTorch models."""


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Look at this target, such as sm90, instead of the device found here."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what this machine can serve, and what is missing for the rest."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.doctor import examine

        found = examine(target)
        out.show(found, **found.to_dict())


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A program, a package, or a model.")],
    inputs: Inputs = None,
    config: Options = [],  # noqa: B006 - typer copies it
    require_match: Require = False,
    at_least: AtLeast = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which selections there are and what became, or would become, of them."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.inspection import inspect as run

        run(out, source, inputs, config, max(at_least, int(require_match)))


@app.command()
def optimize(
    source: Annotated[str, typer.Argument(help="A program as torch.export.save wrote it.")],
    target: Annotated[str, typer.Argument(help="The .pt2 file to write.")],
    provider: Provider = None,
    config: Options = [],  # noqa: B006
    require_match: Require = False,
    at_least: AtLeast = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Rewrite the indexers of an exported program."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.programs import optimize as run
        from dsa_compile.commands.sources import config_of

        run(out, source, target, config_of(config, provider, max(at_least, int(require_match))))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A model.")],
    target: Annotated[str, typer.Argument(help="The .pt2 file to write.")],
    inputs: Inputs = None,
    provider: Provider = None,
    config: Options = [],  # noqa: B006
    require_match: Require = False,
    at_least: AtLeast = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a model through torch.export, its indexers rewritten."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.programs import export_model
        from dsa_compile.commands.sources import config_of

        options = config_of(config, provider, max(at_least, int(require_match)))
        export_model(out, source, target, inputs, options)


@app.command()
def package(
    source: Annotated[str, typer.Argument(help="A program, or a model.")],
    file: Annotated[str, typer.Argument(help="The .pt2 file to write.")],
    inputs: Inputs = None,
    target: Annotated[
        str | None, typer.Option(help="What it will run on, such as cpu or sm90.")
    ] = None,
    keep_ops: Annotated[
        bool, typer.Option(help="Keep the CPU provider's ops: the package then needs dsa_compile.")
    ] = False,
    provider: Provider = None,
    config: Options = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile a program or a model into a package that runs without the model's code."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.programs import package_source
        from dsa_compile.commands.sources import config_of

        options = config_of(config, provider)
        package_source(out, source, file, inputs, target, not keep_ops, options)


@app.command()
def verify(
    source: Annotated[str, typer.Argument(help="A model, or the original program.")],
    other: Annotated[
        str | None, typer.Argument(help="The rewritten program or a package of it.")
    ] = None,
    inputs: Inputs = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference allowed.")] = 1e-4,
    config: Options = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the original and the rewritten form on a typical call and compare them."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.sources import config_of
        from dsa_compile.commands.verification import verify as run

        run(out, source, other, inputs, tolerance, config_of(config))


@app.command()
def bench(
    positions: Annotated[
        list[int],
        typer.Option(min=9, help="Length of the context, more than a block; may be given again."),
    ] = [16384, 65536],  # noqa: B006
    rows: Annotated[int, typer.Option(min=1, help="Query rows.")] = 256,
    dtype: Annotated[list[str], typer.Option(help="May be given again.")] = ["float32"],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    form: Annotated[
        list[str], typer.Option(help="dense, compiled or optimized; may be given again.")
    ] = ["dense", "compiled", "optimized"],  # noqa: B006
    runs: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a consumer layer on this machine: dense, under torch.compile, and optimised."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.showing import bench as run
        from dsa_compile.commands.showing import cases_of

        run(out, cases_of(positions, rows, dtype, device, form, runs, threads), form)


@app.command()
def demo(
    positions: Annotated[
        int, typer.Option(min=9, help="Length of the context, more than a block.")
    ] = 65536,
    rows: Annotated[int, typer.Option(min=1, help="Query rows.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Optimise, verify and time a small two-level model on the CPU."""
    from dsa_compile.commands.output import reporting

    with reporting(json, debug) as out:
        from dsa_compile.commands.showing import cases_of
        from dsa_compile.commands.showing import demo as run

        (case,) = cases_of([positions], rows, ["float32"], "cpu", [], 2, threads)
        run(out, case)
