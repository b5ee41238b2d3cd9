"""Read what a part of a graph counts to and counts in: constants, and the sizes of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axis
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import (
    CASTS,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.read_bounds import COUNTS, arange_bounds
from dsa_compile.passes.recognise_ops import attribute, constant_of
from dsa_compile.passes.restate_sizes import DIMS, MOST_CONSTANTS, Member, argument, is_shape
from dsa_compile.passes.score_trace import HIDING
from dsa_compile.passes.solve_extents import Marks, Unrestated

_LARGEST_BLOCK = 1024
_FILLED = frozenset({"full", "new_full", "zeros", "new_zeros", "ones", "new_ones", "eye"}) | COUNTS
_PERIODS = frozenset({"div", "floor_divide", "mul", "remainder", "fmod", "repeat_interleave"})
_MEASURES = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "rsub", "fmod", "clamp"})
_MEASURES |= {"clamp_min", "clamp_max", "remainder", "div", "floor_divide"}
_SHIFTS = frozenset({"bitwise_right_shift", "bitwise_left_shift", "__rshift__", "__lshift__"})
_ALONG = frozenset({"slice", "select", "pad", "constant_pad_nd", "roll", "slice_scatter"})
_CURVED = frozenset({"pow", "square", "sqrt", "rsqrt", "log", "log2", "exp", "exp2", "sin", "cos"})


class ConstantReader:
    """Reads the numbers of a part; ``periods`` comes first, once all axes are known.

    Args:
        follower: labels at the captured sizes.
        nodes: what is run.
        given: nodes whose values are given.
        axes: axes besides the positions and the picks that may shrink.
    """

    def __init__(
        self, follower: AxisFollower, nodes: list[fx.Node], given: list[fx.Node], axes: list[Axis]
    ) -> None:
        self.follower, self.labels = follower, follower.labels
        self.nodes, self.axes = nodes, axes
        self.moving: set[int] = set()
        # What is computed from numbers that are given, and so is no position.
        self.data = {n for n in given if _may_be_data(n)}
        for node in self.nodes:
            if is_tensor(node) and _may_be_data(node) and self.data & set(node.all_input_nodes):
                self.data.add(node)

    def refuse_curves(self) -> None:
        """Refuse rules that bend: what they do far out does not follow from what they do here."""
        for node in self.nodes:
            if node in self.data:
                continue
            name, both = op_name(node), node.args[:2]
            product = name in ("mul", "div", "floor_divide", "remainder") and not is_float(node)
            if name in _CURVED or product and all(_varies(n) for n in both):
                raise Unrestated(f"{name} does not grow in proportion to sizes")

    def periods(self, positions: Axis) -> set[int]:
        """Numbers of positions that a rule may count in: sizes of blocks."""
        self.moving = self._moving(positions)
        found = {1}
        axes = [positions]
        for atom, (node, dim) in self.follower.made.items():
            if set(self.labels.resolve([atom])) & self.moving:
                axes += [[atom], *self._sources(node, dim)]
        for axis in axes:
            inner = self.labels.resolve(axis)[1:]
            found |= {self.labels.extent(inner[i:]) for i in range(len(inner))}
        for node in self.nodes:
            if op_name(node) in _PERIODS and not is_float(node):
                found |= {int(abs(n)) for _, n in self._numbers(node)}
            elif op_name(node) in COUNTS:
                found.add(abs(_step(node)))
            elif op_name(node) in _SHIFTS:
                found |= {1 << int(n) for _, n in self._numbers(node) if 0 <= n <= 10}
        return {n for n in found if 1 <= n <= _LARGEST_BLOCK}

    def constants(self, marks: Marks, largest: int) -> set[int]:
        """Constants that lie at no extent, but for those that no position reaches."""
        captured = Member(self.follower, [], marks)
        found: set[int] = set()
        for node in self.nodes:
            if node in self.data and not self._cuts(node):
                continue
            for name, number in self._numbers(node):
                if captured.moved(node, name, int(number)) is None:
                    found.add(abs(int(number)))
            if op_name(node) in _FILLED:
                found |= self._filled(node, captured.marks)
        # A product of a position may lie beyond all positions.
        largest *= self._factor()
        return {n for n in found if n <= largest}

    def _factor(self) -> int:
        """The largest number that positions may be multiplied by."""
        factor = 1
        for node in self.nodes:
            if is_float(node) or op_name(node) not in ("mul", *_SHIFTS):
                continue
            numbers = [abs(int(n)) for _, n in self._numbers(node)]
            if op_name(node) == "mul":
                factor = max([factor, *numbers])
            else:
                factor = max([factor, *(1 << n for n in numbers if n < 63)])
        return factor

    def _moving(self, positions: Axis) -> set[int]:
        """Atoms of the axes that may shrink, those that are cut out of others among them."""
        axes = [positions, *self.axes, *self.follower.picks]
        found = {a for axis in axes for a in self.labels.resolve(axis)}
        for atom, (node, dim) in self.follower.made.items():
            own = set(self.labels.resolve([atom]))
            if own & found or any(set(a) & found for a in self._sources(node, dim)):
                found |= own
        return found

    def _sources(self, node: fx.Node, dim: int) -> list[Axis]:
        """The axes that a slice, a pad or a cat made a dim of."""
        nodes = node.args[0] if op_name(node) == "cat" else [node.args[0]]
        return [self.labels.resolve(self.labels.of[n][dim]) for n in nodes]  # type: ignore[union-attr,index]

    def _cuts(self, node: fx.Node) -> bool:
        """Whether a call places elements along an axis that may shrink."""
        source = node.args[0] if node.args else None
        if op_name(node) not in _ALONG or not isinstance(source, fx.Node):
            return False
        axes = self.labels.of[source]
        if op_name(node) in ("slice", "select", "slice_scatter"):
            dim = argument(node, 2 if op_name(node) == "slice_scatter" else 1, "dim", 0)
            axes = [axes[dim]]
        return any(set(self.labels.resolve(axis)) & self.moving for axis in axes)

    def _numbers(self, node: fx.Node) -> Iterator[tuple[str, int | float]]:
        """Whole numbers that positions may be compared with or computed from."""
        for name, number in _held(node) if node.op == "get_attr" else self._written(node):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if isinstance(number, float):
                if not math.isfinite(number) or number != int(number) or number <= HIDING:
                    continue
                if not _measured(node):
                    continue
            yield name, number

    def _written(self, node: fx.Node) -> Iterator[tuple[str, Any]]:
        """Arguments of a call that are neither shapes nor dims; sizes as what they are."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        names = [a.name for a in node.target._schema.arguments]
        for name, held in [*zip(names, node.args, strict=False), *node.kwargs.items()]:
            if is_shape(node, name) or name in DIMS:
                continue
            for one in held if isinstance(held, (list, tuple)) else [held]:
                if isinstance(one, fx.Node) and is_size(one):
                    yield name, self.labels.binding.extent(value(one))
                else:
                    yield name, one

    def _filled(self, node: fx.Node, marks: Marks) -> set[int]:
        """Sizes of a new tensor that belong to no axis that may shrink: numbers may run to them."""
        sizes = {
            self.labels.extent(axis)
            for axis in self.labels.of[node]
            if not set(self.labels.resolve(axis)) <= self.moving
        }
        return {n for n in sizes if marks.moved(n) is None}


def _step(node: fx.Node) -> int:
    step = arange_bounds(node)[1]
    return step if isinstance(step, int) else 1


def _held(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """What a small constant of the model holds."""
    held = attribute(node)
    if isinstance(held, torch.Tensor) and held.numel() <= MOST_CONSTANTS and not held.is_meta:
        yield from (("", number) for number in held.flatten().tolist())


def _may_be_data(node: fx.Node) -> bool:
    return is_float(node) or dtype_of(node) == torch.uint8


def _varies(node: object) -> bool:
    return isinstance(node, fx.Node) and is_tensor(node) and constant_of(node) is None


def _measured(node: fx.Node) -> bool:
    """Whether a call compares or adds numbers, or gives some to a call that does."""
    if op_name(node) in _MEASURES:
        return True
    passes = node.op == "get_attr" or op_name(node) in _FILLED or op_name(node) in CASTS
    return (passes or op_name(node) == "scalar_tensor" or is_view(node)) and any(
        _measured(user) for user in node.users
    )
