"""Share one expansion among all consumers of the same published ids, by dataflow alone."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import ancestors, op_name

_SHARED = ("candidate_expand", "candidate_columns")


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Merge equal expansions and the equal pure ops that feed them; needs ``expand_candidates``.

    Expansion is a pure op on the ids, so that common-subexpression elimination shares it exactly
    when the ids (and row bounds) are the same tensors, and never otherwise. Nodes that feed no
    expansion are not touched: the rest of the graph is the user's.
    """
    graph = graph_module.graph
    targets = [n for n in graph.nodes if op_name(n) in _SHARED]
    feeding = set(ancestors(targets))
    first: dict[Hashable, fx.Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node not in feeding and op_name(node) != "getitem" or not _pure(node):
            continue
        key = (node.target, _token(node.args), _token(dict(node.kwargs)))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
            changed = True
        else:
            first[key] = node
    return PassResult(graph_module, changed)


def expansions(graph_module: fx.GraphModule) -> int:
    """Number of candidate expansions that a graph runs."""
    return sum(op_name(n) == "candidate_expand" for n in graph_module.graph.nodes)


def _pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return op_name(node) in (
            "getitem",
            "add",
            "sub",
            "mul",
            "floordiv",
            "mod",
            "neg",
            "sym_min",
        )
    random = torch.Tag.nondeterministic_seeded in target.tags or op_name(node).startswith("empty")
    known = target.namespace in ("aten", "prims", "dsa", "dsa_cpu")
    return known and not random and not target._schema.is_mutable


def _token(arg: Any) -> Hashable:
    """A key that tells 2 from 2.0 and True, and 0.0 from -0.0, as Python's equality does not."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return (type(arg).__name__, tuple(_token(a) for a in arg))
    if isinstance(arg, dict):
        return tuple((k, _token(v)) for k, v in sorted(arg.items()))
    return (type(arg).__name__, repr(arg))
