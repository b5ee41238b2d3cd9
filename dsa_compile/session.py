"""The graphs of one optimised or explained model, and the report on them."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx, nn

from dsa_compile.config import Config
from dsa_compile.errors import NoMatchError, NoMatchWarning
from dsa_compile.kernels.cpu import limit_working_set
from dsa_compile.logs import log_sites, trace_report
from dsa_compile.pass_runner import PassSettings, run_passes
from dsa_compile.passes.pipeline import PipelineResult
from dsa_compile.passes.sites import Site
from dsa_compile.report import Report

Observer = Callable[["CapturedGraph", tuple[Any, ...]], Any]


class CapturedGraph:
    """A captured graph with its rewritten form; calling it runs one of the two.

    Attributes:
        index: its number in the session, and the ``Site.graph`` of its sites.
        original: the graph as captured.
        result: what the passes made of it.
        sites: its part of the report.
    """

    def __init__(
        self, session: Session, index: int, original: fx.GraphModule, result: PipelineResult
    ) -> None:
        self.index = index
        self.original = original
        self.result = result
        self.sites = tuple(dataclasses.replace(site, graph=index) for site in result.sites)
        self._session = session

    def __call__(self, *inputs: Any) -> Any:
        session = self._session
        session.ran.add(self.index)
        with session.limits():
            if session.observer is not None:
                return session.observer(self, inputs)
            return (self.result.graph_module if session.rewrite else self.original)(*inputs)


class Session:
    """Runs the passes over each graph of a model as it is captured.

    Args:
        model: the module, for the choice of the provider.
        config: options.
        rewrite: run the rewritten graphs; otherwise only report on them.

    Raises:
        ProviderError: the configuration asks for what cannot be served here.
    """

    def __init__(self, model: nn.Module, config: Config, *, rewrite: bool = True) -> None:
        self.config = config
        self._settings = PassSettings.for_model(config, model)
        self.provider = self._settings.provider
        self._notes: tuple[str, ...] = ()
        self.rewrite = rewrite
        self.graphs: list[CapturedGraph] = []
        self.observer: Observer | None = None
        self.ran: set[int] = set()
        self._judged = 0

    def add(self, graph_module: fx.GraphModule) -> CapturedGraph:
        """Run the passes over one graph and keep it.

        Raises:
            PassError: a pass failed, and ``on_error`` is ``"raise"``.
        """
        run = run_passes(graph_module, self._settings)
        self._notes += run.notes
        result = run.result
        graph = CapturedGraph(self, len(self.graphs), graph_module, result)
        self.graphs.append(graph)
        self._trace(graph)
        return graph

    def limits(self) -> AbstractContextManager[None]:
        """What the kernels may hold while a graph runs."""
        size = self.config.chunk_bytes
        return nullcontext() if size is None else limit_working_set(size)

    def report(self, notes: tuple[str, ...] = ()) -> Report:
        """The report on every graph so far."""
        before: Counter[str] = Counter()
        after: Counter[str] = Counter()
        sites: list[Site] = []
        for graph in self.graphs:
            before.update(graph.result.op_counts_before)
            after.update(graph.result.op_counts_after)
            sites += graph.sites
        return Report(
            sites=tuple(sites),
            op_counts_before=dict(sorted(before.items())),
            op_counts_after=dict(sorted(after.items())),
            provider=self.provider,
            graphs=len(self.graphs),
            notes=(*notes, *self._notes),
        )

    def judge(self, graphs: set[int]) -> None:
        """Hold the graphs that make up one call against ``require_match``.

        Raises:
            NoMatchError: they hold fewer matched indexers than are required.
        """
        fresh, self._judged = len(self.graphs) - self._judged, len(self.graphs)
        needed = self.config.matches_needed
        if not fresh and not needed:
            return
        sites = tuple(s for i in sorted(graphs) for s in self.graphs[i].sites)
        part = Report(sites=sites, provider=self.provider, graphs=len(graphs))
        found = len(part.matched)
        if found < needed:
            raise NoMatchError(
                f"{found} indexers were matched and require_match={self.config.require_match} asks "
                f"for {needed}; {part.explain_miss()}"
            )
        if fresh and not found:
            warnings.warn(
                f"no indexer was matched, the model runs as it was; {part.explain_miss()}",
                NoMatchWarning,
                stacklevel=_caller_level(),
            )

    def _trace(self, graph: CapturedGraph) -> None:
        """Log the graph's report, and leave it in PyTorch's structured trace."""
        part = Report(
            graph.sites,
            graph.result.op_counts_before,
            graph.result.op_counts_after,
            self.provider,
            graphs=1,
        )
        log_sites(part)
        trace_report(f"dsa_compile_{graph.index}", part)


def _caller_level() -> int:
    """Stack level of the nearest frame outside this package and PyTorch."""
    import sys

    level, frame = 1, sys._getframe(1)
    inside = ("dsa_compile", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
