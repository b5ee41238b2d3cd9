"""Restate static sizes: show the part of a graph that a proof runs as one of a family of sizes.

A graph captured with a cache of a million positions could only be run at that size. Its axes say
which extents are positions, rows, batch items and picks. A *member* is the same part at other
extents: dims follow their axes, and a constant that lies at an extent (T, T - 1, T - rows, T / 8
and their neighbours) keeps its distance from it. The member at the captured extents is therefore
the captured part itself, and what is proven on small members is proven as it is for dynamic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axis, LabelError
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import op_name, value
from dsa_compile.passes.read_bounds import COUNTS
from dsa_compile.passes.solve_extents import ExtentSolver, Marks, Unrestated

_SHAPES = frozenset({"size", "shape", "sizes", "repeats", "length"})
DIMS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "split_size"})
DIMS |= {"split_sizes", "output_size", "step", "alpha", "implicit"}
_SLICES = frozenset({"slice", "select", "slice_scatter", "select_scatter"})
MOST_CONSTANTS = 4096
"""Elements of a constant of the model that is looked through for extents."""


class Member(Binding):
    """A part at other extents: sizes, arguments and constants of its nodes.

    Args:
        follower: labels of the part at the captured sizes.
        extents: axes and their extents here; those of other axes follow.
        marks: what constants are measured from.

    Attributes:
        name: the extents in words.
    """

    name = ""

    def __init__(
        self, follower: AxisFollower, extents: list[tuple[Axis, int]], marks: Marks
    ) -> None:
        super().__init__(dict(follower.labels.binding.numbers))
        self.follower, self.labels = follower, follower.labels
        self.base = follower.labels.binding
        self.extents, self.marks = extents, marks
        self._sizes: dict[int, int] = {}
        self._version = -1

    def cover(
        self, targets: Iterable[fx.Node], given: Iterable[fx.Node], call: fx.Node | None = None
    ) -> None:
        try:
            self.follower.cover(targets, given)
            if call is not None:
                self.follower.meet_call(call)
        except LabelError as error:
            raise Unrestated(f"axes cannot be followed: {error}") from None

    def extent(self, size: Any) -> Any:
        found = self.base.extent(size)
        return found if found is size else self.marks.number(found)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        if node not in self.labels.of:
            raise Unrestated(f"the axes of {node.name} are not known")
        return tuple(self._length(axis) for axis in self.labels.of[node])

    def selected(self, root: fx.Node) -> tuple[tuple[int, ...], int]:
        shape = tuple(self._length(axis) for axis in self.follower.chosen[root])
        return shape, self._length(self.follower.sources[root])

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.args, dict(node.kwargs)
        names = [a.name for a in node.target._schema.arguments]
        args = [self._argument(node, n, a) for n, a in zip(names, node.args, strict=False)]
        return tuple(args), {n: self._argument(node, n, a) for n, a in node.kwargs.items()}

    def constant(self, node: fx.Node, held: torch.Tensor) -> torch.Tensor:
        if held.dtype == torch.bool or held.is_floating_point() and held.numel() > 1:
            return held
        if held.is_complex() or held.numel() > MOST_CONSTANTS:
            raise Unrestated(f"the constant {node.name} may hold extents")
        flat = [self.marks.number(n) for n in held.flatten().tolist()]
        return torch.tensor(flat, dtype=held.dtype).reshape(held.shape)

    def check(self, node: fx.Node, found: Any) -> None:
        if isinstance(found, torch.Tensor) and tuple(found.shape) != self.shape(node):
            raise Unrestated(
                f"{op_name(node) or node.name} gives {tuple(found.shape)} where its axes say "
                f"{self.shape(node)}"
            )

    def moved(self, node: fx.Node, name: str, number: int) -> int | None:
        """A constant of a call here; None where it lies at no extent."""
        if op_name(node) in _SLICES and name in ("start", "end", "index"):
            source, dim = node.args[0], argument(node, 1, "dim", 0)
            assert isinstance(source, fx.Node)
            return self.marks.place(number, self.base.shape(source)[dim], self.shape(source)[dim])
        return self.marks.moved(number)

    def _argument(self, node: fx.Node, name: str, held: Any) -> Any:
        if is_shape(node, name):
            return self._shape_argument(node, held)
        if name in DIMS or isinstance(held, (bool, fx.Node)):
            return held
        if op_name(node) == "arange" and name == "end":
            start, step = _start(node)
            return self._argument(node, "start", start) + self.shape(node)[0] * step
        if isinstance(held, (list, tuple)):
            return type(held)(self._argument(node, name, h) for h in held)
        if isinstance(held, int):
            moved = self.moved(node, name, held)
            return held if moved is None else moved
        return self.marks.number(held)

    def _shape_argument(self, node: fx.Node, held: Any) -> Any:
        shape, op = self.shape(node), op_name(node)
        if op in COUNTS:
            return shape[0]
        if op == "repeat":
            before = self.shape(node.args[0])  # type: ignore[arg-type]
            before = (1,) * (len(shape) - len(before)) + before
            return [n // b for n, b in zip(shape, before, strict=True)]
        if op == "unflatten":
            dim = argument(node, 1, "dim", 0) % value(node.args[0]).dim()
            return list(shape[dim : dim + len(held)])
        return list(shape)

    def _length(self, axis: Axis) -> int:
        if self._version != self.follower.version:
            self._sizes = ExtentSolver(self.follower, self.extents, self.marks).solve()
            self._version = self.follower.version
        return math.prod(self._sizes[a] for a in self.labels.resolve(axis))


def is_shape(node: fx.Node, name: str) -> bool:
    """Whether an argument says the shape of a result."""
    return name in _SHAPES and op_name(node) != "repeat_interleave"


def argument(node: fx.Node, at: int, name: str, default: Any) -> Any:
    """An argument of a call by place or name."""
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def _start(node: fx.Node) -> tuple[Any, Any]:
    """Start and step of an ``aten.arange`` with an end."""
    if str(node.target).endswith("arange.default"):
        return 0, 1
    return node.args[0], argument(node, 2, "step", 1)
