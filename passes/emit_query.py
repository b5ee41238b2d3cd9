"""Put ``dsa::fused_indexer_q`` between projections and a scorer."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.fit_query import QueryForm
from dsa_compile.passes.graph_tools import aten, dtype_of, is_tensor, same_size, value
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_query import QueryTrace
from dsa_compile.passes.widen_values import widen_fp8, widen_mxfp4

FUSED = torch.ops.dsa.fused_indexer_q.default
_DEFAULTS = {a.name: a.default_value for a in FUSED._schema.arguments if a.has_default_value()}


@dataclass(frozen=True)
class FusedQuery:
    """The op, its results, and what takes the place of the scorer's operands."""

    op: fx.Node
    query: fx.Node
    weights: fx.Node


def fused_call(emit: Emitter, q: fx.Node, weights: fx.Node, **options: Any) -> fx.Node:
    """A call of the op; options that have their default are left out."""
    given = {k: v for k, v in options.items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
    return emit(FUSED, q, weights, **given)


def results_of(
    emit: Emitter, op: fx.Node, quant: str, lead: list[fx.Node | int], dtype: torch.dtype
) -> tuple[fx.Node, fx.Node]:
    """Queries as numbers of ``dtype`` (fp8 without its scale), and fp32 head weights."""
    query = emit(operator.getitem, op, 0)
    if quant == "fp8":
        query = widen_fp8(emit, query, dtype)
    elif quant == "mxfp4":
        query = widen_mxfp4(emit, query, emit(operator.getitem, op, 1), lead, dtype)
    return query, emit(operator.getitem, op, 2)


def emit_query(emit: Emitter, trace: QueryTrace, form: QueryForm) -> FusedQuery:
    """Emit what computes a scorer's operands from the projections."""
    sizes = [_size(emit, trace, dim) for dim in range(4)]
    root = _shaped(emit, trace.root, sizes, value(trace.query).shape)
    if form.wide:
        root = emit(aten._to_copy.default, root, dtype=torch.float32)
    raw = trace.weight_roots[form.weight_root]
    weights = _shaped(emit, raw, sizes[:3], value(trace.weights).shape)
    options: dict[str, Any] = {}
    if form.angles is not None:
        for name, angles in zip(("cos", "sin"), form.angles, strict=True):
            side = trace.sides[angles.side]
            width = value(side).shape[-1]
            options[name] = angles.arrange(emit, side, sizes[:2], width)
        options |= {"rope": form.rope, "rope_start": form.start}
    if form.quant == "fp8":
        options |= {"pow2_scale": form.pow2, "floor": form.floor}
        options["fold_scale"] = form.fold or not form.codes
    op = fused_call(
        emit,
        root,
        weights,
        **options,
        hadamard=form.hadamard,
        quant=form.quant,
        softmax_scale=form.scales[0],
        head_scale=form.scales[1],
    )
    query, scaled = results_of(emit, op, form.quant, sizes[:3], dtype_of(trace.query))
    if dtype_of(query) != dtype_of(trace.query):
        query = emit(aten._to_copy.default, query, dtype=dtype_of(trace.query))
    # Weights that got the q scale only here were never rounded with it in them.
    moved = form.quant == "fp8" and not form.codes
    if not moved and dtype_of(scaled) != dtype_of(trace.weights):
        scaled = emit(aten._to_copy.default, scaled, dtype=dtype_of(trace.weights))
    return FusedQuery(op, query, scaled)


def _size(emit: Emitter, trace: QueryTrace, dim: int) -> fx.Node | int:
    """A size of the query, read off what stays in the graph."""
    extent = value(trace.query).shape[dim]
    if isinstance(extent, int):
        return extent
    known = value_nodes(emit, extent)
    if known is not None:
        return known
    for node in trace.leaves:
        if not is_tensor(node):
            continue
        for at, other in enumerate(value(node).shape):
            if same_size(extent, other):
                return emit.size(node, at)
    raise Refusal("a size of the queries cannot be read off any tensor", 5)


def value_nodes(emit: Emitter, extent: torch.SymInt) -> fx.Node | None:
    """A node above that holds a size."""
    for node in emit.graph.nodes:
        if node is emit.after:
            return None
        held = value(node)
        if isinstance(held, torch.SymInt) and held.node.expr == extent.node.expr:
            return node
    return None


def _shaped(emit: Emitter, node: fx.Node, sizes: list[Any], shape: Any) -> fx.Node:
    have = value(node).shape
    if len(have) == len(shape) and all(map(same_size, have, shape)):
        return node
    return emit(aten.reshape.default, node, sizes)
