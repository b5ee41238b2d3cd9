"""Bring a captured graph into a plain functional form; nothing in here knows about indexers."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import aten, erase_unused, is_size, op_name, value

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
    erase_unused(graph, graph.nodes)
    return PassResult(graph_module, changed)


def _detach_shapes(graph: fx.Graph) -> bool:
    """Take every size from the earliest tensor that has it, and every fill from sizes."""
    known: dict[Any, fx.Node] = {}
    carriers: dict[Any, tuple[fx.Node, int]] = {}
    # Tensors share the objects that stand for their sizes, whose expressions are slow to read.
    met: dict[int, Any] = {}
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
            if op_name(node) == "sym_size":
                parts = None if carriers[expr][0] is not node.args[0] else _size_parts(node)
                if parts is not None:
                    node = _sum_of(graph, node, parts, known, carriers)
                    changed = True
                else:
                    node.args = carriers[expr]
            known.setdefault(expr, node)
        elif isinstance(recorded, torch.Tensor):
            if op_name(node) in _FILLS:
                node = _fill_by_size(graph, node, recorded, known, carriers)
            for dim, extent in enumerate(recorded.shape):
                if isinstance(extent, torch.SymInt) and id(extent.node) not in met:
                    met[id(extent.node)] = extent.node
                    carriers.setdefault(extent.node.expr, (node, dim))
    return changed


def _size_parts(node: fx.Node) -> list[Any] | None:
    """What the size of a padded, joined or reshaped dim is the sum of: sizes, or (tensor, dim)."""
    made, dim = node.args
    if not isinstance(made, fx.Node) or not isinstance(dim, int):
        return None
    name, rank = op_name(made), value(made).dim()
    args: Any = made.args
    if name in ("constant_pad_nd", "pad"):
        pads = list(args[1])
        first = 2 * (rank - 1 - dim % rank)
        return [(args[0], dim), *pads[first : first + 2]]
    if name == "cat":
        along = args[1] if len(args) > 1 else 0
        return [(part, dim) for part in args[0]] if (along - dim) % rank == 0 else None
    if name in ("view", "reshape", "expand") and value(args[1][dim]) != -1:
        return [args[1][dim]]
    return None


def _sum_of(
    graph: fx.Graph,
    node: fx.Node,
    parts: list[Any],
    known: dict[Any, fx.Node],
    carriers: dict[Any, tuple[fx.Node, int]],
) -> fx.Node:
    """The sum of sizes in place of a size that a large tensor was kept for."""
    sizes: list[fx.Node | int] = []
    with graph.inserting_before(node):
        for part in parts:
            if not isinstance(part, tuple):
                sizes.append(part)
                continue
            extent = value(part[0]).shape[part[1]]
            sizes.append(
                extent if isinstance(extent, int) else _known(graph, extent, known, carriers)
            )
        total = sizes[0]
        for size in sizes[1:]:
            if isinstance(size, int) and size == 0:
                continue
            added = graph.call_function(operator.add, (total, size))
            added.meta["val"] = value(total) + value(size)
            total = added
    assert isinstance(total, fx.Node)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total


def _known(
    graph: fx.Graph,
    extent: torch.SymInt,
    known: dict[Any, fx.Node],
    carriers: dict[Any, tuple[fx.Node, int]],
) -> fx.Node:
    """The node of a size, added at the place of insertion if there is none yet."""
    expr = extent.node.expr
    if expr not in known:
        known[expr] = graph.call_function(aten.sym_size.int, carriers[expr])
        known[expr].meta["val"] = extent
    return known[expr]


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
            sizes.append(_known(graph, extent, known, carriers))
        fresh = graph.call_function(
            aten.full.default,
            (sizes, fill),
            {"dtype": recorded.dtype, "device": recorded.device, "pin_memory": False},
        )
    fresh.meta = dict(node.meta)
    node.replace_all_uses_with(fresh)
    graph.erase_node(node)
    return fresh
