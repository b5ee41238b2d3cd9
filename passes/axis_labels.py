"""Labels on tensor axes: which axis of which tensor is the same batch, row, head, dim or position.

Every axis is an ordered list of *atoms*. A leaf tensor gets one fresh atom a dim (none for size 1);
ops move, merge, split and identify atoms, and never invent a correspondence. Sizes are concrete
ints under one binding of the graph's symbols, so a ``view`` is plain row-major regrouping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.graph_tools import is_tensor, op_name, same_size, value

Axis = list[int]
Axes = list[Axis]


class LabelError(Exception):
    """An op on the score path whose effect on axes is not known; the text names it."""


@dataclass
class Labels:
    """Atoms of one proposal, with splits and identifications (a union-find with children)."""

    binding: Binding
    sizes: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    children: dict[int, tuple[int, int]] = field(default_factory=dict)
    of: dict[fx.Node, Axes] = field(default_factory=dict)

    def fresh(self, size: int) -> Axis:
        """A new axis of its own; size 1 carries no atom, since it broadcasts."""
        if size == 1:
            return []
        self.sizes.append(size)
        self.parent.append(len(self.parent))
        return [len(self.sizes) - 1]

    def leaf(self, node: fx.Node) -> Axes:
        """Label a tensor with fresh atoms, or give the labels it has."""
        if node not in self.of:
            self.of[node] = [self.fresh(s) for s in self.binding.shape(node)]
        return self.of[node]

    def root(self, atom: int) -> int:
        """The atom that stands for all that were identified with one."""
        while self.parent[atom] != atom:
            atom = self.parent[atom]
        return atom

    def resolve(self, axis: Sequence[int]) -> Axis:
        """The axis in atoms that are not split further."""
        out: Axis = []
        for atom in axis:
            root = self.root(atom)
            out += self.resolve(self.children[root]) if root in self.children else [root]
        return out

    def axes(self, node: fx.Node) -> Axes:
        """Resolved labels of a labelled node."""
        return [self.resolve(a) for a in self.of[node]]

    def extent(self, axis: Sequence[int]) -> int:
        """Number of elements along an axis."""
        total = 1
        for atom in self.resolve(axis):
            total *= self.sizes[atom]
        return total

    def _split(self, atom: int, outer: int) -> None:
        if self.sizes[atom] % outer:
            raise LabelError(f"a view cuts an axis of {self.sizes[atom]} at {outer}")
        first, second = self.fresh(outer), self.fresh(self.sizes[atom] // outer)
        self.children[atom] = (first[0], second[0])

    def unify(self, a: Axis, b: Axis) -> Axis:
        """Say that two axes run together (or one of them broadcasts)."""
        left, right = self.resolve(a), self.resolve(b)
        if not left or not right:
            return left or right
        out: Axis = []
        while left and right:
            x, y = left[0], right[0]
            if x == y or self.sizes[x] == self.sizes[y]:
                if x != y:
                    self.parent[y] = x
                out.append(x)
                left, right = left[1:], right[1:]
                continue
            big, small = (x, y) if self.sizes[x] > self.sizes[y] else (y, x)
            self._split(big, self.sizes[small])
            left, right = self.resolve(left), self.resolve(right)
        if left or right:
            raise LabelError("two axes of different length meet")
        return out

    def broadcast(self, *operands: Axes) -> Axes:
        """Labels of an elementwise result."""
        rank = max(len(o) for o in operands)
        out: Axes = [[] for _ in range(rank)]
        for operand in operands:
            for i, axis in enumerate(operand):
                at = rank - len(operand) + i
                out[at] = self.unify(out[at], axis)
        return out

    def regroup(self, axes: Axes, shape: Sequence[int], *, whole: bool = False) -> Axes:
        """Labels after a row-major ``view`` to a shape; ``whole`` forbids splitting an axis."""
        flat = [a for axis in axes for a in self.resolve(axis)]
        out: Axes = []
        for size in shape:
            group: Axis = []
            have = 1
            while have < size:
                if not flat:
                    raise LabelError("a view makes more elements than it has")
                atom = flat[0]
                if have * self.sizes[atom] > size:
                    if size % have or whole:
                        raise LabelError(f"a view to {tuple(shape)} does not follow any axis")
                    self._split(atom, size // have)
                    flat = self.resolve(flat)
                    continue
                group.append(atom)
                have *= self.sizes[atom]
                flat = flat[1:]
            out.append(group)
        if flat:
            raise LabelError("a view drops elements")
        return out

    # -- transfer functions -------------------------------------------------------------------

    def einsum(self, equation: str, operands: list[Axes]) -> Axes:
        """Labels of an einsum; equal letters run together."""
        left, _, right = equation.replace(" ", "").partition("->")
        letters: dict[str, Axis] = {}
        terms = left.split(",")
        for term, axes in zip(terms, operands, strict=True):
            names = _letters(term, len(axes))
            for name, axis in zip(names, axes, strict=True):
                letters[name] = self.unify(letters.get(name, []), axis)
        if "->" not in equation:
            counts = {c: left.count(c) for c in left if c.isalpha()}
            right = ("..." if "..." in left else "") + "".join(
                sorted(c for c, n in counts.items() if n == 1)
            )
        rank = len([c for c in right if c.isalpha()])
        dots = [c for c in letters if c.startswith(".")]
        return [letters[n] for n in _letters(right, rank + len(dots))]

    def contract(self, node: fx.Node) -> Axes:
        """Labels of a matrix product."""
        name = op_name(node)
        if name == "einsum":
            operands = [self.of[n] for n in _nodes(node.args[1])]
            return self.einsum(str(node.args[0]), operands)
        first = 1 if name in ("addmm", "baddbmm") else 0
        a, b = (self.of[n] for n in node.args[first : first + 2])  # type: ignore[index]
        if name == "linear":
            self.unify(a[-1], b[-1])
            return a[:-1] + ([b[0]] if len(b) == 2 else [])
        if len(b) == 1:
            self.unify(a[-1], b[0])
            return a[:-1]
        if len(a) == 1:
            self.unify(a[0], b[-2])
            return b[:-2] + [b[-1]]
        self.unify(a[-1], b[-2])
        return [*self.broadcast(a[:-2], b[:-2]), a[-2], b[-1]]

    def view(self, node: fx.Node, axes: Axes) -> Axes:
        """Labels of a view-like op, from its input's."""
        name, args = op_name(node), node.args
        rank = len(axes)
        if name == "permute":
            return [axes[d] for d in _ints(args[1])]
        if name in ("transpose", "t", "numpy_T", "mT"):
            i, j = (args[1], args[2]) if name == "transpose" else (-2, -1)
            if rank < 2:
                return axes
            out = list(axes)
            out[i], out[j] = out[j], out[i]  # type: ignore[index]
            return out
        if name == "repeat":
            counts = _ints(args[1])
            axes = [[] for _ in range(len(counts) - rank)] + axes
            sizes = zip(axes, self.binding.shape(node), strict=True)
            return [[*self.fresh(size // self.extent(a)), *a] for a, size in sizes]
        if name == "repeat_interleave":
            dim = args[2] if len(args) > 2 else node.kwargs.get("dim")
            if str(node.target) != "aten.repeat_interleave.self_int" or not isinstance(dim, int):
                raise LabelError("a repeat_interleave by a tensor")
            out = list(axes)
            out[dim] = [
                *out[dim],
                *self.fresh(self.binding.shape(node)[dim] // self.extent(out[dim])),
            ]
            return out
        if name == "expand":
            shape = self.binding.shape(node)
            axes = [[] for _ in range(len(shape) - rank)] + axes
            return [
                axis if axis or size == 1 else self.fresh(size)
                for axis, size in zip(axes, shape, strict=True)
            ]
        if name in (
            "unsqueeze",
            "squeeze",
            "view",
            "_unsafe_view",
            "reshape",
            "flatten",
            "unflatten",
        ):
            return self.regroup(axes, self.binding.shape(node))
        return axes

    def piece(self, node: fx.Node) -> Axes | None:
        """Labels of a part of a tensor along one dim (select, slice, split, unbind), else None."""
        name = op_name(node)
        source = node.args[0]
        if name == "getitem" and op_name(source) in (
            "unbind",
            "split",
            "split_with_sizes",
            "chunk",
        ):
            outer = source
            source = outer.args[0]  # type: ignore[union-attr]
            dim_at = 1 if op_name(outer) == "unbind" else 2
            dim = _argument(outer, dim_at, "dim", 0)  # type: ignore[arg-type]
            name = "select" if op_name(outer) == "unbind" else "slice"
        elif name in ("select", "slice"):
            dim = _argument(node, 1, "dim", 0)
        else:
            return None
        axes = list(self.of[source])  # type: ignore[index]
        dim = dim % len(axes)
        if name == "select":
            return axes[:dim] + axes[dim + 1 :]
        whole = name == "slice" and op_name(node) == "slice"
        if not whole or not same_size(value(node).shape[dim], value(source).shape[dim]):
            axes[dim] = self.fresh(self.binding.shape(node)[dim])
        return axes

    def reduce(self, node: fx.Node, axes: Axes) -> Axes:
        """Labels of a sum or mean over dims."""
        dims = _argument(node, 1, "dim", None)
        keep = bool(_argument(node, 2, "keepdim", False))
        dims = range(len(axes)) if dims is None else [dims] if isinstance(dims, int) else dims
        gone = {d % len(axes) for d in dims}
        return [[] if i in gone else a for i, a in enumerate(axes) if keep or i not in gone]

    def join(self, node: fx.Node) -> Axes:
        """Labels of cat and stack; the joined dim is an axis of its own."""
        parts = [self.of[n] for n in _nodes(node.args[0])]
        shape = self.binding.shape(node)
        dim = _argument(node, 1, "dim", 0) % len(shape)
        if op_name(node) == "cat":
            parts = [p[:dim] + [[]] + p[dim + 1 :] for p in parts]
        else:
            parts = [p[:dim] + [[]] + p[dim:] for p in parts]
        axes = self.broadcast(*parts)
        axes[dim] = self.fresh(shape[dim])
        return axes

    def elementwise(self, node: fx.Node) -> Axes:
        """Labels of an elementwise op; operands without labels must be scalars."""
        operands = [self.of[n] for n in node.all_input_nodes if is_tensor(n) and n in self.of]
        return self.broadcast(*operands) if operands else []


def _ints(argument: Any) -> list[int]:
    return list(argument)


def _nodes(argument: Any) -> list[fx.Node]:
    return list(argument)


def _letters(term: str, rank: int) -> list[str]:
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    dots = rank - len(before) - len(after)
    return [*before, *(f".{dots - i}" for i in range(dots)), *after]


def _argument(node: fx.Node, at: int, name: str, default: object) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)
