"""Mark the calls that no CUDA graph may capture; what runs between them can be captured whole.

Whoever captures reads the marks: a runner of the graph itself splits at them, Inductor's graph
partition is given the names of the marked ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import value

MARK = "dsa_graph_break"
"""Key of ``node.meta`` that holds why a call may not be captured."""
_HOST = "the host waits for it, or PyTorch knows it as unsafe to capture"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Mark every call of an op in ``context.uncapturable``, and those that PyTorch knows of.

    Names are ``namespace::op``, for all its overloads, or ``namespace::op.overload``. Marks that
    are there already stay. Moving or adding nothing, the pass leaves results as they were.
    """
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    marked = False
    # By identity: hashing an op runs Python.
    known: dict[int, str | None] = {}
    plain: set[int] = set()
    for node in graph_module.graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if id(target) not in known:
            known[id(target)] = _of_op(target, context.uncapturable)
        reason = known[id(target)]
        if reason is None and not (id(target) in plain and not _is_sparse(value(node))):
            reason = _HOST if is_cudagraph_unsafe_fx_node(node) else None
            if reason is None and _is_plain(target):
                plain.add(id(target))
        if reason is None and torch.Tag.dynamic_output_shape in target.tags:
            reason = _of_result(node)
        if reason is not None:
            node.meta.setdefault(MARK, reason)
            context.recorder.breaks.setdefault(op_label(node), node.meta[MARK])
            marked = True
    return PassResult(graph_module, marked)


def op_label(node: fx.Node) -> str:
    """``namespace::op.overload`` of a call of a PyTorch op, else the target's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _label(target)
    return str(getattr(target, "__name__", target))


def _label(target: torch._ops.OpOverload) -> str:
    return f"{target._schema.name}.{target._overloadname}"


def _of_op(target: torch._ops.OpOverload, uncapturable: Mapping[str, str]) -> str | None:
    """Why no call of an op may be captured, whatever it is given."""
    for name in (_label(target), target._schema.name):
        if name in uncapturable:
            return uncapturable[name]
    if torch.Tag.cudagraph_unsafe in target.tags:
        return "its author tags it cudagraph_unsafe"
    return _HOST if torch.Tag.data_dependent_output in target.tags else None


def _is_plain(target: torch._ops.OpOverload) -> bool:
    """Whether an op is elementwise or a view, so that its values cannot make the host wait."""
    views = [r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns]
    return torch.Tag.pointwise in target.tags or bool(views) and all(views)


def _is_sparse(held: Any) -> bool:
    return not isinstance(held, torch.Tensor) or held.is_sparse


def _of_result(node: fx.Node) -> str | None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    held = value(node)
    parts = held if isinstance(held, (tuple, list)) else (held,)
    sized = [part for part in parts if isinstance(part, torch.Tensor)]
    return "the size of its result depends on data" if free_unbacked_symbols(sized) else None
