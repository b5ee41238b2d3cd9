"""The graphs of one optimised or explained model, and the report on them."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from dsa_compile.config import Config
from dsa_compile.cost import crossover_on
from dsa_compile.errors import NoMatchError, NoMatchWarning, PassError
from dsa_compile.kernels.cpu import limit_working_set
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline
from dsa_compile.passes.sites import Site
from dsa_compile.report import Report
from dsa_compile.target import Target, choose_provider, device_of

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
        self.provider = choose_provider(config, model)
        self._crossover = crossover_on(Target.detect(device_of(model)), self.provider)
        self.rewrite = rewrite
        self.graphs: list[CapturedGraph] = []
        self.observer: Observer | None = None
        self.ran: set[int] = set()
        self._judged = 0
        self._options = MatchOptions(
            probe_memory_bytes=config.probe_memory_bytes,
            seed=config.probe_seed,
            draws=config.probe_draws,
        )

    def add(self, graph_module: fx.GraphModule) -> CapturedGraph:
        """Run the passes over one graph and keep it.

        Raises:
            PassError: a pass failed.
        """
        from torch.utils._python_dispatch import _disable_current_modes

        # Proofs run on real numbers, also while a compiler's fake tensors are in force.
        try:
            with _disable_current_modes(), torch.no_grad():
                result = run_pipeline(
                    graph_module,
                    options=self._options,
                    provider=self.provider,
                    crossover=self._crossover,
                )
        except Exception as fault:
            # Dynamo takes some exceptions for graph breaks and would go on without a word.
            raise PassError(f"a pass failed: {type(fault).__name__}: {fault}") from fault
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
            notes=notes,
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
        """Leave the graph's report in PyTorch's structured trace, if one is being written."""
        part = Report(
            graph.sites,
            graph.result.op_counts_before,
            graph.result.op_counts_after,
            self.provider,
            graphs=1,
        )
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"dsa_compile_{graph.index}", "encoding": "json"},
            payload_fn=part.to_json,
        )


def _caller_level() -> int:
    """Stack level of the nearest frame outside this package and PyTorch."""
    import sys

    level, frame = 1, sys._getframe(1)
    inside = ("dsa_compile", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
