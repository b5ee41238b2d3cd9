"""How commands speak: results on stdout, as tables or JSON; progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from dsa_compile.errors import DsaError, ProviderError

FAILED, USAGE = 1, 2
"""Exit codes: a check of the command does not hold; the command could not be carried out."""


class Output:
    """Where a command's results go.

    Args:
        as_json: print one JSON document instead of tables.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._data: dict[str, Any] = {}

    def show(self, renderable: Any, **data: Any) -> None:
        """Print something, or add what it holds to the JSON document."""
        if self.as_json:
            self._data |= data
            return
        from rich.console import Console

        # Piped output has no width of its own: give the tables room.
        Console(width=None if sys.stdout.isatty() else 120).print(renderable, highlight=False)

    def finish(self) -> None:
        """Print the JSON document, if there is one."""
        if self.as_json and self._data:
            typer.echo(json.dumps(self._data, indent=2))
            self._data = {}

    def fail(self, message: str, **data: Any) -> NoReturn:
        """End with what does not hold, after the results."""
        self._data |= data
        self.finish()
        self._say(message, "check")
        raise typer.Exit(FAILED)

    def _say(self, message: str, kind: str, needs: tuple[Any, ...] = ()) -> None:
        if self.as_json:
            told: dict[str, Any] = {"kind": kind, "message": message}
            if needs:
                told["needs"] = [{"what": need.what, "mend": need.mend} for need in needs]
            typer.echo(json.dumps({"error": told}), err=True)
        else:
            typer.echo(f"error: {message}", err=True)

    @contextmanager
    def steps(self, total: int) -> Iterator[Any]:
        """A progress bar of ``total`` steps on a terminal; calling it names the next step."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=self.as_json or not console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=total)
            begun = False

            def step(name: str) -> None:
                nonlocal begun
                bar.update(task, description=name, advance=1 if begun else 0)
                begun = True

            yield step


@contextmanager
def reporting(as_json: bool, debug: bool) -> Iterator[Output]:
    """Runs a command: errors become one message and an exit code, unless ``debug`` is set."""
    out = Output(as_json)
    try:
        yield out
        out.finish()
    except typer.Exit:
        raise
    except Exception as fault:
        if debug:
            raise
        if isinstance(fault, DsaError):
            needs = fault.needs if isinstance(fault, ProviderError) else ()
            out._say(str(fault), type(fault).__name__, needs)
        else:
            first = (str(fault).strip().splitlines() or [""])[0]
            text = f"{type(fault).__name__}: {first}; --debug shows where"
            out._say(text, type(fault).__name__)
        raise typer.Exit(USAGE) from None
