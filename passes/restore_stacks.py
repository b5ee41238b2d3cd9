"""Give back the ``stack`` that a decomposition spelled as ``cat`` and ``view``."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import aten, erase_unused, op_name, same_size, value


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Turn each view that splits a joined dim into (number, size) of equal parts into a stack.

    ``cat`` of n tensors of size d along a dim, seen as ``[..., n, d, ...]``, is their stack at that
    dim. Other views of the same ``cat`` stay.
    """
    graph = graph_module.graph
    made = []
    for node in list(graph.nodes):
        parts = _stacked(node)
        if parts is None:
            continue
        tensors, dim = parts
        with graph.inserting_before(node):
            stack = graph.call_function(aten.stack.default, (tensors, dim))
        stack.meta = dict(node.meta)
        node.replace_all_uses_with(stack)
        made.append(node)
    erase_unused(graph, made)
    return PassResult(graph_module, bool(made))


def _stacked(node: fx.Node) -> tuple[list[fx.Node], int] | None:
    """Tensors and dim of the stack that a view of a cat is; None where it is none."""
    joined = node.args[0] if op_name(node) in ("view", "reshape", "_unsafe_view") else None
    if op_name(joined) != "cat":
        return None
    assert isinstance(joined, fx.Node)
    tensors: Any = list(joined.args[0])  # type: ignore[arg-type]
    first = value(tensors[0])
    dim: Any = joined.args[1] if len(joined.args) > 1 else joined.kwargs.get("dim", 0)
    dim %= first.dim()
    if len(tensors) < 2 or not all(_alike(value(t), first) for t in tensors[1:]):
        return None
    expected = [*first.shape[:dim], len(tensors), *first.shape[dim:]]
    shape = value(node).shape
    same = len(shape) == len(expected) and all(map(same_size, shape, expected))
    return (tensors, dim) if same else None


def _alike(one: Any, other: Any) -> bool:
    return (
        one.dtype == other.dtype
        and one.dim() == other.dim()
        and all(map(same_size, one.shape, other.shape))
    )
