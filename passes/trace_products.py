"""Walk from a relu down to the product of queries and keys under it."""

from __future__ import annotations

import math

import torch.fx as fx

from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    is_float,
    is_tensor,
    is_view,
    op_name,
)
from dsa_compile.passes.recognise_ops import constant_of, never_negative
from dsa_compile.passes.score_trace import Refusal, ScoreTrace

PIECES = frozenset({"select", "slice"})
ADDS = frozenset({"add", "sub"})
SCALES = frozenset({"mul", "div"})


def trace_product(node: fx.Node, found: ScoreTrace) -> None:
    """Walk from the input of a relu to the product of queries and keys.

    Raises:
        Refusal: something else lies there; the text says what.
    """
    while True:
        if node in found.path:
            return
        found.path[node] = None
        name = op_name(node)
        if name in CONTRACTIONS:
            found.products.append(_product(node))
            return
        if name == "sum" and op_name(node.args[0]) == "mul":
            multiply = node.args[0]
            assert isinstance(multiply, fx.Node)
            operands = [a for a in multiply.args if is_float(a)]
            if len(operands) != 2:
                raise Refusal("the sum behind the relu is no product of queries and keys", 2)
            found.path[multiply] = None
            found.products.append((node, operands[0], operands[1]))  # type: ignore[arg-type]
            return
        if is_view(node) or name in CASTS or name in PIECES:
            node = node.args[0]  # type: ignore[assignment]
            continue
        if name in ("stack", "cat"):
            for part in node.all_input_nodes:
                trace_product(part, found)
            return
        if name == "getitem" and op_name(node.args[0]) in (
            "unbind",
            "split",
            "split_with_sizes",
        ):
            found.path[node.args[0]] = None  # type: ignore[index]
            node = node.args[0].args[0]  # type: ignore[union-attr,assignment]
            continue
        if name in SCALES:
            score = next((a for a in node.args[:2] if _leads_to_product(a)), None)
            if score is None:
                raise Refusal("no product of queries and keys lies behind the relu", 2)
            other = next(a for a in node.args[:2] if a is not score)
            if name == "div" and node.args[0] is other:
                raise Refusal("the product stands under a fraction inside the relu", 3)
            if constant_of(other) is None and not never_negative(other):
                raise Refusal("weights or scales of unknown sign are multiplied inside the relu", 3)
            note_factor(node, other, found, found.factors)
            assert isinstance(score, fx.Node)
            node = score
            continue
        if name in ADDS:
            raise Refusal("a bias is added inside the relu", 3)
        raise Refusal(f"{name or node.op} stands between the product and the relu", 2)


def note_factor(node: fx.Node, other: object, found: ScoreTrace, into: list[fx.Node]) -> None:
    """Note what a multiplication or division scales the scores by.

    Raises:
        Refusal: it divides by a tensor, or scales by a number that depends on sizes.
    """
    number = constant_of(other)
    if number is not None:
        found.constant *= number if op_name(node) == "mul" else 1.0 / number if number else math.nan
    elif op_name(node) == "div":
        raise Refusal("the scores are divided by a tensor", 3)
    elif not is_tensor(other):
        raise Refusal("the scores are scaled by a number that depends on sizes", 3)
    else:
        assert isinstance(other, fx.Node)
        into.append(other)


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    if op_name(node) in ("addmm", "baddbmm"):
        raise Refusal("a bias is added inside the relu", 3)
    if op_name(node) == "linear" and len(node.args) > 2 and node.args[2] is not None:
        raise Refusal("a bias is added inside the relu", 3)
    operands = list(node.args[1]) if op_name(node) == "einsum" else list(node.args[:2])  # type: ignore[arg-type]
    if len(operands) != 2:
        raise Refusal("the product has more than two operands", 3)
    return node, operands[0], operands[1]  # type: ignore[return-value]


def _leads_to_product(node: object) -> bool:
    for _ in range(12):
        if not isinstance(node, fx.Node) or not is_float(node):
            return False
        name = op_name(node)
        if name in CONTRACTIONS or name == "sum" and op_name(node.args[0]) == "mul":
            return True
        if is_view(node) or name in CASTS or name in PIECES:
            node = node.args[0]
        elif name in SCALES:
            return any(_leads_to_product(a) for a in node.args[:2])
        else:
            return False
    return False
