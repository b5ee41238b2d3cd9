"""Bring a captured graph into a plain functional form; nothing in here knows about indexers."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import aten, is_size, op_name, value

_FILLS = {
    "zeros_like": 0,
    "ones_like": 1,
    "new_zeros": 0,
    "new_ones": 1,
    "full_like": None,
    "new_full": None,
}
_ASSERTS = frozenset({"_assert_tensor_metadata"})


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Drop metadata asserts and no-op clones, free fills from the tensors whose shape they copy.

    ``full_like(x)`` and ``sym_size(x)`` keep ``x`` alive for its shape alone; a fill by explicit
    sizes does not, so that a large ``x`` can be removed when nothing else reads it.
    """
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        if op_name(node) in _ASSERTS:
            graph.erase_node(node)
            changed = True
    changed |= _detach_shapes(graph)
    _hoist_sizes(graph)
    graph.eliminate_dead_code()
    return PassResult(graph_module, changed)


def _detach_shapes(graph: fx.Graph) -> bool:
    """Take every size from the earliest tensor that has it, and every fill from sizes."""
    known: dict[Any, fx.Node] = {}
    carriers: dict[Any, tuple[fx.Node, int]] = {}
    changed = False
    for node in list(graph.nodes):
        recorded = value(node)
        if isinstance(recorded, torch.SymInt):
            expr = recorded.node.expr
            if op_name(node) == "sym_size" and expr in known:
                node.replace_all_uses_with(known[expr])
                graph.erase_node(node)
                changed = True
                continue
            if op_name(node) == "sym_size" and expr in carriers:
                node.args = carriers[expr]
            known.setdefault(expr, node)
        elif isinstance(recorded, torch.Tensor):
            if op_name(node) in _FILLS:
                node = _fill_by_size(graph, node, recorded, known, carriers)
            for dim, extent in enumerate(recorded.shape):
                if isinstance(extent, torch.SymInt):
                    carriers.setdefault(extent.node.expr, (node, dim))
    return changed


def _hoist_sizes(graph: fx.Graph) -> None:
    """Move arithmetic on sizes up to where its inputs are known.

    A rewritten call stands where the scores stood, which may be above a size that only the model's
    selection used.
    """
    inputs = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    if not inputs:
        return
    last = inputs[-1] if all(n.op == "placeholder" for n in inputs) else None
    for node in list(graph.nodes):
        early = (
            is_size(node)
            and node.op == "call_function"
            and all(is_size(n) or n.op == "placeholder" for n in node.all_input_nodes)
        )
        if early:
            above = max([*node.all_input_nodes, *([last] if last is not None else [])])
            above.append(node)


def _fill_by_size(
    graph: fx.Graph,
    node: fx.Node,
    recorded: torch.Tensor,
    known: dict[Any, fx.Node],
    carriers: dict[Any, tuple[fx.Node, int]],
) -> fx.Node:
    """The fill with explicit sizes, or the node as it is where a size is found nowhere else."""
    extents: list[Any] = list(recorded.shape)
    exprs = [s.node.expr for s in extents if isinstance(s, torch.SymInt)]
    if any(e not in known and e not in carriers for e in exprs):
        return node
    fill: Any = _FILLS[op_name(node)]
    if fill is None:
        fill = node.args[2 if op_name(node) == "new_full" else 1]
    with graph.inserting_before(node):
        sizes: list[fx.Node | int] = []
        for extent in extents:
            if isinstance(extent, int):
                sizes.append(extent)
                continue
            expr = extent.node.expr
            if expr not in known:
                known[expr] = graph.call_function(aten.sym_size.int, carriers[expr])
                known[expr].meta["val"] = extent
            sizes.append(known[expr])
        fresh = graph.call_function(
            aten.full.default,
            (sizes, fill),
            {"dtype": recorded.dtype, "device": recorded.device, "pin_memory": False},
        )
    fresh.meta = dict(node.meta)
    node.replace_all_uses_with(fresh)
    graph.erase_node(node)
    return fresh
