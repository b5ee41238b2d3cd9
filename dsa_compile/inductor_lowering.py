"""Bring the ops that the passes emit into the set that Inductor lowers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

UNCAPTURED = "dsa_uncaptured"
"""Namespace of the ops that stand for those of several results that no CUDA graph may capture."""
_libraries: list[torch.library.Library] = []


def decompose_emitted(graph_module: fx.GraphModule) -> None:
    """Take apart the calls that Inductor expects to be decomposed before its passes run.

    AOTAutograd has done so with every call of the model; what remains was emitted by our passes.
    Inductor's own table is used, call by call, so that the rest of the graph is not traced again.

    Args:
        graph_module: functional ATen graph whose nodes carry ``meta["val"]``; changed in place.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    table = select_decomp_table()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in table and node.target not in lowerings:
            _decompose(graph_module, node, table)


def _decompose(graph_module: fx.GraphModule, node: fx.Node, table: dict[Any, Any]) -> None:
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = node.all_input_nodes
    target: Any = node.target

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return target(*args, **kwargs)

    held = [n.meta["val"] for n in inputs]
    with enable_python_dispatcher(), _fake_mode(node):
        traced = make_fx(call, table, tracing_mode="real")(*held)
    graph = graph_module.graph
    copies: dict[fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )
    with graph.inserting_before(node):
        for part in traced.graph.nodes:
            if part.op == "call_function":
                copies[part] = graph.node_copy(part, copies.__getitem__)
                if "stack_trace" in node.meta:
                    copies[part].meta["stack_trace"] = node.meta["stack_trace"]
            elif part.op == "get_attr":
                raise NotImplementedError(f"{node.target} decomposes with a constant of its own")
    (end,) = traced.graph.find_nodes(op="output")
    result = copies[end.args[0]]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _fake_mode(node: fx.Node) -> Any:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.fake_mode if isinstance(first, torch._subclasses.FakeTensor) else _nothing()


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def tag_uncapturable(graph: fx.Graph, names: Collection[str]) -> None:
    """Have the results of some calls read where they are made, outside of CUDA graphs.

    Inductor's graph partition leaves an op out by its name, but the reads of its results only by a
    tag of the op: of several results, a CUDA graph would then be given a tuple, which it refuses.
    Calls of such ops go to one of the same schema and meaning that has the tag.

    Args:
        graph: changed in place.
        names: of ops, ``namespace::op`` for all overloads or ``namespace::op.overload``.
    """
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        name = target._schema.name
        if not {name, f"{name}.{target._overloadname}"}.isdisjoint(names) and _is_untagged(target):
            node.target = _tagged(target)


def register_tagged(names: Collection[str]) -> None:
    """Register what :func:`tag_uncapturable` may have put into a graph that a cache gives back."""
    for name in names:
        for op in _overloads(name):
            if _is_untagged(op):
                _tagged(op)


def _overloads(name: str) -> Iterator[Any]:
    """The ops of a name that are registered by now."""
    namespace, _, op = name.partition("::")
    op, _, overload = op.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is not None:
        for found in packet.overloads():
            if overload in ("", found):
                yield getattr(packet, found)


def _is_untagged(op: torch._ops.OpOverload) -> bool:
    known = torch.Tag.cudagraph_unsafe in op.tags
    return len(op._schema.returns) > 1 and not op._schema.is_mutable and not known


@cache
def _tagged(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An op that calls ``op`` and is tagged as one that no CUDA graph may capture."""
    library = torch.library.Library(UNCAPTURED, "FRAGMENT")
    _libraries.append(library)
    name = op.name().replace("::", "_").replace(".", "_")
    _, _, signature = str(op._schema).partition("(")
    library.define(f"{name}({signature}", tags=(*op.tags, torch.Tag.cudagraph_unsafe))

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{UNCAPTURED}::{name}", call, lib=library)
    made: torch._ops.OpOverload = getattr(getattr(torch.ops, UNCAPTURED), name).default
    return made
