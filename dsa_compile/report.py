"""What was looked at in a model, what became of it, and why."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsa_compile.passes.sites import Site

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

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
            if self.sites:
                return "every selection was matched"
            where = "no graph was captured" if not self.graphs else "no top-k or sort was found"
            return f"there is no near miss: {where}"
        text = f"nearest miss: {miss.where}: {miss.reason or 'not recognised'}"
        return f"{text} ({miss.counterexample})" if miss.counterexample else text

    def op_changes(self) -> dict[str, tuple[int, int]]:
        """Calls before and after, of the ops whose number changed; no plain Python functions."""
        every = {*self.op_counts_before, *self.op_counts_after}
        names = sorted(name for name in every if not name.startswith("<"))
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
        from rich.text import Text

        yield Text(self.summary(), style="bold")
        if self.sites:
            table = plain_table(TABLE, folded=("where",), numeric=NUMERIC)
            for site, cells in rows(self.sites, TABLE):
                table.add_row(*map(Text, cells), style="" if site.status == "kept" else "green")
            yield table
        for line in remarks(self.sites):
            yield Text(line)
        if changes := self.op_changes():
            table = plain_table(("op", "before", "after"), ("op",), numeric=("before", "after"))
            for name, pair in changes.items():
                table.add_row(Text(name), *map(str, pair))
            yield table
        if not self.matched:
            yield Text(self.explain_miss())
        for note in self.notes:
            yield Text(f"note: {note}")


# What a narrow terminal has room for; everything that a page shows.
TABLE = ("graph", "sites", "where", "kind", "status", "heads x dim", "block", "k")
COLUMNS = (*TABLE, "provider", "why")
NUMERIC = ("graph", "sites", "heads x dim", "block", "k")


def rows(sites: Iterable[Site], columns: Iterable[str]) -> list[tuple[Site, tuple[str, ...]]]:
    """Rows of the given columns; layers that are alike are counted in one row."""
    alike: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        cells = _cells(site)
        alike.setdefault(tuple(cells.get(column, "") for column in columns), []).append(site)
    at = list(columns).index("sites")
    return [
        (group[0], (*key[:at], str(len(group)), *key[at + 1 :])) for key, group in alike.items()
    ]


def remarks(sites: Iterable[Site]) -> list[str]:
    """Reasons, counterexamples and notes, each with the places that they are about."""
    places: dict[str, dict[str, None]] = {}
    for site in sites:
        if why := _cells(site)["why"]:
            places.setdefault(why, {})[short_place(site.where)] = None
    return [f"{', '.join(where)}: {why}" for why, where in places.items()]


def short_place(where: str) -> str:
    """``where`` without the folders."""
    return where.rpartition("/")[2]


def _cells(site: Site) -> dict[str, str]:
    why = [site.reason, site.counterexample, *site.notes]
    return {
        "graph": str(site.graph),
        "where": short_place(site.where),
        "kind": site.kind,
        "status": site.status,
        "heads x dim": f"{site.heads} x {site.head_dim}" if site.heads and site.head_dim else "-",
        "block": _cell(site.block_size),
        "k": _cell(site.k),
        "provider": _cell(site.provider),
        "why": "; ".join(part for part in why if part),
    }


def plain_table(columns: Iterable[str], folded: Iterable[str], numeric: Iterable[str]) -> Table:
    """An empty table whose folded columns give way where the console is narrow."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numeric else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in folded)
    return table


def render(renderable: Any) -> str:
    """Plain text of anything ``rich`` can print."""
    from rich.console import Console

    buffer = io.StringIO()
    width = max(80, shutil.get_terminal_size((WIDTH, 24)).columns)
    Console(file=buffer, width=width, color_system=None, legacy_windows=False).print(renderable)
    return buffer.getvalue().rstrip("\n")


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
