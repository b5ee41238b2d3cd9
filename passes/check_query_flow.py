"""Refuse query sides that decide something by positions or rows.

Draws show what is computed on few rows, and on the positions that are drawn. A rule that holds for
some rows or positions alone shows in the ops: something is compared with them.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import dtype_of, is_float, is_size, is_tensor, op_name, value
from dsa_compile.passes.read_bounds import COUNTS
from dsa_compile.passes.recognise_ops import is_constant
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_query import QueryTrace

_TURNS = frozenset({"cos", "sin", "polar", "exp", "index", "index_select", "gather", "embedding"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "isin", "bucketize", "searchsorted"})


def check_query_flow(trace: QueryTrace) -> None:
    """Look at the ops that one fused op would replace, and at what they read.

    Raises:
        Refusal: queries or head weights depend on a comparison of positions or rows.
    """
    whole = _cone(trace)
    moving: set[fx.Node] = set()
    decided: set[fx.Node] = set()
    numbers = {trace.root, *trace.weight_roots}
    for node in whole:
        inputs = node.all_input_nodes
        if node in numbers or any(n in numbers for n in inputs):
            if any(n in decided for n in inputs):
                raise Refusal(f"its queries are chosen by positions or rows ({node.name})", 8)
            numbers.add(node)
        elif any(n in decided for n in inputs):
            decided.add(node)
        elif not is_tensor(node):
            moving |= {node} if any(n in moving for n in inputs) else set()
        elif _counts(node):
            moving.add(node)
        elif any(n in moving for n in inputs):
            if op_name(node) in _COMPARISONS or dtype_of(node) == torch.bool:
                decided.add(node)
            elif op_name(node) not in _TURNS:
                moving.add(node)


def _cone(trace: QueryTrace) -> list[fx.Node]:
    """All that queries and weights are computed from, down to what they begin with."""
    found: set[fx.Node] = set()
    todo = [trace.query, trace.weights]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if node is not trace.root and node not in trace.weight_roots:
            todo += [n for n in node.all_input_nodes if not is_size(n)]
    return sorted(found)


def _counts(node: fx.Node) -> bool:
    """Whether a tensor holds positions or rows: given integers, or a count that grows."""
    if op_name(node) in COUNTS:
        return any(isinstance(size, torch.SymInt) for size in value(node).shape)
    begins = node.op != "call_function" and not is_constant(node)
    return begins and not is_float(node) and dtype_of(node) != torch.bool
