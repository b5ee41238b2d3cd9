"""Masks as terms: conjuncts over (row, position) taken out of boolean and additive masks."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.axis_labels import Axes
from dsa_compile.passes.graph_tools import (
    CASTS,
    HEAVY,
    SELECTIONS,
    ancestors,
    dtype_of,
    is_float,
    is_tensor,
    is_view,
    op_name,
    selection_root,
)
from dsa_compile.passes.lower_axes import lower_axes
from dsa_compile.passes.recognise_ops import constant_of, is_constant
from dsa_compile.passes.score_trace import HIDING, Refusal

# An added constant below this is meant to hide.
_LARGE = -1000.0


@dataclass(frozen=True)
class Term:
    """One conjunct: a position is visible only where ``node`` is ``want``; axes carry atoms."""

    node: fx.Node
    axes: tuple[tuple[int, ...], ...]
    want: bool

    def axes_in(self, roles: Roles) -> tuple[tuple[str, ...], ...]:
        """The axes by role, the same for equal terms of different sites."""
        names = {a: f"b{i}" for i, a in enumerate(roles.batch)}
        names |= {a: f"s{i}" for i, a in enumerate(roles.rows)}
        names |= {a: f"t{i}" for i, a in enumerate(roles.positions)}
        resolved = (roles.labels.resolve(a) for a in self.axes)
        return tuple(tuple(names.get(a, "?") for a in axis) for axis in resolved)

    def labels(self) -> Axes:
        """The axes as lists, as the labelling takes them."""
        return [list(a) for a in self.axes]


def mask_leaf(node: fx.Node) -> bool:
    """Where the reading of a mask stops: inputs, selections, and heavy float computations.

    An order of integers is read through: it rearranges ids, whatever they are.
    """
    if is_constant(node):
        return False
    name = op_name(node)
    if name in SELECTIONS and not is_float(node.args[0]):
        return False
    if node.op != "call_function" or not is_tensor(node):
        return True
    if selection_root(node) is not None or name in HEAVY and is_float(node):
        return True
    return name == "getitem" and op_name(node.args[0]) in HEAVY


def term(node: fx.Node, axes: Axes, want: bool) -> Term:
    return Term(node, tuple(tuple(a) for a in axes), want)


def is_bool(node: object) -> bool:
    return is_tensor(node) and dtype_of(node) == torch.bool  # type: ignore[arg-type]


def split_flags(roles: Roles, node: fx.Node, axes: Axes, want: bool) -> list[Term]:
    name = op_name(node)
    number = constant_of(node)
    if number is not None and bool(number) == want:
        return []
    lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
    if lowered is not None and not mask_leaf(node):
        rest = _neutral(node)
        if rest is not None:
            return split_flags(roles, rest, lowered[rest], want)
        if name in ("bitwise_not", "logical_not"):
            (source,) = lowered
            return split_flags(roles, source, lowered[source], not want)
        joins = ("bitwise_and", "logical_and", "mul") if want else ("bitwise_or", "logical_or")
        if name in joins and all(is_bool(a) for a in node.args[:2]):
            return [t for a in lowered for t in split_flags(roles, a, lowered[a], want)]
        if (is_view(node) or name in CASTS or name == "slice") and len(lowered) == 1:
            (source,) = lowered
            if is_bool(source) or dtype_of(source) == dtype_of(node):
                return split_flags(roles, source, lowered[source], want)
        if name == "where" and is_bool(node):
            cond, yes, no = node.args[:3]
            a, b = constant_of(yes), constant_of(no)
            if a is not None and b is not None and bool(a) != bool(b):
                return split_flags(roles, cond, lowered[cond], want == bool(a))  # type: ignore[index,arg-type]
        chosen = _chosen(node)
        if chosen is not None:
            source, cond, shown = chosen
            inner = lower_axes(roles.labels, source, lowered[source]) or {}
            if cond in inner:
                return split_flags(roles, cond, inner[cond], want == shown)
        if name in ("ne", "gt", "eq") and constant_of(node.args[1]) == 0 and is_bool(node.args[0]):
            (source,) = lowered
            return split_flags(roles, source, lowered[source], want == (name != "eq"))
    return [term(node, axes, want)]


def _chosen(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """For ``where(c, a, b) cmp n`` over numbers: the where, ``c``, and which ``c`` is True."""
    tests = {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "lt": operator.lt}
    tests |= {"ge": operator.ge, "le": operator.le}
    source = node.args[0] if node.args else None
    if op_name(node) not in tests or op_name(source) != "where" or not isinstance(source, fx.Node):
        return None
    one, other, edge = (constant_of(a) for a in (*source.args[1:3], node.args[1]))
    if one is None or other is None or edge is None:
        return None
    test = tests[op_name(node)]
    first, second = test(one, edge), test(other, edge)
    cond = source.args[0]
    return (source, cond, first) if first != second and isinstance(cond, fx.Node) else None


def _neutral(node: fx.Node) -> fx.Node | None:
    """The operand of an ``and`` or ``or`` whose other operand changes nothing."""
    neutral = {"bitwise_and": 1, "logical_and": 1, "bitwise_or": 0, "logical_or": 0}.get(
        op_name(node)
    )
    if neutral is None:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if constant_of(other) == neutral and is_bool(other) and is_bool(one):
            return one  # type: ignore[return-value]
    return None


def split_additive(roles: Roles, node: fx.Node, axes: Axes) -> tuple[list[Term], list[Term]]:
    """Terms of an additive mask that holds 0 and hiding values alone, and addends that are data."""
    name = op_name(node)
    cone = ancestors([node], mask_leaf)
    if any(mask_leaf(n) and is_float(n) and not _hidden_float(n) for n in cone):
        if name == "add" and node.kwargs.get("alpha", 1) == 1:
            lowered = lower_axes(roles.labels, node, axes)
            if lowered is not None and len(lowered) == 2:
                parts = [split_additive(roles, a, x) for a, x in lowered.items()]
                return [t for p in parts for t in p[0]], [t for p in parts for t in p[1]]
        return [], [term(node, axes, True)]
    lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
    if lowered is None:
        return [term(node, axes, True)], []
    if is_view(node) or name in CASTS or name == "slice":
        (source,) = lowered
        if is_float(source):
            return split_additive(roles, source, lowered[source])
    if name == "add" and len(lowered) == 2 and node.kwargs.get("alpha", 1) == 1:
        parts = [split_additive(roles, a, x) for a, x in lowered.items()]
        return [t for p in parts for t in p[0]], [t for p in parts for t in p[1]]
    if name in ("where", "masked_fill"):
        cond, yes, no = node.args[:3]
        if name == "masked_fill":
            cond, yes, no = node.args[1], node.args[2], node.args[0]
        a, b = constant_of(yes), constant_of(no)
        if a == 0 and b is not None and b <= HIDING:
            return split_flags(roles, cond, lowered[cond], True), []  # type: ignore[arg-type,index]
        if b == 0 and a is not None and a <= HIDING:
            return split_flags(roles, cond, lowered[cond], False), []  # type: ignore[arg-type,index]
    if name == "mul":
        for one, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            number = constant_of(other)
            if (
                number is not None
                and number <= HIDING
                and isinstance(one, fx.Node)
                and one in lowered
            ):
                flag = _flag(roles, one, lowered[one])
                if flag is not None:
                    return split_flags(roles, flag[0], flag[1], flag[2]), []
    return [term(node, axes, True)], []


def _flag(roles: Roles, node: fx.Node, axes: Axes) -> tuple[fx.Node, Axes, bool] | None:
    """The boolean that a 0/1 tensor was cast from, with the value that makes the tensor 0."""
    name = op_name(node)
    lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
    if lowered is None:
        return None
    if name in CASTS or is_view(node):
        (source,) = lowered
        return (
            (source, lowered[source], False)
            if is_bool(source)
            else _flag(roles, source, lowered[source])
        )
    if name in ("rsub", "sub"):
        one = node.args[0] if name == "sub" else node.args[1]
        source = node.args[1] if name == "sub" else node.args[0]  # type: ignore[assignment]
        if constant_of(one) == 1 and source in lowered:
            inner = _flag(roles, source, lowered[source])
            return None if inner is None else (inner[0], inner[1], not inner[2])
    return None


def _hidden_float(node: fx.Node) -> bool:
    """Floats a mask may read without being a bias: what a selection gave (its top scores)."""
    return (
        selection_root(node) is not None
        or op_name(node) in ("amax", "max")
        or (op_name(node) == "getitem" and op_name(node.args[0]) == "max")
    )


def hiding_constants(node: fx.Node) -> set[float]:
    """The hiding values that an additive mask is made of; -inf where none is written out.

    Raises:
        Refusal: a value is large, as if to hide, but real scores could reach it.
    """
    found: set[float] = set()
    for inner in ancestors([node], mask_leaf):
        for arg in inner.args:
            number = constant_of(arg) if is_float(inner) else None
            if number is not None and HIDING < number <= _LARGE:
                raise Refusal(
                    f"the added mask value {number:g} is within reach of real scores: hidden ones "
                    "could win",
                    4,
                )
            if (
                number is not None
                and number <= HIDING
                and op_name(inner) not in ("gt", "lt", "ne", "eq")
            ):
                found.add(number)
    return found or {float("-inf")}
