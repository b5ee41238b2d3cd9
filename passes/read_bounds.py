"""Read ``position < f(row)`` and its kin as half-open row bounds."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.graph_tools import (
    CASTS,
    aten,
    dtype_of,
    is_float,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.lower_axes import lower_axes
from dsa_compile.passes.mask_terms import Term, is_bool
from dsa_compile.passes.recognise_ops import constant_of

_FLIP = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_NOT = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


_FAR = 1 << 40
COUNTS = frozenset({"arange", "iota"})
# Whether a comparison with a number shows the ones of a triangle of ones.
_ONES: dict[str, dict[float | None, bool]] = {
    "ne": {0: True, 1: False},
    "gt": {0: True},
    "eq": {0: False, 1: True},
    "lt": {1: False},
}


class BoundReader:
    """Reads ``position < f(row)`` and its kin as half-open row bounds."""

    def __init__(self, layout: Layout, roles: Roles) -> None:
        self.layout, self.roles, self.emit = layout, roles, layout.emit

    def read(self, term: Term) -> tuple[str, fx.Node] | None:
        """``("start" | "end", int node [B|1, S|1])`` for a term that is one bound, else None."""
        name = op_name(term.node)
        if name in ("tril", "triu"):
            return self._triangle(term, is_bool(term.node))
        triangle = term.node.args[0] if name in _ONES else None
        if op_name(triangle) in ("tril", "triu") and isinstance(triangle, fx.Node):
            shown = _ONES[name].get(constant_of(term.node.args[1]))
            if constant_of(triangle.args[0]) != 1 or shown is None:
                return None
            return self._triangle(Term(triangle, term.axes, term.want == shown), True)
        if name not in _NOT or term.node.op != "call_function":
            return None
        lowered = lower_axes(self.roles.labels, term.node, term.labels())
        if lowered is None:
            return None
        left, right = term.node.args[:2]
        form = self._combine(self._linear(left, lowered), self._linear(right, lowered), -1)
        if form is None or form[0] not in (1, -1):
            return None
        slope, rows, constant = form
        compare = name if term.want else _NOT[name]
        if slope == -1:
            compare = _FLIP[compare]
        # slope * s + rows + constant  cmp  0   <=>   s  cmp  -slope * (rows + constant)
        edge = self._edge([(-slope * sign, n) for sign, n in rows], -slope * constant)
        if edge is None:
            return None
        if compare in ("le", "gt"):
            edge = self.emit(aten.add.Scalar, edge, 1)
        return ("end" if compare in ("lt", "le") else "start"), edge

    def _triangle(self, term: Term, flags: bool) -> tuple[str, fx.Node] | None:
        """A tril or triu of one number: of flags, or of 0 beside a hiding value."""
        node, axes = term.node, term.labels()
        roles = self.roles
        if (
            constant_of(node.args[0]) is None
            or len(axes) < 2
            or roles.labels.resolve(axes[-1]) != roles.positions
        ):
            return None
        if roles.labels.resolve(axes[-2]) != roles.rows or any(axes[:-2]):
            return None
        keeps_low = (op_name(node) == "tril") == flags
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        if flags and not term.want:
            keeps_low = not keeps_low
            diagonal = diagonal - 1 if op_name(node) == "triu" else diagonal + 1  # type: ignore[operator]
        elif not flags:
            diagonal = diagonal - 1 if op_name(node) == "triu" else diagonal + 1  # type: ignore[operator]
        device = value(node).device
        rows = self.emit(aten.arange.default, self.layout.group_size(roles.rows), device=device)
        rows = self.emit(aten.unsqueeze.default, rows, 0)
        shift = diagonal + 1 if keeps_low else diagonal  # type: ignore[operator]
        return ("end" if keeps_low else "start"), self.emit(aten.add.Scalar, rows, shift)

    def _edge(self, rows: list[tuple[int, fx.Node]], constant: object) -> fx.Node | None:
        total: fx.Node | None = None
        for sign, node in rows:
            part = self.emit(aten.squeeze.dim, node, -1)
            if dtype_of(part) != torch.int64:
                part = self.emit(aten._to_copy.default, part, dtype=torch.int64)
            # A row's limit may be written as the largest integer; arithmetic on it must not wrap.
            part = self.emit(aten.clamp.default, part, -_FAR, _FAR)
            if sign < 0:
                part = self.emit(aten.neg.default, part)
            total = part if total is None else self.emit(aten.add.Tensor, total, part)
        if total is None:
            return None
        return total if constant == 0 else self.emit(aten.add.Scalar, total, constant)

    @staticmethod
    def _combine(a, b, sign):  # type: ignore[no-untyped-def]
        if a is None or b is None:
            return None
        return a[0] + sign * b[0], a[1] + [(sign * s, n) for s, n in b[1]], a[2] + sign * b[2]

    def _linear(self, node, lowered):  # type: ignore[no-untyped-def]
        """``(slope of position, signed row terms, constant)`` of an integer expression, or None."""
        if isinstance(node, int):
            return 0, [], node
        if not isinstance(node, fx.Node) or not is_tensor(node) or is_float(node) or is_bool(node):
            return None
        axes = lowered[node]
        roles, name = self.roles, op_name(node)
        flat = [a for axis in axes for a in roles.labels.resolve(axis)]
        if not set(flat) & set(roles.positions):
            number = constant_of(node)
            if number is not None and number == int(number):
                return 0, [], int(number)
            canonical = self.layout.canonical(node, axes, [roles.batch, roles.rows, []])
            return 0, [(1, canonical)], 0
        if name in COUNTS:
            start, step = arange_bounds(node)
            return (
                (1, [], start)
                if step == 1 and isinstance(start, int) and flat == roles.positions
                else None
            )
        deeper = lower_axes(roles.labels, node, axes)
        if deeper is None:
            return None
        if is_view(node) or name in CASTS or name == "slice":
            return self._linear(node.args[0], deeper)
        if name in ("add", "sub") and node.kwargs.get("alpha", 1) == 1:
            left, right = (self._linear(a, deeper) for a in node.args[:2])
            return self._combine(left, right, 1 if name == "add" else -1)
        if name == "rsub":
            left, right = (self._linear(a, deeper) for a in node.args[:2])
            return self._combine(right, left, -1)
        return None


def arange_bounds(node: fx.Node) -> tuple[object, object]:
    """Start and step of an arange, also of the ``prims.iota`` that it decomposes into."""
    if op_name(node) == "iota":
        return node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    overload = str(node.target)
    if overload.endswith("arange.default"):
        return 0, 1
    step = node.args[2] if len(node.args) > 2 else 1
    return node.args[0], step
