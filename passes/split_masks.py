"""Take the masks on a score apart: row bounds, candidate membership, and what is neither.

All masks are read as one conjunction of boolean terms over (row, position). Nothing here is
trusted: the probes compare the rebuilt visible set with the model's own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Layout, Roles
from dsa_compile.passes.axis_labels import Axes, lower_axes
from dsa_compile.passes.graph_tools import (
    CASTS,
    HEAVY,
    ancestors,
    aten,
    dtype_of,
    is_float,
    is_tensor,
    is_view,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.recognise_ops import constant_of, is_constant
from dsa_compile.passes.trace_scores import HIDING, Refusal, ScoreTrace

_SCATTERS = frozenset(
    {"scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put", "any", "one_hot"}
    | {"isin", "index_add", "index_fill", "index_copy", "bincount", "masked_scatter"}
)
_FAR = 1 << 40
# Whether a comparison with a number shows the ones of a triangle of ones.
_ONES: dict[str, dict[float | None, bool]] = {
    "ne": {0: True, 1: False},
    "gt": {0: True},
    "eq": {0: False, 1: True},
    "lt": {1: False},
}
_FLIP = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_NOT = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


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


@dataclass(frozen=True)
class Masks:
    """All masks of one site.

    Attributes:
        residual, candidate: terms that are not, or may be, membership in candidates.
        bias: what is added to the scores as numbers.
        fill: the value that hidden scores get in the rewritten form.
        exact: whether every hidden score has that very value in the model, too.
        floor: the largest value that a hidden score may have.
    """

    residual: tuple[Term, ...]
    candidate: tuple[Term, ...]
    bias: tuple[Term, ...]
    fill: float
    exact: bool
    floor: float


def mask_leaf(node: fx.Node) -> bool:
    """Where the reading of a mask stops: inputs, selections, and heavy float computations."""
    if is_constant(node):
        return False
    if node.op != "call_function" or not is_tensor(node):
        return True
    if selection_root(node) is not None or op_name(node) in HEAVY and is_float(node):
        return True
    return op_name(node) == "getitem" and op_name(node.args[0]) in HEAVY


def _term(node: fx.Node, axes: Axes, want: bool) -> Term:
    return Term(node, tuple(tuple(a) for a in axes), want)


def _is_bool(node: object) -> bool:
    return is_tensor(node) and dtype_of(node) == torch.bool  # type: ignore[arg-type]


def _split(roles: Roles, node: fx.Node, axes: Axes, want: bool) -> list[Term]:
    name = op_name(node)
    number = constant_of(node)
    if number is not None and bool(number) == want:
        return []
    lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
    if lowered is not None and not mask_leaf(node):
        rest = _neutral(node)
        if rest is not None:
            return _split(roles, rest, lowered[rest], want)
        if name in ("bitwise_not", "logical_not"):
            (source,) = lowered
            return _split(roles, source, lowered[source], not want)
        joins = ("bitwise_and", "logical_and", "mul") if want else ("bitwise_or", "logical_or")
        if name in joins and all(_is_bool(a) for a in node.args[:2]):
            return [t for a in lowered for t in _split(roles, a, lowered[a], want)]
        if (is_view(node) or name in CASTS or name == "slice") and len(lowered) == 1:
            (source,) = lowered
            if _is_bool(source) or dtype_of(source) == dtype_of(node):
                return _split(roles, source, lowered[source], want)
        if name == "where" and _is_bool(node):
            cond, yes, no = node.args[:3]
            a, b = constant_of(yes), constant_of(no)
            if a is not None and b is not None and bool(a) != bool(b):
                return _split(roles, cond, lowered[cond], want == bool(a))  # type: ignore[arg-type,index]
        chosen = _chosen(node)
        if chosen is not None and chosen[0] in (
            inner := lower_axes(
                roles.labels,
                node.args[0],
                lowered[node.args[0]],  # type: ignore[arg-type,index]
            )
            or {}
        ):
            return _split(roles, chosen[0], inner[chosen[0]], want == chosen[1])
        if name in ("ne", "gt", "eq") and constant_of(node.args[1]) == 0 and _is_bool(node.args[0]):
            (source,) = lowered
            return _split(roles, source, lowered[source], want == (name != "eq"))
    return [_term(node, axes, want)]


def _chosen(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """For ``where(c, a, b) cmp n`` over numbers: the condition and the value of it that is True."""
    tests = {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "lt": operator.lt}
    tests |= {"ge": operator.ge, "le": operator.le}
    source = node.args[0] if node.args else None
    if op_name(node) not in tests or op_name(source) != "where" or not isinstance(source, fx.Node):
        return None
    numbers = [constant_of(a) for a in (*source.args[1:3], node.args[1])]
    if any(n is None for n in numbers):
        return None
    first, second = (tests[op_name(node)](n, numbers[2]) for n in numbers[:2])
    cond = source.args[0]
    return (cond, first) if first != second and isinstance(cond, fx.Node) else None


def _neutral(node: fx.Node) -> fx.Node | None:
    """The operand of an ``and`` or ``or`` whose other operand changes nothing."""
    neutral = {"bitwise_and": 1, "logical_and": 1, "bitwise_or": 0, "logical_or": 0}.get(
        op_name(node)
    )
    if neutral is None:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if constant_of(other) == neutral and _is_bool(other) and _is_bool(one):
            return one  # type: ignore[return-value]
    return None


def _split_additive(roles: Roles, node: fx.Node, axes: Axes) -> tuple[list[Term], list[Term]]:
    """Terms of an additive mask that holds 0 and hiding values alone, and addends that are data."""
    name = op_name(node)
    cone = ancestors([node], mask_leaf)
    if any(mask_leaf(n) and is_float(n) and not _hidden_float(n) for n in cone):
        if name == "add" and node.kwargs.get("alpha", 1) == 1:
            lowered = lower_axes(roles.labels, node, axes)
            if lowered is not None and len(lowered) == 2:
                parts = [_split_additive(roles, a, x) for a, x in lowered.items()]
                return [t for p in parts for t in p[0]], [t for p in parts for t in p[1]]
        return [], [_term(node, axes, True)]
    lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
    if lowered is None:
        return [_term(node, axes, True)], []
    if is_view(node) or name in CASTS or name == "slice":
        (source,) = lowered
        if is_float(source):
            return _split_additive(roles, source, lowered[source])
    if name == "add" and len(lowered) == 2 and node.kwargs.get("alpha", 1) == 1:
        parts = [_split_additive(roles, a, x) for a, x in lowered.items()]
        return [t for p in parts for t in p[0]], [t for p in parts for t in p[1]]
    if name in ("where", "masked_fill"):
        cond, yes, no = node.args[:3]
        if name == "masked_fill":
            cond, yes, no = node.args[1], node.args[2], node.args[0]
        a, b = constant_of(yes), constant_of(no)
        if a == 0 and b is not None and b <= HIDING:
            return _split(roles, cond, lowered[cond], True), []  # type: ignore[arg-type,index]
        if b == 0 and a is not None and a <= HIDING:
            return _split(roles, cond, lowered[cond], False), []  # type: ignore[arg-type,index]
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
                    return _split(roles, flag[0], flag[1], flag[2]), []
    return [_term(node, axes, True)], []


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
            if _is_bool(source)
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


def is_candidate(term: Term) -> bool:
    """Whether a term looks like membership: it reads a selection, or scatters or counts ids."""
    cone = ancestors([term.node], mask_leaf)
    return any(selection_root(n) is not None or op_name(n) in _SCATTERS for n in cone) or any(
        op_name(n) in ("sum", "amax", "max") and not is_float(n.args[0])
        for n in cone
        if n.args and is_tensor(n.args[0])
    )


def split_masks(trace: ScoreTrace, roles: Roles) -> Masks:
    """Read the masks of a traced score as terms.

    Raises:
        Refusal: two addends that are data, or an addend without an axis of positions.
    """
    parts: list[_Part] = []
    for event in trace.masks:
        at = roles.labels.axes(event.at)
        shape = roles.labels.binding.shape(event.mask)
        if len(shape) > len(at):
            raise Refusal("a mask has more dims than the scores", 5)
        axes = [a if s != 1 else [] for a, s in zip(at[len(at) - len(shape) :], shape, strict=True)]
        if event.kind == "add":
            terms, data = _split_additive(roles, event.mask, axes)
            fills = _hiding_constants(event.mask)
            parts.append(_Part(terms, data, _term(event.mask, axes, True), fills))
        else:
            terms = _split(roles, event.mask, axes, event.kind == "show")
            fill = event.fill if event.fill is not None else float("-inf")
            parts.append(_Part(terms, [], None, {fill}))
    unique = list(dict.fromkeys(t for p in parts for t in p.terms))
    candidate = tuple(t for t in unique if is_candidate(t))
    if not candidate:
        # Dense scoring can add finite masks as they are, and so keep the order of what they hide.
        parts = [p.as_bias() if p.addend is not None and p.finite() else p for p in parts]
        unique = list(dict.fromkeys(t for p in parts for t in p.terms))
    addends = [t for p in parts for t in p.data]
    for addend in addends:
        if not addend.axes or not addend.axes[-1]:
            raise Refusal("a number per row is added to the scores", 5)
    fills = {f for p in parts for f in p.fills} or {float("-inf")}
    exact = len(fills) == 1 and not any(
        p.addend is not None and p.finite() and p.terms for p in parts
    )
    return Masks(
        tuple(t for t in unique if t not in candidate),
        candidate,
        tuple(addends),
        min(fills),
        exact,
        max(fills),
    )


@dataclass(frozen=True)
class _Part:
    """What one mask came apart into; ``addend`` is the whole of an additive one."""

    terms: list[Term]
    data: list[Term]
    addend: Term | None
    fills: set[float]

    def finite(self) -> bool:
        return any(f != float("-inf") for f in self.fills)

    def as_bias(self) -> _Part:
        assert self.addend is not None
        return _Part([], [self.addend], None, set())


def _hiding_constants(node: fx.Node) -> set[float]:
    """The hiding values that an additive mask is made of; -inf where none is written out."""
    found: set[float] = set()
    for inner in ancestors([node], mask_leaf):
        for arg in inner.args:
            number = constant_of(arg)
            if (
                number is not None
                and number <= HIDING
                and op_name(inner) not in ("gt", "lt", "ne", "eq")
            ):
                found.add(number)
    return found or {float("-inf")}


def predicate(layout: Layout, term: Term) -> fx.Node:
    """A boolean node in the term's own shape, True where the term lets a position be seen."""
    node = term.node
    if not _is_bool(node):
        if is_float(node):
            return layout.emit(aten.eq.Scalar, node, 0)
        node = layout.emit(aten.ne.Scalar, node, 0)
    return node if term.want else layout.emit(aten.logical_not.default, node)


class BoundReader:
    """Reads ``position < f(row)`` and its kin as half-open row bounds."""

    def __init__(self, layout: Layout, roles: Roles) -> None:
        self.layout, self.roles, self.emit = layout, roles, layout.emit

    def read(self, term: Term) -> tuple[str, fx.Node] | None:
        """``("start" | "end", int node [B|1, S|1])`` for a term that is one bound, else None."""
        name = op_name(term.node)
        if name in ("tril", "triu"):
            return self._triangle(term, _is_bool(term.node))
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
        if not isinstance(node, fx.Node) or not is_tensor(node) or is_float(node) or _is_bool(node):
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
        if name == "arange":
            start, step = _arange(node)
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


def _arange(node: fx.Node) -> tuple[object, object]:
    """Start and step of an arange."""
    overload = str(node.target)
    if overload.endswith("arange.default"):
        return 0, 1
    step = node.args[2] if len(node.args) > 2 else 1
    return node.args[0], step
