"""Emit a labelled tensor in a wanted order of axes."""

from __future__ import annotations

import operator

import torch.fx as fx

from dsa_compile.passes.axis_labels import Axes, Axis, Labels
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import aten, is_tensor, value
from dsa_compile.passes.score_trace import Refusal


class Layout:
    """Emits a labelled tensor in a canonical order of axis groups."""

    def __init__(self, labels: Labels, emit: Emitter) -> None:
        self.labels = labels
        self.emit = emit
        self._sizes: dict[int, fx.Node | int] = {}

    def size(self, atom: int) -> fx.Node | int:
        """The size of an atom as an argument, read off a tensor that has it as a whole dim."""
        atom = self.labels.resolve([atom])[0]
        if atom not in self._sizes:
            found = self._read_off([atom])
            if found is None:
                raise Refusal("the size of an axis cannot be read off any tensor", 5)
            self._sizes[atom] = found
        return self._sizes[atom]

    def _read_off(self, wanted: Axis) -> fx.Node | int | None:
        """The size of a dim that carries just these atoms; None where no tensor has one."""
        for node in self.labels.of:
            for dim, axis in enumerate(self.labels.axes(node)):
                if axis == wanted and is_tensor(node):
                    extent = value(node).shape[dim]
                    if isinstance(extent, int):
                        return extent
                    if self._above(node):
                        return self.emit.size(node, dim)
        return None

    def _above(self, node: fx.Node) -> bool:
        return node < self.emit.after or node is self.emit.after

    def group_size(self, atoms: Axis) -> fx.Node | int:
        """The size of a group of atoms as an argument."""
        if len(atoms) > 1 and (whole := self._read_off(self.labels.resolve(atoms))) is not None:
            return whole
        total: fx.Node | int = 1
        for atom in atoms:
            size = self.size(atom)
            if isinstance(total, int) and isinstance(size, int):
                total = total * size
            elif total == 1:
                total = size
            else:
                total = self.emit(operator.mul, total, size)
        return total

    def canonical(self, node: fx.Node, axes: Axes, groups: list[Axis]) -> fx.Node:
        """A tensor with one dim a group, in the groups' order; absent groups have size 1.

        Args:
            node: tensor whose dims carry ``axes``.
            axes: its labels.
            groups: atoms of each wanted dim.

        Raises:
            Refusal: an axis is in no group.
        """
        axes = [self.labels.resolve(a) for a in axes]
        groups = [self.labels.resolve(g) for g in groups]
        flat = [a for axis in axes for a in axis]
        wanted = [a for g in groups for a in g]
        if not set(flat) <= set(wanted) or len(set(flat)) != len(flat):
            raise Refusal("an axis has no place in an indexer's operands", 5)
        in_place = all(not a or a == g and len(g) == 1 for a, g in zip(axes, groups, strict=False))
        if len(axes) == len(groups) and in_place:
            return node
        # Dims of size 1 come and go by squeeze: a reshape of symbolic sizes costs more.
        if all(len(a) <= 1 for a in axes):
            unit = [i for i, a in enumerate(axes) if not a]
            node = self.emit(aten.squeeze.dims, node, unit) if unit else node
        elif flat == wanted:
            return self.emit(aten.reshape.default, node, [self.group_size(g) for g in groups])
        else:
            node = self.emit(aten.reshape.default, node, [self.size(a) for a in flat])
        order = sorted(range(len(flat)), key=lambda i: wanted.index(flat[i]))
        if order != list(range(len(flat))):
            node = self.emit(aten.permute.default, node, order)
        have = [flat[i] for i in order]
        if all(len(g) <= 1 for g in groups):
            for at, group in enumerate(groups):
                if not group or group[0] not in have:
                    node = self.emit(aten.unsqueeze.default, node, at)
            return node
        shape: list[fx.Node | int] = []
        full: list[fx.Node | int] = []
        for group in groups:
            present = [a for a in group if a in have]
            if present and len(present) != len(group):
                full += [self.size(a) for a in group]
                shape += [self.size(a) if a in have else 1 for a in group]
            else:
                shape += [self.size(a) for a in present]
                full += [self.size(a) for a in present]
        if len(shape) != len(have):
            node = self.emit(aten.reshape.default, node, shape)
            node = self.emit(aten.expand.default, node, full)
        merged = [self.group_size(g) if any(a in have for a in g) else 1 for g in groups]
        if [s for s in merged] == full and len(merged) == len(full):
            return node
        return self.emit(aten.reshape.default, node, merged)
