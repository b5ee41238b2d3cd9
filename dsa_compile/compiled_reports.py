"""Reports on what ``torch.compile(backend="dsa")`` compiled in this process."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from dsa_compile.report import Report


@dataclass(frozen=True)
class _Entry:
    report: Report
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    @property
    def alive(self) -> bool:
        return not self.tensors or any(t() is not None for t in self.tensors)

    @property
    def key(self) -> tuple[Report, list[int]]:
        return self.report, [id(t()) for t in self.tensors]


# Goes with the tensors of the models, and with a reset of Dynamo. Dynamo itself may drop and make
# again what it compiled at any call, so that its graphs are no measure of a report's life.
_entries: list[_Entry] = []
_lock = threading.Lock()


def merged(reports: Sequence[Report]) -> Report:
    """One report on several graphs, which are numbered in their order."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    sites = []
    notes: dict[str, None] = {}
    graphs = 0
    for report in reports:
        before.update(report.op_counts_before)
        after.update(report.op_counts_after)
        sites += [dataclasses.replace(s, graph=s.graph + graphs) for s in report.sites]
        notes.update(dict.fromkeys(report.notes))
        graphs += report.graphs
    providers = sorted({report.provider for report in reports if report.graphs})
    return Report(
        tuple(sites),
        dict(sorted(before.items())),
        dict(sorted(after.items())),
        ", ".join(providers) or Report().provider,
        graphs,
        tuple(notes),
    )


def remember(report: Report, graph_module: fx.GraphModule) -> None:
    """Keep the report on a graph of Dynamo; a graph that is compiled again counts once."""
    entry = _Entry(report, tuple(weakref.ref(t) for t in _tensors(graph_module)))
    with _lock:
        _entries[:] = [e for e in _entries if e.alive]
        if all(entry.key != e.key for e in _entries):
            _entries.append(entry)


def forget() -> None:
    """Drop all reports; ``torch._dynamo.reset`` does so too."""
    with _lock:
        _entries.clear()


def compiled_report(model: nn.Module | None = None) -> Report:
    """The report on the graphs that ``torch.compile(backend="dsa")`` compiled.

    Args:
        model: the module that was compiled, before or after ``torch.compile``: the graphs that
            read one of its parameters or buffers count. None: all graphs of the process.

    Returns:
        A report on the graphs in the order of their compilation; it has none where nothing was
        compiled yet, or Dynamo was reset.
    """
    with _lock:
        entries = [e for e in _entries if e.alive]
    if model is not None:
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        entries = [e for e in entries if any(id(t()) in own for t in e.tensors)]
    return merged([entry.report for entry in entries])


def _tensors(graph_module: fx.GraphModule) -> Iterable[torch.Tensor]:
    """The real tensors that a graph of Dynamo was captured with, inputs included."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        held = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(held, torch.Tensor):
            yield held
    yield from graph_module.parameters()
    yield from graph_module.buffers()
