"""What Torch-TensorRT is given: a lowering pass, and the ops that stay in PyTorch segments.

Nothing here needs Torch-TensorRT.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dsa_compile.config import Config, as_config
from dsa_compile.errors import SlowPathWarning
from dsa_compile.session import Session

_NAMESPACES = frozenset({"dsa", "dsa_cpu", "dsa_deep", "dsa_triton"})


def lowering_pass(
    config: Config | Mapping[str, Any] | None = None,
) -> Callable[[fx.GraphModule, Any], fx.GraphModule]:
    """Our passes in the form of Torch-TensorRT's lowering passes, ``(graph_module, settings)``.

    The pass gives a rewritten graph module that shares the parameters of the one it is given. A
    graph that writes to tensors which it reads afterwards is left as it was, with a warning.

    Raises:
        ConfigError: an option is unknown or bad. The pass itself raises what ``optimize`` does.
    """
    options = as_config(config)

    def dsa_lowering(graph_module: fx.GraphModule, settings: Any = None) -> fx.GraphModule:
        if (write := _write_inside(graph_module.graph)) is not None:
            warnings.warn(
                f"the graph reads a tensor after {write} wrote to it, so its indexers stay as they "
                "are; lower a program that torch.export decomposed",
                SlowPathWarning,
                stacklevel=2,
            )
            return graph_module
        session = Session(graph_module, options)
        graph = session.add(graph_module)
        session.judge({graph.index})
        return graph.result.graph_module

    return dsa_lowering


def _write_inside(graph: fx.Graph) -> fx.Node | None:
    """A node that changes a tensor which a later one computes with; None if there is none."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.op == "call_function":
            # The end of a graph may copy values into several tensors.
            reads = node.all_input_nodes[1:] if writes else node.all_input_nodes
            found = next((written[source] for source in reads if source in written), None)
            if found is not None:
                return found
        if writes:
            written |= {node: node, node.all_input_nodes[0]: node}
    return None


def ops_in_pytorch(graph_module: fx.GraphModule) -> set[Any]:
    """Our ops that a graph calls: no engine has them."""
    return {node.target for node in graph_module.graph.nodes if _is_ours(node)}


def stays_in_pytorch(node: fx.Node) -> bool:
    """Whether a node must stay out of engines: it is one of our ops, or takes its results apart."""
    if _is_ours(node):
        return True
    source = node.args[0] if node.args else None
    # A result of several tensors crosses no border between segments.
    return node.target is operator.getitem and isinstance(source, fx.Node) and _is_ours(source)


def _is_ours(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
