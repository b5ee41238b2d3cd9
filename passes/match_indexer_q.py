"""Match the query side of indexers: rotation, Hadamard, quantisation, head-weight scaling.

Proposed by structure, from a matched scorer back to the projections; accepted by behaviour; then
one ``dsa::fused_indexer_q`` in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.check_query_flow import check_query_flow
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.emit_query import FusedQuery, emit_query
from dsa_compile.passes.fit_query import QueryFitter, QueryForm
from dsa_compile.passes.graph_tools import (
    dtype_of,
    erase_unused,
    is_tensor,
    namespace,
    op_name,
    signature,
    value,
)
from dsa_compile.passes.note_sites import add_note
from dsa_compile.passes.prove_query import QueryProver
from dsa_compile.passes.run_probe import memory
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_query import QueryTrace, trace_query

log = logging.getLogger("dsa_compile")

SCORERS = frozenset({"indexer_select", "indexer_publish", "indexer_block_max"})


@dataclass
class _Known:
    """What the calls of one graph share.

    Attributes:
        forms: of equal stretches, or why there is none.
        fused: what replaced a pair of operands.
    """

    forms: dict[Hashable, QueryForm | Refusal] = field(default_factory=dict)
    fused: dict[tuple[fx.Node, fx.Node], FusedQuery | Refusal | None] = field(default_factory=dict)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Fuse the query side of every matched indexer; needs ``match_indexers``.

    A query side that is left as it is says why in the notes of its site.
    """
    graph = graph_module.graph
    calls = [n for n in graph.nodes if namespace(n) == "dsa" and op_name(n) in SCORERS]
    known = _Known()
    old: list[fx.Node] = []
    for call in calls:
        pair = (call.args[0], call.args[2])
        assert isinstance(pair[0], fx.Node) and isinstance(pair[1], fx.Node)
        if pair not in known.fused:
            known.fused[pair] = _look_at(graph, call, pair, context, known)
        found = known.fused[pair]
        if isinstance(found, Refusal):
            why = (
                f"{found.reason} ({found.counterexample})" if found.counterexample else found.reason
            )
            add_note(call, f"the query side is left as it is: {why}", context.recorder)
        elif found is not None:
            call.args = (found.query, call.args[1], found.weights, *call.args[3:])
            add_note(call, f"the query side is one op: {found.op.meta[_STAGES]}", context.recorder)
            old += pair
    erase_unused(graph, old)
    return PassResult(graph_module, bool(old))


_STAGES = "dsa_stages"


def _look_at(
    graph: fx.Graph,
    call: fx.Node,
    pair: tuple[fx.Node, fx.Node],
    context: PassContext,
    known: _Known,
) -> FusedQuery | Refusal | None:
    count = len(context.emission.added)
    try:
        trace = trace_query(*pair, context.binder, _positions(call))
        return None if trace is None else _match(graph, call, trace, context, known)
    except Refusal as refusal:
        context.emission.erase_since(count)
        return refusal
    except Exception as error:  # noqa: BLE001 - a fault in here must cost a fusion, never a model
        context.emission.erase_since(count)
        log.warning("a query side was left as it was: an unforeseen error", exc_info=error)
        first = (str(error).splitlines() or ["no message"])[0]
        return Refusal(f"unforeseen {type(error).__name__} while matching: {first}", 2)


def _match(
    graph: fx.Graph, call: fx.Node, trace: QueryTrace, context: PassContext, known: _Known
) -> FusedQuery:
    wide = [n for n in (trace.root, trace.query, trace.weights) if dtype_of(n) == torch.float64]
    if wide:
        raise Refusal("its query side computes in fp64", 5)
    leaves = set(trace.leaves)
    key = signature(trace.part, lambda n: n in leaves)
    emit = Emitter(graph, call.prev, context.emission)
    if key in known.forms:
        form = known.forms[key]
        if isinstance(form, Refusal):
            raise form
        return _emitted(emit, trace, form)
    try:
        bound = _bindings(trace, _positions(call), context)
        provers = [QueryProver(trace, b, context.options.seed + 2) for b in bound]
        form = QueryFitter(trace, provers[0].draw("ordinary numbers"), bound[0]).fit()
        check_query_flow(trace)
        fused = _emitted(emit, trace, form)
        for prover in provers:
            prover.check(fused, form, context.options.draws)
    except Refusal as refusal:
        known.forms[key] = refusal
        raise
    known.forms[key] = form
    return fused


def _emitted(emit: Emitter, trace: QueryTrace, form: QueryForm) -> FusedQuery:
    fused = emit_query(emit, trace, form)
    fused.op.meta[_STAGES] = form.describe()
    return fused


def _positions(call: fx.Node) -> Any:
    """Number of keys of a scorer: models bound it, and angles may begin where a cache ends."""
    return value(call.args[1]).shape[1]


def _bindings(trace: QueryTrace, positions: Any, context: PassContext) -> list[Binding]:
    nodes = [n for n in trace.part if is_tensor(n) or isinstance(value(n), torch.SymInt)]
    found = context.binder.bindings(nodes, trace.query, positions=positions)
    if not found:
        raise Refusal("no small sizes satisfy the guards of the graph", 5)
    size = memory(nodes, found[0])
    if size > context.options.probe_memory_bytes:
        raise Refusal(
            f"its static sizes need {size / 2**30:.1f} GiB to probe its query side, more than the "
            f"budget of {context.options.probe_memory_bytes / 2**30:.1f} GiB",
            5,
        )
    return found
