"""The passes in their order, over one graph."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from dsa_compile.passes import (
    check_kernels,
    choose_dense,
    enter_adapters,
    expand_candidates,
    feed_quantised,
    fuse_remap,
    hoist_weight_casts,
    insert_graph_breaks,
    leave_adapters,
    match_indexer_q,
    match_indexers,
    match_k_cache,
    match_paged_keys,
    normalize_graph,
    quantise_operands,
    restore_stacks,
    select_kernels,
    share_candidates,
)
from dsa_compile.passes.adapter import Adapter
from dsa_compile.passes.context import Crossover, MatchOptions, PassContext, Recorder, StageError
from dsa_compile.passes.graph_tools import called_op, full_name
from dsa_compile.passes.sites import Site, SitePair

STAGES = (
    normalize_graph,
    restore_stacks,
    enter_adapters,
    match_indexers,
    leave_adapters,
    match_indexer_q,
    quantise_operands,
    expand_candidates,
    match_paged_keys,
    match_k_cache,
    share_candidates,
    hoist_weight_casts,
    select_kernels,
    feed_quantised,
    fuse_remap,
    check_kernels,
    choose_dense,
    insert_graph_breaks,
)

Observer = Callable[[str, fx.GraphModule], object]


@dataclass(frozen=True)
class PipelineResult:
    """What one run of the pipeline gave.

    Attributes:
        graph_module: the rewritten module; it shares parameters with the input.
        sites: every selection that was looked at.
        op_counts_before, op_counts_after: number of calls by op name.
        pairs: node names for comparing sites before and after.
        breaks: ops of the graph that no CUDA graph may capture, and why.
    """

    graph_module: fx.GraphModule
    sites: tuple[Site, ...]
    op_counts_before: dict[str, int]
    op_counts_after: dict[str, int]
    pairs: tuple[SitePair, ...]
    breaks: Mapping[str, str] = field(default_factory=dict)


def op_counts(graph_module: fx.GraphModule) -> dict[str, int]:
    """Number of calls of each op in a graph, by printed name."""
    calls = ((n, called_op(n)) for n in graph_module.graph.nodes if n.op == "call_function")
    names = (full_name(n) if op is n.target else str(op) for n, op in calls)
    return dict(sorted(Counter(names).items()))


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy as ``copy.deepcopy`` gives it, without its search of all arguments for sizes."""
    twin = fx.Graph(tracer_cls=graph._tracer_cls)
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = twin.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        # Each attribute that is set costs as much as making the node.
        new.args = fx.map_arg(node.args, made.__getitem__)
        if node.kwargs:
            new.kwargs = fx.map_arg(node.kwargs, made.__getitem__)
        new.meta.update(node.meta)
        made[node] = new
    twin.set_codegen(copy.deepcopy(graph._codegen))
    return twin


def run_pipeline(
    graph_module: fx.GraphModule,
    *,
    options: MatchOptions | None = None,
    provider: str = "cpu",
    crossover: Crossover | None = None,
    uncapturable: Mapping[str, str] | None = None,
    adapters: Mapping[str, Adapter] | None = None,
    precision: str = "preserve",
    observe: Observer | None = None,
) -> PipelineResult:
    """Match, rewrite and lower the indexers of a functional ATen graph.

    Args:
        graph_module: functional ATen graph whose nodes carry ``meta["val"]``; left unchanged.
        options: how indexers are proven.
        provider: ``"cpu"``, ``"reference"``, ``"triton"``, ``"deepgemm"`` or ``"deepselect"``.
        crossover: where the target begins to win by scoring candidates alone; None: always.
        uncapturable: ops that no CUDA graph may capture, and why, besides those that say so
            themselves.
        adapters: what is declared of opaque ops, by name with overload.
        precision: ``"preserve"``, or the format that queries and keys are quantised to.
        observe: called with each pass's name and the graph that it left.

    Raises:
        StageError: a pass raised, for instance on an unknown ``provider``.
    """
    # Python code of a graph is made when it is first called: engines that read the graph need none.
    done = _LazyGraphModule(graph_module, _copied(graph_module.graph))
    done.meta.update(graph_module.meta)
    context = PassContext(
        options or MatchOptions(),
        provider,
        Recorder(),
        crossover=crossover,
        uncapturable=uncapturable or {},
        adapters=adapters or {},
        precision=precision,
    )
    before = op_counts(graph_module)
    for stage in STAGES:
        name = stage.__name__.rpartition(".")[2]
        try:
            stage.run(done, context)
        except Exception as fault:
            raise StageError(name, fault, done) from fault
        if observe is not None:
            observe(name, done)
    done.graph.lint()
    done.recompile()
    recorder = context.recorder
    return PipelineResult(
        done,
        tuple(recorder.sites),
        before,
        op_counts(done),
        tuple(recorder.pairs),
        dict(recorder.breaks),
    )
