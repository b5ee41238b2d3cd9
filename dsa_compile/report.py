"""What was looked at in a model, what became of it, and why."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsa_compile.passes.sites import Site

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDTH = 120


@dataclass(frozen=True)
class Report:
    """Every selection of the captured graphs, with the op counts around the rewrite.

    Prints as a table, in ``rich`` consoles too.

    Attributes:
        sites: one entry a selection; ``Site.graph`` numbers the captured graph it belongs to.
        op_counts_before, op_counts_after: calls by op name, over all captured graphs.
        provider: whose kernels the rewritten graphs call.
        graphs: number of captured graphs. A model compiled at its first call gets more of them
            when it is called in another way, for instance for its first decoding step.
        notes: what the capture could not do, in words.
    """

    sites: tuple[Site, ...] = ()
    op_counts_before: Mapping[str, int] = field(default_factory=dict)
    op_counts_after: Mapping[str, int] = field(default_factory=dict)
    provider: str = "cpu"
    graphs: int = 0
    notes: tuple[str, ...] = ()

    @property
    def matched(self) -> tuple[Site, ...]:
        """The sites that were rewritten or fused."""
        return tuple(site for site in self.sites if site.status != "kept")

    @property
    def nearest_miss(self) -> Site | None:
        """The kept site whose recognition got furthest."""
        kept = [site for site in self.sites if site.status == "kept"]
        return max(kept, key=lambda site: site.progress, default=None)

    def summary(self) -> str:
        """One line: how many selections there are, and what became of them."""
        counts = {status: 0 for status in ("rewritten", "fused", "kept")}
        for site in self.sites:
            counts[site.status] = counts.get(site.status, 0) + 1
        parts = ", ".join(f"{number} {status}" for status, number in counts.items())
        return (
            f"{_count(len(self.sites), 'selection')} in {_count(self.graphs, 'graph')}: {parts} "
            f"(provider {self.provider})"
        )

    def explain_miss(self) -> str:
        """The nearest miss in words."""
        miss = self.nearest_miss
        if miss is None:
            where = "no graph was captured" if not self.graphs else "no top-k or sort was found"
            return f"there is no near miss: {where}"
        text = f"nearest miss: {miss.where}: {miss.reason or 'not recognised'}"
        return f"{text} ({miss.counterexample})" if miss.counterexample else text

    def op_changes(self) -> dict[str, tuple[int, int]]:
        """Calls before and after, of the ops whose number changed."""
        names = sorted({*self.op_counts_before, *self.op_counts_after})
        pairs = {
            n: (self.op_counts_before.get(n, 0), self.op_counts_after.get(n, 0)) for n in names
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        sites = [dataclasses.asdict(site) for site in self.sites]
        for site in sites:
            site["notes"] = list(site["notes"])
        return {
            "provider": self.provider,
            "graphs": self.graphs,
            "sites": sites,
            "op_counts_before": dict(self.op_counts_before),
            "op_counts_after": dict(self.op_counts_after),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that ``to_dict`` gave.

        Raises:
            KeyError: a part is missing.
            TypeError: a site has an unknown field.
        """
        sites = tuple(Site(**{**site, "notes": tuple(site["notes"])}) for site in data["sites"])
        return cls(
            sites=sites,
            op_counts_before=dict(data["op_counts_before"]),
            op_counts_after=dict(data["op_counts_after"]),
            provider=data["provider"],
            graphs=data["graphs"],
            notes=tuple(data["notes"]),
        )

    def to_json(self, path: str | Path | None = None, *, indent: int | None = 2) -> str:
        """The report as JSON text, also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``to_json`` gave."""
        return cls.from_dict(json.loads(text))

    def html(self, path: str | Path | None = None) -> str:
        """One self-contained page, also written to ``path`` if given."""
        from dsa_compile.report_page import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.summary(), style="bold")
        if self.sites:
            table = Table(show_lines=False, pad_edge=False)
            for column in COLUMNS:
                justify: Literal["left", "right"] = "right" if column in NUMERIC else "left"
                table.add_column(column, justify=justify, overflow="fold")
            for site, cells in rows(self.sites):
                style = "" if site.status == "kept" else "green"
                table.add_row(*map(Text, cells), style=style)
            yield table
        if changes := self.op_changes():
            table = Table(pad_edge=False)
            table.add_column("op", overflow="fold")
            table.add_column("before", justify="right")
            table.add_column("after", justify="right")
            for name, (before, after) in changes.items():
                table.add_row(Text(name), str(before), str(after))
            yield table
        if not self.matched:
            yield Text(self.explain_miss())
        for note in self.notes:
            yield Text(f"note: {note}")


COLUMNS = (
    "graph", "sites", "where", "kind", "status", "heads x dim", "block", "k", "provider", "why"
)  # fmt: skip
NUMERIC = frozenset({"graph", "sites", "heads x dim", "block", "k"})


def rows(sites: Iterable[Site]) -> list[tuple[Site, tuple[str, ...]]]:
    """Table rows in the order of ``COLUMNS``, layers that are alike counted in one row."""
    numbers = Counter(sites)
    return [(site, _row(site, number)) for site, number in numbers.items()]


def short_place(where: str) -> str:
    """``where`` without the folders that all places share: installed packages, the current one."""
    for marker in ("site-packages/", f"{os.getcwd()}/"):
        _, found, rest = where.partition(marker)
        if found:
            return rest
    return where


def _row(site: Site, number: int) -> tuple[str, ...]:
    shape = f"{site.heads} x {site.head_dim}" if site.heads and site.head_dim else "-"
    why = [site.reason, site.counterexample, *site.notes]
    return (
        str(site.graph),
        str(number),
        short_place(site.where),
        site.kind,
        site.status,
        shape,
        _cell(site.block_size),
        _cell(site.k),
        _cell(site.provider),
        "; ".join(part for part in why if part),
    )


def render(renderable: Any) -> str:
    """Plain text of anything ``rich`` can print."""
    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return buffer.getvalue().rstrip("\n")


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
