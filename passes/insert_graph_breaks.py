"""Mark the calls that no CUDA graph may capture; what runs between them can be captured whole.

Whoever captures reads the marks: a runner of the graph itself splits at them, Inductor's graph
partition is given the names of the marked ops.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import value

MARK = "dsa_graph_break"
"""Key of ``node.meta`` that holds why a call may not be captured."""


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Mark every call of an op in ``context.uncapturable``, and those that PyTorch knows of.

    Names are ``namespace::op``, for all its overloads, or ``namespace::op.overload``. Marks that
    are there already stay. Moving or adding nothing, the pass leaves results as they were.
    """
    marked = False
    for node in graph_module.graph.nodes:
        reason = _reason(node, context)
        if reason is not None:
            node.meta.setdefault(MARK, reason)
            context.recorder.breaks.setdefault(op_label(node), node.meta[MARK])
            marked = True
    return PassResult(graph_module, marked)


def op_label(node: fx.Node) -> str:
    """``namespace::op.overload`` of a call of a PyTorch op, else the target's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    return str(getattr(target, "__name__", target))


def _reason(node: fx.Node, context: PassContext) -> str | None:
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    for name in (op_label(node), target._schema.name):
        if name in context.uncapturable:
            return context.uncapturable[name]
    if torch.Tag.cudagraph_unsafe in target.tags:
        return "its author tags it cudagraph_unsafe"
    if torch.Tag.data_dependent_output in target.tags or is_cudagraph_unsafe_fx_node(node):
        return "the host waits for it, or PyTorch knows it as unsafe to capture"
    held = value(node)
    parts = held if isinstance(held, (tuple, list)) else (held,)
    sized = [part for part in parts if isinstance(part, torch.Tensor)]
    if torch.Tag.dynamic_output_shape in target.tags and free_unbacked_symbols(sized):
        return "the size of its result depends on data"
    return None
