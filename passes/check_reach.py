"""Refuse rules that show themselves only at numbers which no probe reaches.

A probe runs a part of a model at small sizes, with drawn lengths and scores. A comparison of a
position with a constant that lies beyond those sizes, or of a drawn number with one beyond what is
drawn, gives one answer on every probe and may give the other one later. What each tensor of the
part can hold on a probe is followed as an interval, with the ways in which it may leave it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.compare_spans import compare_spans
from dsa_compile.passes.graph_tools import (
    CASTS,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    is_view,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.number_spans import (
    Span,
    check_rounding,
    constant_span,
    counted,
    in_blocks,
    of_bits,
    passed_on,
    union,
)
from dsa_compile.passes.read_bounds import COUNTS, arange_bounds
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.run_probe import needed
from dsa_compile.passes.score_trace import Refusal

_COMPARES = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum"})
_BLOCKS = frozenset({"floor_divide", "remainder", "fmod", "bitwise_right_shift", "__rshift__"})
_COUNTING = frozenset({"sum", "cumsum", "scatter_add", "index_add", "bincount"})
_PLACES = frozenset({"argsort", "argmax", "argmin", "nonzero", "searchsorted", "bucketize"})
_MADE = frozenset({"full", "new_full", "full_like", "zeros", "new_zeros", "zeros_like", "ones"})
_MADE |= {"new_ones", "ones_like", "scalar_tensor"}
_TESTS = frozenset({"isfinite", "isinf", "isnan", "isposinf", "isneginf"}) | COUNTS | _MADE
_BITS = frozenset({"bitwise_or", "bitwise_xor", "bitwise_left_shift", "__lshift__"})
_PASSING = frozenset(
    {"cat", "stack", "pad", "constant_pad_nd", "where", "masked_fill", "scatter", "index_put"}
    | {"gather", "index", "index_select", "slice", "select", "flip", "roll", "getitem", "sort"}
    | {"topk", "amax", "amin", "max", "min", "copy", "fill", "index_fill", "slice_scatter"}
    | {"masked_scatter", "narrow", "split", "split_with_sizes", "unbind", "chunk", "triu", "tril"}
    | {"copy_", "prod", "take_along_dim", "diagonal", "index_copy", "scatter_reduce"}
)


class ReachCheck:
    """Follows what the tensors of a part hold on probes at some sizes.

    Args:
        binding: the sizes, before they are restated.
        positions: extent of the key positions there.
        strict: refuse every comparison of an input of the model with a constant.
        known: sizes that may be the smaller of a constant and another one.
    """

    def __init__(
        self, binding: Binding, positions: int, *, strict: bool, known: frozenset[Any] = frozenset()
    ) -> None:
        self.binding, self.positions = binding, positions
        self.strict, self.known = strict, known
        self.spans: dict[fx.Node, Span | None] = {}

    def check(self, targets: Iterable[fx.Node], cut: dict[fx.Node, Span | None]) -> None:
        """Look at all that lies between some nodes and the leaves of masks.

        Args:
            targets: results of the part.
            cut: nodes whose values are proven as they are, with what they hold.

        Raises:
            Refusal: a rule of the part may show itself beyond all probes; the text names it.
        """
        self.spans = dict(cut)
        stop = [n for n in needed(targets, cut) if mask_leaf(n)]
        for node in stop:
            self.spans.setdefault(node, self._leaf(node))
        for node in needed(targets, self.spans):
            if is_tensor(node) or op_name(node) in ("topk", "sort", "max", "min"):
                self.spans[node] = self._follow(node)

    def _leaf(self, node: fx.Node) -> Span | None:
        if not is_tensor(node) or dtype_of(node) == torch.bool:
            return None
        root = selection_root(node)
        if is_float(node):
            return Span(-1, 1, True, True, root is None, True)
        if root is not None:
            source = root.args[0]
            assert isinstance(source, fx.Node)
            extent = value(source).shape[-1]
            return Span(0, self.binding.extent(extent) - 1, not isinstance(extent, int))
        return Span(0, self.positions, True, True, True)

    def _operand(self, arg: object) -> Span | None:
        if isinstance(arg, (bool, int, float)):
            return Span(float(arg), float(arg))
        if not isinstance(arg, fx.Node):
            return None
        if is_size(arg):
            return self._size(value(arg))
        return self.spans.get(arg)

    def _size(self, size: Any) -> Span:
        held = float(self.binding.extent(size))
        atoms = [abs(int(a)) for a in size.node.expr.atoms(sympy.Integer)]
        return Span(held, held, True, marks=tuple(a for a in atoms if a > 1))

    def _follow(self, node: fx.Node) -> Span | None:
        name = op_name(node)
        self._cuts(node, name)
        if node.op == "get_attr":
            return constant_span(node)
        if name in _COMPARES or name == "isin":
            one, other = (self._operand(a) for a in node.args[:2])
            compare_spans(node, one, other, exact=name in ("eq", "ne"), strict=self.strict)
            return None
        if is_tensor(node) and dtype_of(node) == torch.bool:
            if name not in _TESTS:
                for arg in node.all_input_nodes if name not in _PASSING else []:
                    if is_tensor(arg):
                        span = self._operand(arg)
                        compare_spans(node, span, Span(0, 0), exact=True, strict=self.strict)
            return None
        if name in COUNTS:
            self._made(node)
            return self._count(node)
        if name in _MADE:
            self._made(node)
            fill = constant_of(node)
            if fill is not None:
                return Span(fill, fill)
            sizes = [a for a in node.args if isinstance(a, fx.Node) and is_size(a)]
            return self._size(value(sizes[-1])) if sizes else Span(0, 0, True, True)
        return self._computed(node, name)

    def _computed(self, node: fx.Node, name: str) -> Span | None:
        held = [s for a in passed_on(node, name) if (s := self._operand(a)) is not None]
        flags = [n for n in node.all_input_nodes if is_tensor(n) and dtype_of(n) == torch.bool]
        if name in _COUNTING or name in _PLACES:
            return counted(node, held, self.binding)
        if is_view(node) or name in CASTS or name in _PASSING:
            check_rounding(node, name, held)
            extra = [Span(0, 1)] if flags and (is_view(node) or name in CASTS) else []
            return union([*held, *extra])
        if name == "one_hot":
            return Span(0, 1)
        if not held:
            return None
        if name == "mul" and flags:
            return union([*held, Span(0, 0)])
        first, other = held[0], held[1] if len(held) > 1 else None
        if name in ("add", "sub", "rsub") and other is not None and "alpha" not in node.kwargs:
            if name == "add":
                return first.minus(other.negated())
            return first.minus(other) if name == "sub" else other.minus(first)
        if name in ("neg", "bitwise_not"):
            return first.negated()
        if name == "abs":
            return replace(first, low=0, high=max(abs(first.low), abs(first.high)), down=False)
        if name in _CLAMPS:
            bounds = [s for a in node.args[1:3] if (s := self._operand(a)) is not None]
            bounds += [s for a in node.kwargs.values() if (s := self._operand(a)) is not None]
            for bound in bounds:
                compare_spans(node, first, bound, strict=self.strict)
            return union([first, *bounds])
        factor = other.low if other is not None and other.alone() else None
        if name in ("mul", "div") and factor and not (name == "div" and not is_float(node)):
            return first.times(factor if name == "mul" else 1 / factor)
        if name in _BLOCKS or name == "div":
            return in_blocks(name, first, factor)
        if name == "bitwise_and" or name in _BITS:
            return of_bits(name, first, factor, strict=self.strict)
        if any(s.grows() for s in held):
            raise Refusal(f"what comes out of {name} cannot be followed beyond the probes", 7)
        return None

    def _count(self, node: fx.Node) -> Span:
        size = value(node).shape[0]
        start, step = arange_bounds(node)
        first = self._operand(start) or Span(0, 0)
        number = step if isinstance(step, int) else 1
        reach = (self.binding.extent(size) - 1) * number
        grows = not isinstance(size, int)
        return Span(
            first.low + min(0, reach),
            first.high + max(0, reach),
            first.up or grows and number > 0,
            grows and number < 0,
        )

    def _cuts(self, node: fx.Node, name: str) -> None:
        """Refuse a slice or a diagonal at a constant that lies beyond the sizes of the probes."""
        if name not in ("slice", "tril", "triu"):
            return
        source: Any = node.args[0]
        dims = value(source).shape
        dim: Any = node.args[1] if name == "slice" and len(node.args) > 1 else 0
        sizes = [dims[dim]] if name == "slice" else list(dims[-2:])
        if all(isinstance(s, int) for s in sizes):
            return
        most = min(self.binding.extent(s) for s in sizes)
        for arg in node.args[2:4] if name == "slice" else node.args[1:2]:
            span = self._operand(arg)
            if span is None:
                continue
            beyond = span.alone() and most < abs(span.low) < 1 << 40
            if beyond or any(m > self.positions for m in span.marks):
                raise Refusal(f"no probe reaches the end of a {name}", 7)

    def _made(self, node: fx.Node) -> None:
        """Refuse a new tensor whose size is a constant from some length on."""
        for size in value(node).shape:
            if isinstance(size, int) or size.node.expr in self.known:
                continue
            for part in size.node.expr.atoms(sympy.Function):
                limits = [int(a) for a in part.args if a.is_Integer]
                if type(part).__name__ in ("Min", "Max") and any(
                    n > self.positions for n in limits
                ):
                    raise Refusal(f"no probe reaches {max(limits):,}, where a size bends", 7)


def check_reach(
    targets: list[fx.Node],
    bindings: list[Binding],
    score: fx.Node,
    *,
    ids: fx.Node | None = None,
    flags: fx.Node | None = None,
    drawn_wild: bool = False,
    strict: bool = True,
) -> None:
    """Look at a part at each of some sizes; it holds where one of them shows all its rules.

    Args:
        targets: results of the part.
        bindings: sizes to prove at, before they are restated.
        score: whose last dim are the positions.
        ids: published ids inside the part, proven as they are.
        flags: which of them are used, too.
        drawn_wild: whether ids are drawn out of range, at every constant of the part.
        strict: see :class:`ReachCheck`.

    Raises:
        Refusal: a rule of the part may show itself beyond all probes.
    """
    failure: Refusal | None = None
    for binding in bindings:
        positions = binding.shape(score)[-1]
        cut: dict[fx.Node, Span | None] = {}
        known: frozenset[Any] = frozenset()
        if flags is not None:
            cut[flags] = None
        if ids is not None:
            dims = value(ids).shape
            symbolic = any(not isinstance(s, int) for s in value(score).shape)
            cut[ids] = Span(-1, positions, symbolic and not drawn_wild, drawn=drawn_wild)
            known = frozenset(s.node.expr for s in dims if not isinstance(s, int))
        try:
            return ReachCheck(binding, positions, strict=strict, known=known).check(targets, cut)
        except Refusal as refusal:
            failure = refusal
    if failure is not None:
        raise failure
