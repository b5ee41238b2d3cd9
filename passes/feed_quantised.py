"""Hand scorers quantised values instead of the numbers that they stand for."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.kernels.providers import reads_fp8
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import erase_unused, namespace, op_name
from dsa_compile.passes.match_indexer_q import SCORERS
from dsa_compile.passes.widen_values import fp8_of, packed_of

_SPARSE = "sparse_mqa_logits"
_PACKED = "mxfp4_sparse_mqa_logits"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Drop the widening of fp8 and MXFP4 operands where the provider reads them as stored.

    Widening is exact, so no score changes. Needs ``select_kernels``. A product of fp8 numbers and
    others stays as it is, and so do packed keys under a mask or a bias.
    """
    graph = graph_module.graph
    old: list[fx.Node] = []
    for node in list(graph.nodes):
        name = op_name(node)
        if not namespace(node).startswith("dsa") or name not in SCORERS | {_SPARSE}:
            continue
        query, key = node.args[:2]
        codes = fp8_of(query), fp8_of(key)
        if codes[0] is not None and codes[1] is not None and reads_fp8(context.provider):
            node.args = (*codes, *node.args[2:])
        elif name != _SPARSE or not _pack(graph, node, context):
            continue
        old += [n for n in (node, query, key) if isinstance(n, fx.Node)]
    erase_unused(graph, old)
    return PassResult(graph_module, bool(old))


def _pack(graph: fx.Graph, node: fx.Node, context: PassContext) -> bool:
    """Replace a sparse scorer by that of packed keys."""
    library = getattr(torch.ops, namespace(node))
    query, key, weights, blocks, end = node.args
    packed = packed_of(key)
    plain = all(node.kwargs.get(name) is None for name in ("mask", "bias", "key_scale"))
    if packed is None or not plain or not hasattr(library, _PACKED):
        return False
    own = packed_of(query)
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("mask", "bias", "key_scale")}
    if own is not None:
        query, kwargs["q_scale"] = own
    emit = Emitter(graph, node.prev, context.emission)
    new = emit(getattr(library, _PACKED).default, query, *packed, weights, blocks, end, **kwargs)
    node.replace_all_uses_with(new)
    return True
