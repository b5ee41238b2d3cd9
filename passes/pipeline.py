"""The passes in their order, over one graph."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from dsa_compile.passes import (
    choose_dense,
    expand_candidates,
    fuse_remap,
    match_indexers,
    normalize_graph,
    select_kernels,
    share_candidates,
)
from dsa_compile.passes.context import Crossover, MatchOptions, PassContext, Recorder
from dsa_compile.passes.sites import Site, SitePair

STAGES = (
    normalize_graph,
    match_indexers,
    expand_candidates,
    share_candidates,
    select_kernels,
    fuse_remap,
    choose_dense,
)


@dataclass(frozen=True)
class PipelineResult:
    """What one run of the pipeline gave.

    Attributes:
        graph_module: the rewritten module; it shares parameters with the input.
        sites: every selection that was looked at.
        op_counts_before, op_counts_after: number of calls by op name.
        pairs: node names for comparing sites before and after.
    """

    graph_module: fx.GraphModule
    sites: tuple[Site, ...]
    op_counts_before: dict[str, int]
    op_counts_after: dict[str, int]
    pairs: tuple[SitePair, ...]


def op_counts(graph_module: fx.GraphModule) -> dict[str, int]:
    """Number of calls of each op in a graph, by printed name."""
    calls = (n for n in graph_module.graph.nodes if n.op == "call_function")
    return dict(sorted(Counter(str(n.target) for n in calls).items()))


def run_pipeline(
    graph_module: fx.GraphModule,
    *,
    options: MatchOptions | None = None,
    provider: str = "cpu",
    crossover: Crossover | None = None,
) -> PipelineResult:
    """Match, rewrite and lower the indexers of a functional ATen graph.

    Args:
        graph_module: functional ATen graph whose nodes carry ``meta["val"]``; left unchanged.
        options: how indexers are proven.
        provider: ``"cpu"``, ``"reference"`` or ``"triton"``.
        crossover: where the target begins to win by scoring candidates alone; None: always.

    Raises:
        ValueError: ``provider`` is not known.
    """
    # Python code of a graph is made when it is first called: engines that read the graph need none.
    done = _LazyGraphModule(graph_module, copy.deepcopy(graph_module.graph))
    done.meta.update(graph_module.meta)
    context = PassContext(options or MatchOptions(), provider, Recorder(), crossover=crossover)
    before = op_counts(graph_module)
    for stage in STAGES:
        stage.run(done, context)
    done.graph.lint()
    done.recompile()
    recorder = context.recorder
    return PipelineResult(
        done, tuple(recorder.sites), before, op_counts(done), tuple(recorder.pairs)
    )
