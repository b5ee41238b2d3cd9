"""What tensors hold on a probe, as intervals, and which arguments of an op come out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.graph_tools import CASTS, dtype_of, is_float, is_tensor, is_view, value
from dsa_compile.passes.recognise_ops import attribute, is_constant
from dsa_compile.passes.score_trace import Refusal


@dataclass(frozen=True)
class Span:
    """What a tensor holds on a probe.

    Attributes:
        low, high: the interval.
        up, down: whether it may hold more, or less, than on any probe.
        given: whether an input of the model is among what it is made of.
        wide: whether hiding values and infinities are drawn, too.
        marks: constants inside the size that it holds.
        points: constants that stand beside the interval.
        drawn: whether numbers outside the interval are drawn on purpose.
    """

    low: float
    high: float
    up: bool = False
    down: bool = False
    given: bool = False
    wide: bool = False
    marks: tuple[int, ...] = ()
    points: tuple[float, ...] = ()
    drawn: bool = False

    def alone(self) -> bool:
        """Whether it is one constant."""
        return self.low == self.high and not (self.up or self.down)

    def grows(self) -> bool:
        """Whether it may hold other numbers than on the probes."""
        return self.up or self.down

    def drawn_around(self, number: float) -> bool:
        """Whether drawn numbers fall on both sides of a constant."""
        return self.wide and self.low <= number <= self.high

    def minus(self, other: Span) -> Span:
        """The interval of differences."""
        return Span(
            self.low - other.high,
            self.high - other.low,
            self.up or other.down,
            self.down or other.up,
            self.given or other.given,
            drawn=self.drawn or other.drawn,
        )

    def negated(self) -> Span:
        return Span(-self.high, -self.low, self.down, self.up, self.given, drawn=self.drawn)

    def times(self, factor: float) -> Span:
        """The interval scaled by a constant."""
        if factor < 0:
            return self.negated().times(-factor)
        low, high = self.low * factor, self.high * factor
        return Span(low, high, self.up, self.down, self.given, drawn=self.drawn)


def union(spans: Iterable[Span]) -> Span | None:
    """What holds a number of any of some spans; constants stand beside the interval."""
    found = list(spans)
    if not found:
        return None
    moving = [s for s in found if not s.alone()] or found
    points = {p for s in found for p in ((s.low,) if s.alone() else s.points)}
    return Span(
        min(s.low for s in moving),
        max(s.high for s in moving),
        any(s.up for s in found),
        any(s.down for s in found),
        any(s.given for s in found),
        any(s.wide for s in found),
        tuple(m for s in found for m in s.marks),
        tuple(sorted(points)),
        any(s.drawn for s in found),
    )


def constant_span(node: fx.Node) -> Span | None:
    """What a constant of the model holds; None for other tensors that it keeps."""
    held = attribute(node)
    if not is_constant(node) or not isinstance(held, torch.Tensor):
        return None
    if held.is_meta or held.dtype == torch.bool or not held.numel():
        return None
    return Span(float(held.min()), float(held.max()))


def passed_on(node: fx.Node, name: str) -> list[Any]:
    """Arguments whose numbers may come out; conditions and places are left out."""
    args: Any = node.args
    if name == "where":
        return list(args[1:3])
    if name == "masked_fill":
        return [args[0], args[2]]
    if name in ("gather", "index", "index_select", "slice", "select", "flip", "roll", "getitem"):
        return [args[0]]
    if name in ("scatter", "scatter_reduce", "index_fill", "index_copy", "scatter_add"):
        return [args[0], *args[3:4]]
    if name == "index_put":
        return [args[0], args[2]]
    if name in ("cat", "stack"):
        return list(args[0])
    if name in ("pad", "constant_pad_nd"):
        return [args[0], args[-1] if isinstance(args[-1], (int, float)) else 0]
    if is_view(node) or name in CASTS or name in ("amax", "amin", "sum", "cumsum", "topk", "sort"):
        return [args[0]]
    if name in ("max", "min") and not (len(args) > 1 and is_tensor(args[1])):
        return [args[0]]
    if name in ("triu", "tril", "split", "split_with_sizes", "chunk", "unbind", "narrow"):
        return [args[0]]
    return list(args)


def in_blocks(name: str, held: Span, size: float | None) -> Span:
    """Numbers counted in blocks, or what is left over of them.

    Raises:
        Refusal: no probe shows more than one block.
    """
    if size is not None and name in ("bitwise_right_shift", "__rshift__"):
        size = float(1 << min(int(size), 62))
    if size is None or size <= 0:
        return replace(held, low=min(held.low, 0), wide=False)
    left = name in ("remainder", "fmod")
    reach = held.high - held.low + 1 if left else max(abs(held.low), abs(held.high))
    if held.grows() and reach < size:
        raise Refusal(f"no probe reaches a second block of {size:,.0f}", 7)
    if left:
        return Span(0 if name == "remainder" else -size, size - 1, given=held.given)
    low, high = math.floor(held.low / size), math.floor(held.high / size)
    return replace(held, low=low, high=high, wide=False, marks=())


def of_bits(name: str, held: Span, bits: float | None, *, strict: bool) -> Span:
    """Numbers that some of their bits are taken of.

    Raises:
        Refusal: no probe shows all those bits.
    """
    most = max(abs(held.low), abs(held.high))
    if held.grows() and (bits is None or abs(bits) > most or held.given and strict):
        raise Refusal(f"no probe shows all bits of {name}", 7)
    if name == "bitwise_and" and bits is not None and bits >= 0:
        return Span(0, bits, given=held.given)
    if name in ("bitwise_left_shift", "__lshift__") and bits is not None:
        return held.times(float(1 << min(int(bits), 62)))
    return replace(held, low=-2 * most - 1, high=2 * most + 1, wide=False)


def check_rounding(node: fx.Node, name: str, held: list[Span]) -> None:
    """Refuse a cast of drawn numbers to fewer bits, which rounds large ones off.

    Raises:
        Refusal: it does.
    """
    source = node.args[0] if name in CASTS else None
    if is_float(source) and is_float(node) and any(s.grows() for s in held):
        assert isinstance(source, fx.Node)
        if dtype_of(node).itemsize < dtype_of(source).itemsize:
            raise Refusal("large numbers are rounded to fewer bits than a probe needs", 7)


def counted(node: fx.Node, held: list[Span], binding: Binding) -> Span:
    """A count of flags, a sum of numbers, or places along an axis."""
    shapes = [value(n).shape for n in [node, *node.all_input_nodes] if is_tensor(n)]
    sizes = [size for shape in shapes for size in shape]
    most = max((binding.extent(s) for s in sizes), default=1)
    span = union([Span(0, 1), *held])
    assert span is not None
    grows = any(not isinstance(s, int) for s in sizes)
    high = most * max(1, span.high)
    return replace(span, low=most * min(0, span.low), high=high, up=span.up or grows)
