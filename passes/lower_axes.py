"""Carry labels of axes from an op's result to its inputs."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axes, LabelError, Labels
from dsa_compile.passes.graph_tools import CASTS, is_tensor, op_name, same_size, value

# Pointwise ops of ATen that carry no tag, since they are composed of others.
_UNTAGGED = frozenset(
    {"bitwise_and", "bitwise_or", "bitwise_xor", "where", "masked_fill", "floor_divide", "rsub"}
    | {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "logical_and", "logical_or"}
    | {"logical_not", "eq", "ne", "lt", "le", "gt", "ge", "isfinite", "square"}
)


def lower_axes(labels: Labels, node: fx.Node, axes: Axes) -> dict[fx.Node, Axes] | None:
    """Labels of a node's tensor inputs, from labels of the node itself.

    Works for elementwise ops, casts and views; None where the inputs' axes do not follow.
    """
    name = op_name(node)
    inputs = [n for n in node.all_input_nodes if is_tensor(n)]
    if name in ("permute", "transpose", "t"):
        source = inputs[0]
        marks = labels.view(node, [[i] for i in range(len(axes))])
        out: Axes = [[] for _ in axes]
        for at, mark in enumerate(marks):
            out[mark[0]] = axes[at]
        return {source: out}
    if name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"):
        try:
            return {inputs[0]: labels.regroup(axes, labels.binding.shape(inputs[0]), whole=True)}
        except LabelError:
            return None
    if name == "slice":
        sizes = zip(value(inputs[0]).shape, value(node).shape, strict=True)
        return {inputs[0]: axes} if all(same_size(a, b) for a, b in sizes) else None
    if (
        name in CASTS
        or name in ("expand", "clone", "contiguous", "alias", "detach")
        or pointwise(node)
    ):
        result: dict[fx.Node, Axes] = {}
        for source in inputs:
            shape = labels.binding.shape(source)
            aligned = axes[len(axes) - len(shape) :]
            result[source] = [a if s != 1 else [] for a, s in zip(aligned, shape, strict=True)]
        return result
    return None


def pointwise(node: fx.Node) -> bool:
    """Whether PyTorch itself tags the op of a node as pointwise."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value(node), torch.Tensor):
        return False
    binary = op_name(node) == "max" and str(target) == "aten.max.other"
    return torch.Tag.pointwise in target.tags or op_name(node) in _UNTAGGED or binary
