"""Quantise queries and keys of matched indexers, where fp8 or MXFP4 was asked for by name."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.quantise import GROUP
from dsa_compile.kernels.serving_validate import MAX_FP8_DIM
from dsa_compile.passes.context import PassContext, PassResult, UnservedError
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.emit_query import fused_call, results_of
from dsa_compile.passes.graph_tools import (
    aten,
    dtype_of,
    erase_unused,
    namespace,
    op_name,
    value,
)
from dsa_compile.passes.match_indexer_q import SCORERS
from dsa_compile.passes.note_sites import add_note, sites_of
from dsa_compile.passes.widen_values import fp8_of, packed_of, widen_fp8, widen_mxfp4

_PRESERVE = "preserve"
Keys = tuple[fx.Node, fx.Node | None]


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Quantise what every matched indexer multiplies; needs ``match_indexer_q``.

    Queries are quantised by ``dsa::fused_indexer_q``, which takes their fp8 scale into the head
    weights; keys by ``dsa::indexer_k_quant``, once for all that read the same ones, their fp8 scale
    on the scores. The ops between still name numbers: ``feed_quantised`` hands scorers the
    quantised values themselves.

    Raises:
        UnservedError: the head dim of an indexer does not fit the format; names each one.
    """
    precision = context.precision
    if precision == _PRESERVE:
        return PassResult(graph_module, False)
    graph = graph_module.graph
    calls = [n for n in graph.nodes if namespace(n) == "dsa" and op_name(n) in SCORERS]
    _check(calls, context)
    keys: dict[fx.Node, Keys] = {}
    old: list[fx.Node] = []
    for call in calls:
        query, key, weights = call.args[:3]
        assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
        assert isinstance(weights, fx.Node)
        emit = Emitter(graph, call.prev, context.emission)
        if key not in keys:
            keys[key] = _keys(emit, key, precision)
        new_key, key_scale = keys[key]
        new_query, new_weights = _queries(emit, query, weights, precision)
        kwargs = dict(call.kwargs)
        given: Any = kwargs.get("key_scale")
        if key_scale is not None:
            both = key_scale if given is None else emit(aten.mul.Tensor, key_scale, given)
            kwargs["key_scale"] = both
        call.args, call.kwargs = (new_query, new_key, new_weights), kwargs
        old += [query, key, weights]
        name = {"fp8": "fp8", "mxfp4": "MXFP4"}[precision]
        text = f"queries and keys are quantised to {name}, as precision={precision!r} asks"
        add_note(call, text, context.recorder)
    erase_unused(graph, old)
    return PassResult(graph_module, bool(calls))


def _check(calls: list[fx.Node], context: PassContext) -> None:
    bad: dict[str, None] = {}
    for call in calls:
        dim = value(call.args[0]).shape[-1]
        fits = isinstance(dim, int) and (
            dim % GROUP == 0
            if context.precision == "mxfp4"
            else dim <= MAX_FP8_DIM and dim % 4 == 0
        )
        if not fits:
            sites = [context.recorder.sites[at].where for at in sites_of(call, context.recorder)]
            where = ", ".join(sites) or call.name
            bad[f"the indexer at {where} has a head dim of {dim}"] = None
    if not bad:
        return
    wants = (
        f"MXFP4 needs a multiple of {GROUP}"
        if context.precision == "mxfp4"
        else f"fp8 needs a multiple of 4 up to {MAX_FP8_DIM}"
    )
    raise UnservedError([(f"{what}, and {wants}", "ask for precision='preserve'") for what in bad])


def _queries(
    emit: Emitter, query: fx.Node, weights: fx.Node, precision: str
) -> tuple[fx.Node, fx.Node]:
    """Quantised queries as numbers, and weights with their scale."""
    if fp8_of(query) is not None or packed_of(query) is not None:
        # The model's own rounding stays.
        return query, weights
    source, raw, options = query, weights, {}
    if _plain_result(query, 0) and _plain_result(weights, 2) and query.args[0] is weights.args[0]:
        op: Any = query.args[0]
        if op.kwargs.get("quant", "none") == "none":
            source, raw = op.args[:2]
            options = dict(op.kwargs)
    op = fused_call(emit, source, raw, **{**options, "quant": precision})
    lead = [emit.size(source, dim) for dim in range(3)]
    return results_of(emit, op, precision, lead, _wide(query, precision))


def _plain_result(node: fx.Node, at: int) -> bool:
    if op_name(node) != "getitem" or op_name(node.args[0]) != "fused_indexer_q":
        return False
    return node.args[1:] == (at,)


def _keys(emit: Emitter, key: fx.Node, precision: str) -> Keys:
    """Quantised keys [B|1, T, D] as numbers, and their scales [B|1, T] (None: inside)."""
    if fp8_of(key) is not None or packed_of(key) is not None:
        return key, None
    lead = [emit.size(key, 0), emit.size(key, 1)]
    dim = value(key).shape[-1]
    flat = emit(aten.reshape.default, key, [-1, dim])
    op = emit(torch.ops.dsa.indexer_k_quant.default, flat, quant=precision)
    values, scales = (emit(operator.getitem, op, at) for at in (0, 1))
    width = dim if precision == "fp8" else dim // 2
    values = emit(aten.reshape.default, values, [*lead, width])
    if precision == "fp8":
        scales = emit(aten.reshape.default, scales, lead)
        return widen_fp8(emit, values, _wide(key, precision)), scales
    scales = emit(aten.reshape.default, scales, [*lead, dim // GROUP])
    return widen_mxfp4(emit, values, scales, lead, _wide(key, precision)), None


def _wide(node: fx.Node, precision: str) -> torch.dtype:
    """A dtype that holds the quantised numbers exactly, the model's own if it does."""
    low = torch.bfloat16
    return low if precision == "mxfp4" or dtype_of(node) == low else torch.float32
