"""The command ``dsa-compile``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Compile DeepSeek Sparse Attention indexers in PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Compile DeepSeek Sparse Attention indexers in PyTorch models."""


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Look at this target, such as sm90, instead of the device found here."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can serve, and what is missing for the rest."""
    from dsa_compile.doctor import examine
    from dsa_compile.errors import DsaError

    try:
        found = examine(target)
    except DsaError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(found.to_json())
    else:
        from rich.console import Console

        Console().print(found)
