"""Bring the ops that the passes emit into the set that Inductor lowers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


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
