"""Bring a captured graph into a plain functional form; nothing in here knows about indexers."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

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
    graph_module.recompile()
    return PassResult(graph_module, changed)


def merge_repeats(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Merge calls of the same pure op on the same operands (PyTorch's CSE pass)."""
    result = CSEPass(banned_ops=get_CSE_banned_ops())(graph_module)
    assert result is not None
    return result.graph_module


def _detach_shapes(graph: fx.Graph) -> bool:
    known: dict[Any, fx.Node] = {}
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
            known.setdefault(expr, node)
        elif node.op == "placeholder" and isinstance(recorded, torch.Tensor):
            pass
        if op_name(node) in _FILLS and isinstance(recorded, torch.Tensor):
            changed |= _fill_by_size(graph, node, recorded, known)
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
    graph: fx.Graph, node: fx.Node, recorded: torch.Tensor, known: dict[Any, fx.Node]
) -> bool:
    sizes: list[fx.Node | int] = []
    for extent in recorded.shape:
        if isinstance(extent, int):
            sizes.append(extent)
        elif extent.node.expr in known:
            sizes.append(known[extent.node.expr])
        else:
            return False
    fill: Any = _FILLS[op_name(node)]
    if fill is None:
        fill = node.args[2 if op_name(node) == "new_full" else 1]
    with graph.inserting_before(node):
        fresh = graph.call_function(
            aten.full.default,
            (sizes, fill),
            {"dtype": recorded.dtype, "device": recorded.device, "pin_memory": False},
        )
    fresh.meta = dict(node.meta)
    node.replace_all_uses_with(fresh)
    graph.erase_node(node)
    return True
