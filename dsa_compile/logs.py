"""Log lines and structured trace of a run of the passes.

The loggers lie below ``dsa_compile``, which ``TORCH_LOGS="+dsa_compile"`` and
``torch._logging.set_logs(modules={"dsa_compile": level})`` turn up: one line a selection at INFO,
the graph before the passes and after each one at DEBUG. Where PyTorch writes a structured trace
(``TORCH_TRACE``), the report goes into it as a JSON artifact, which tlparse lists.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import fx

from dsa_compile.passes.pipeline import Observer
from dsa_compile.passes.sites import Site

if TYPE_CHECKING:
    from dsa_compile.report import Report

log = logging.getLogger("dsa_compile.passes")


def site_line(site: Site) -> str:
    """One selection in one line: what it is, where, and what became of it."""
    size = f", {site.heads} x {site.head_dim}" if site.heads and site.head_dim else ""
    block = f", blocks of {site.block_size}" if site.block_size else ""
    kept = f", k = {site.k}" if site.k is not None else ""
    line = f"{site.where}: {site.kind} {site.status}{size}{block}{kept}"
    parts = [site.reason, site.counterexample, *site.notes]
    why = "; ".join(part for part in parts if part)
    return f"{line}: {why}" if why else line


def log_sites(report: Report) -> None:
    """One INFO line for each selection of a graph, or one that says that there is none."""
    for site in report.sites:
        log.info("%s", site_line(site))
    if not report.sites:
        log.info("a graph without a selection")
    for note in report.notes:
        log.info("%s", note)


def observer(graph_module: fx.GraphModule) -> Observer | None:
    """What writes the graphs at DEBUG, the captured one at once; None where nobody listens."""
    if not log.isEnabledFor(logging.DEBUG):
        return None

    def write(stage: str, module: fx.GraphModule) -> None:
        log.debug("graph after %s:\n%s", stage, readable(module))

    log.debug("graph before the passes:\n%s", readable(graph_module))
    return write


def readable(graph_module: fx.GraphModule) -> str:
    """The graph as Python code with shapes; plainer where it is too broken for that."""
    try:
        return graph_module.print_readable(print_output=False)
    except Exception:  # noqa: BLE001 - it is printed because something is wrong with it
        return str(graph_module.graph)


def trace_report(name: str, report: Report) -> None:
    """Leave a report in PyTorch's structured trace, if one is being written."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=report.to_json,
    )
