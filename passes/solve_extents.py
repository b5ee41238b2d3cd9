"""What extents follow from the extents of a few axes: through splits, slices, pads and joins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from dsa_compile.passes.axis_labels import Axes, Axis, Labels
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import op_name, value
from dsa_compile.passes.run_probe import ProbeError

NEAR = 8
"""How far from an extent a constant may lie to be read as measured from it."""
LEAST = 256
"""Extents below this are no marks to measure constants from: too much else lies there."""


class Unrestated(ProbeError):
    """A part is not consistent at other extents; the text says why."""


@dataclass(frozen=True)
class Marks:
    """Extents of the graph that constants are measured from, each with what it is elsewhere."""

    pairs: tuple[tuple[int, int], ...]

    def moved(self, number: int) -> int | None:
        """A constant at its distance from the nearest mark; None where it lies at none."""
        size = abs(number)
        close = [p for p in self.pairs if p[0] >= LEAST and abs(size - p[0]) <= NEAR]
        if not close:
            return None
        captured, here = min(close, key=lambda p: abs(size - p[0]))
        return (size - captured + here) * (1 if number > 0 else -1)

    def number(self, number: Any) -> Any:
        """A number as it is elsewhere: at its distance from a mark, or itself."""
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return number
        if not math.isfinite(number) or number != int(number):
            return number
        moved = self.moved(int(number))
        return number if moved is None else type(number)(moved)

    def place(self, number: int, captured: int, here: int) -> int | None:
        """A place along a dim that has another size elsewhere; None where it is at no extent."""
        size = abs(number)
        if size > captured:
            return number
        if size == captured or captured >= LEAST and size >= captured - NEAR:
            return (size - captured + here) * (1 if number > 0 else -1)
        return self.moved(number)


class ExtentSolver:
    """Sizes of all atoms of some labels, from the extents of a few axes.

    An axis shrinks by its outermost atom; the blocks inside it stay. Where nothing says more, a
    size stays too, unless it lies at a mark.
    """

    def __init__(
        self, follower: AxisFollower, extents: list[tuple[Axis, int]], marks: Marks
    ) -> None:
        self.labels: Labels = follower.labels
        self.made, self.marks = follower.made, marks
        self.base: Binding = follower.labels.binding
        self.sizes: dict[int, int] = {}
        for axis, extent in extents:
            self._anchor(axis, extent)

    def solve(self) -> dict[int, int]:
        """The size of every root atom, split ones too.

        Raises:
            Unrestated: the extents contradict each other.
        """
        labels = self.labels
        made = {labels.root(a) for a in self.made}
        atoms = [a for a in range(len(labels.sizes)) if labels.root(a) == a]
        self._propagate()
        for atom in [*(a for a in atoms if a not in made), *made]:
            if atom not in self.sizes:
                self.sizes[atom] = self.marks.number(labels.sizes[atom])
                self._propagate()
        self._verify()
        return self.sizes

    def _anchor(self, axis: Axis, extent: int) -> None:
        first, *rest = self.labels.resolve(axis)
        for atom in rest:
            extent = _share(extent, self.labels.sizes[atom])
            self.sizes.setdefault(atom, self.labels.sizes[atom])
        self.sizes.setdefault(first, extent)

    def _propagate(self) -> None:
        known, captured, root = self.sizes, self.labels.sizes, self.labels.root
        count = -1
        while count != len(known):
            count = len(known)
            for whole, halves in self.labels.children.items():
                outer, inner = map(root, halves)
                if whole in known and outer in known:
                    known.setdefault(inner, _share(known[whole], known[outer]))
                elif whole in known:
                    known.setdefault(inner, captured[inner])
                    known[outer] = _share(known[whole], known[inner])
                elif outer in known:
                    known.setdefault(inner, captured[inner])
                    known[whole] = known[outer] * known[inner]
            for atom, (node, dim) in self.made.items():
                if root(atom) not in known:
                    size = self._size_made(node, dim)
                    if size is not None:
                        known[root(atom)] = size

    def _verify(self) -> None:
        for whole, halves in self.labels.children.items():
            outer, inner = (self.sizes[self.labels.root(a)] for a in halves)
            if self.sizes[whole] != outer * inner:
                raise Unrestated(f"{self.sizes[whole]} is not {outer} blocks of {inner}")
        for atom, (node, dim) in self.made.items():
            size = self.sizes[self.labels.root(atom)]
            if self._size_made(node, dim) != size or size < 2:
                raise Unrestated(f"{op_name(node)} does not give {size} elements")

    def length(self, axis: Axis) -> int | None:
        """The extent of an axis, None where it is not known yet."""
        sizes = [self.sizes.get(a) for a in self.labels.resolve(axis)]
        return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]

    def _size_made(self, node: fx.Node, dim: int) -> int | None:
        """The size of a dim that a slice, a pad or a cat made."""
        sources = node.args[0] if op_name(node) == "cat" else [node.args[0]]
        axes: list[Axes] = [self.labels.of[n] for n in sources]  # type: ignore[union-attr,index]
        before = [self.length(a[dim]) for a in axes]
        if any(n is None for n in before):
            return None
        total = sum(before)  # type: ignore[arg-type]
        if op_name(node) == "slice":
            return self._sliced(node, self.labels.extent(axes[0][dim]), total)
        if op_name(node) == "cat":
            return total
        pads = list(node.args[1])  # type: ignore[arg-type]
        at = 2 * (len(axes[0]) - 1 - dim)
        return total + sum(self.marks.number(self._plain(p)) for p in pads[at : at + 2])

    def _sliced(self, node: fx.Node, captured: int, here: int) -> int:
        ends = [node.args[i] if len(node.args) > i else None for i in (2, 3)]
        step: Any = node.args[4] if len(node.args) > 4 else 1
        places: list[Any] = []
        for end in ends:
            number = self._plain(end)
            moved = None if number is None else self.marks.place(number, captured, here)
            places.append(number if moved is None else moved)
        return len(range(*slice(places[0], places[1], step).indices(here)))

    def _plain(self, number: Any) -> Any:
        """A size node as the number that it is in the graph."""
        return self.base.extent(value(number)) if isinstance(number, fx.Node) else number


def _share(whole: int, part: int) -> int:
    if whole % part:
        raise Unrestated(f"{whole} are no whole number of {part}")
    return whole // part
