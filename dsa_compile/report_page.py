"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dsa_compile.report import COLUMNS, NUMERIC, Report, rows

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em; color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #d5d5d5; padding: .3em .8em; text-align: left;
         vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.rewritten td.status { color: #11702b; font-weight: 600; }
tr.fused td.status { color: #1d5fa8; font-weight: 600; }
tr.kept td.status { color: #8a5200; }
td.where, td.op { font-family: ui-monospace, monospace; }
"""

_NUMBERS = (*NUMERIC, "before", "after")


def page(report: Report) -> str:
    """The page's text."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>dsa_compile report</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>dsa_compile report</h1>",
        f"<p>{escape(report.summary())}</p>",
    ]
    if report.sites:
        cells = [(site.status, row) for site, row in rows(report.sites, COLUMNS)]
        parts += ["<h2>Selections</h2>", _table(COLUMNS, cells)]
    if not report.matched:
        parts.append(f"<p>{escape(report.explain_miss())}</p>")
    if changes := report.op_changes():
        counts = [("", (op, str(b), str(a))) for op, (b, a) in changes.items()]
        parts += ["<h2>Ops that changed</h2>", _table(("op", "before", "after"), counts)]
    if report.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts += ["<h2>Notes</h2>", f"<ul>{items}</ul>"]
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _table(columns: Iterable[str], lines_of: Iterable[tuple[str, Iterable[str]]]) -> str:
    columns = tuple(columns)
    classes = ["number" if c in _NUMBERS else c for c in columns]
    lines = ["<table>", "<tr>"]
    lines += [
        f'<th class="{kind}">{escape(column)}</th>'
        for kind, column in zip(classes, columns, strict=True)
    ]
    lines.append("</tr>")
    for status, cells in lines_of:
        lines.append(f'<tr class="{escape(status)}">')
        lines += [
            f'<td class="{kind}">{escape(cell)}</td>'
            for kind, cell in zip(classes, cells, strict=True)
        ]
        lines.append("</tr>")
    lines.append("</table>")
    return "\n".join(lines)
