"""Recognise single ops whatever their spelling: relus, constants, non-negative tensors."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import CASTS, is_float, is_view, op_name

_NONNEGATIVE = frozenset(
    {
        "relu",
        "sigmoid",
        "softmax",
        "_softmax",
        "_safe_softmax",
        "exp",
        "abs",
        "softplus",
        "square",
        "sqrt",
    }
)


def constant_of(node: object, depth: int = 0) -> float | None:
    """The one number that a scalar argument or a filled tensor holds, None where it holds more."""
    if isinstance(node, bool):
        return float(node)
    if isinstance(node, (int, float)):
        return float(node)
    if not isinstance(node, fx.Node) or depth > 6:
        return None
    name = op_name(node)
    if name in ("scalar_tensor",):
        return constant_of(node.args[0])
    if name in ("full", "full_like", "new_full"):
        return constant_of(node.args[2 if name == "new_full" else 1])
    if name in ("zeros", "zeros_like", "new_zeros"):
        return 0.0
    if name in ("ones", "ones_like", "new_ones"):
        return 1.0
    if is_view(node) or name in CASTS:
        return constant_of(node.args[0], depth + 1)
    if name == "neg":
        inner = constant_of(node.args[0], depth + 1)
        return None if inner is None else -inner
    if is_constant(node):
        held = attribute(node)
        if isinstance(held, torch.Tensor) and held.numel() == 1 and not held.is_meta:
            return float(held)
    return None


def is_constant(node: fx.Node) -> bool:
    """Whether a node is a constant that capture lifted, not a parameter or buffer of the model.

    Parameters and buffers may change after the rewrite, so that what they hold proves nothing.
    """
    if node.op != "get_attr":
        return False
    origin = node.meta.get("dsa_origin")
    if origin is not None:
        return bool(origin[0] == "constant")
    return str(node.target).rsplit(".", 1)[-1].startswith(("lifted_tensor", "_tensor_constant"))


def attribute(node: fx.Node) -> object:
    """The object that a ``get_attr`` node names."""
    held: object = node.graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    return held


def relu_input(node: fx.Node) -> fx.Node | None:
    """The tensor whose negative part a node drops, None where the node is no relu."""
    name, args = op_name(node), node.args
    first = args[0] if args else None
    if not is_float(node):
        return None
    if name == "relu":
        return first  # type: ignore[return-value]
    if name in ("clamp", "clamp_min"):
        low = args[1] if len(args) > 1 else node.kwargs.get("min")
        high = args[2] if len(args) > 2 else node.kwargs.get("max")
        return first if constant_of(low) == 0 and high is None else None  # type: ignore[return-value]
    if name == "threshold":
        return first if [constant_of(a) for a in args[1:3]] == [0, 0] else None  # type: ignore[return-value]
    if name == "hardtanh":
        return None
    if name in ("maximum", "fmax") or name == "max" and len(args) > 1 and is_float(args[1]):
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            if constant_of(other) == 0 and is_float(one):
                return one  # type: ignore[return-value]
    if name == "where":
        cond, kept, other = args[:3]
        compare = op_name(cond)
        if constant_of(other) == 0 and compare in ("gt", "ge"):
            a, b = cond.args[:2]  # type: ignore[union-attr]
            if a is kept and constant_of(b) == 0:
                return kept  # type: ignore[return-value]
        if constant_of(kept) == 0 and compare in ("lt", "le"):
            a, b = cond.args[:2]  # type: ignore[union-attr]
            if a is other and constant_of(b) == 0:
                return other  # type: ignore[return-value]
    if name == "masked_fill" and constant_of(args[2]) == 0 and op_name(args[1]) in ("lt", "le"):
        a, b = args[1].args[:2]  # type: ignore[union-attr]
        return first if a is first and constant_of(b) == 0 else None  # type: ignore[return-value]
    return None


def float_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that may carry scores: floating-point tensors."""
    return [n for n in node.all_input_nodes if is_float(n)]


def never_negative(node: object, depth: int = 0) -> bool:
    """Whether a tensor cannot hold a negative number, by the ops that made it."""
    number = constant_of(node)
    if number is not None:
        return number >= 0
    if not isinstance(node, fx.Node) or depth > 8:
        return False
    name = op_name(node)
    if name in _NONNEGATIVE or relu_input(node) is not None:
        return True
    if is_view(node) or name in CASTS or name in ("select", "slice"):
        return never_negative(node.args[0], depth + 1)
    if name in ("mul", "add", "div"):
        return all(never_negative(a, depth + 1) for a in node.args[:2])
    return bool(name == "pow" and node.args[1] == 2)
