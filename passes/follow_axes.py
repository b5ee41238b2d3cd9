"""Follow axes through whole stretches of a graph: masks, counts, tables and block maxima included.

Where :mod:`assign_roles` follows scores alone and refuses what it does not know, here an op that is
not known begins new axes: whoever uses them must check what they give.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axes, Axis, LabelError, Labels
from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    ancestors,
    dtype_of,
    is_tensor,
    is_view,
    op_name,
    selection_root,
)
from dsa_compile.passes.lower_axes import pointwise
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.read_bounds import COUNTS
from dsa_compile.passes.run_probe import needed
from dsa_compile.passes.slot_guards import source_of

SPLITS = frozenset({"unbind", "split", "split_with_sizes", "chunk"})
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "any", "all", "prod", "logsumexp", "argmax", "argmin"}
)
_SCATTERS = frozenset({"scatter", "scatter_add", "scatter_reduce"})
_EXTREMES = frozenset({"max", "min"})
# What the canonical scorer says of its arguments: batch, rows, heads, dims, positions, candidates.
_OPERANDS = {"q": "bshd", "k": "btd", "weights": "bsh", "key_scale": "bt", "row_start": "bs"}
_OPERANDS |= {"row_end": "bs", "mask": "bst", "bias": "bst", "block_ids": "bsc"}


class AxisFollower:
    """Labels nodes in graph order and says of new axes which op gave them their size.

    Attributes:
        labels: of all nodes covered so far.
        made: atom -> the node and dim whose op (slice, pad, cat) says its size.
        picks: axes of selected things: what a selection keeps, the last dim of integers that come
            from outside.
        sources: selection -> the axis that it selects from.
        chosen: selection -> the axes of what it gives.
        version: changes whenever more is known.
    """

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.made: dict[int, tuple[fx.Node, int]] = {}
        self.picks: list[Axis] = []
        self.sources: dict[fx.Node, Axis] = {}
        self.chosen: dict[fx.Node, Axes] = {}
        self.version = 0
        self._run: set[fx.Node] = set()

    def cover(self, targets: Iterable[fx.Node], given: Iterable[fx.Node]) -> None:
        """Label what is run for the targets, given values of some nodes.

        Raises:
            LabelError: axes of different lengths meet.
        """
        known, of = set(given), self.labels.of
        for node in [*sorted(known), *needed(targets, known)]:
            if not is_tensor(node) or node in self._run:
                continue
            begins = node in known or node.op != "call_function"
            if begins and node in of:
                continue
            axes = self._begin(node) if begins else self._follow(node)
            # What another stretch began with may be run in this one.
            of[node] = self.labels.broadcast(of[node], axes) if node in of else axes
            if not begins:
                self._run.add(node)
            self.version += 1

    def meet_call(self, call: fx.Node) -> None:
        """Say what the arguments of a canonical scorer have in common."""
        assert isinstance(call.target, torch._ops.OpOverload)
        names = [a.name for a in call.target._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        letters: dict[str, Axis] = {}
        self.version += 1
        for name, axes in _OPERANDS.items():
            node = given.get(name)
            if isinstance(node, fx.Node) and node in self.labels.of:
                for letter, axis in zip(axes, self.labels.of[node], strict=True):
                    letters[letter] = self.labels.unify(letters.get(letter, []), axis)

    def _begin(self, node: fx.Node) -> Axes:
        """Axes of a tensor whose values are given."""
        root = selection_root(node)
        if root is not None:
            return self._chosen_by(root, node)
        axes = self._fresh(node)
        if len(axes) > 1 and axes[-1] and dtype_of(node) in (torch.int32, torch.int64):
            self.picks.append(axes[-1])
        return axes

    def _fresh(self, node: fx.Node) -> Axes:
        return [self.labels.fresh(s) for s in self.labels.binding.shape(node)]

    def _chosen_by(self, root: fx.Node, node: fx.Node) -> Axes:
        """Axes of what a selection gives: those of its input, and one of what it keeps."""
        if root not in self.chosen:
            source = root.args[0]
            assert isinstance(source, fx.Node)
            axes = list(self.labels.of[source] if source in self.labels.of else self._fresh(source))
            self.sources[root] = axes[-1]
            kept = self.labels.binding.shape(node)[-1]
            if kept != self.labels.extent(axes[-1]):
                axes[-1] = self.labels.fresh(kept)
                self.picks.append(axes[-1])
            self.chosen[root] = axes
        return list(self.chosen[root])

    def _follow(self, node: fx.Node) -> Axes:
        shape = self.labels.binding.shape(node)
        found = self._known(node)
        if found is None or tuple(self.labels.extent(a) for a in found) != shape:
            same = (
                n
                for n in node.all_input_nodes
                if is_tensor(n) and self.labels.binding.shape(n) == shape
            )
            source = next(same, None)
            found = self._fresh(node) if source is None else list(self.labels.of[source])
        return found

    def _known(self, node: fx.Node) -> Axes | None:
        """Axes of the result of an op that is known; None for other ops."""
        labels, name = self.labels, op_name(node)
        source = node.args[0] if node.args else None
        if name == "getitem":
            return self._part(node)
        if name in ("cat", "stack"):
            return self._joined(node)
        if not isinstance(source, fx.Node) or source not in labels.of:
            return labels.elementwise(node) if pointwise(node) else None
        axes = labels.of[source]
        if is_view(node):
            try:
                return labels.view(node, axes)
            except LabelError:
                return None
        if name in CASTS or pointwise(node):
            return labels.elementwise(node)
        if name == "select":
            return labels.piece(node)
        if name in CONTRACTIONS:
            return labels.contract(node)
        if name in _REDUCTIONS:
            return labels.reduce(node, axes)
        if name in ("slice", "pad", "constant_pad_nd"):
            return self._resized(node, axes)
        if name == "index_select":
            dim, index = node.args[1:3]
            assert isinstance(dim, int) and isinstance(index, fx.Node)
            return [*axes[:dim], *(labels.of[index] or [[]]), *axes[dim % len(axes) + 1 :]]
        if name == "one_hot":
            return [*axes, labels.fresh(labels.binding.shape(node)[-1])]
        if name == "gather" or name in _SCATTERS:
            return self._along(node, name == "gather")
        if name in ("index", "index_put", "_unsafe_index_put"):
            return self._indexed(node, name == "index")
        return None

    def _part(self, node: fx.Node) -> Axes | None:
        outer = node.args[0]
        root = selection_root(node)
        if root is not None:
            return self._chosen_by(root, node)
        if not isinstance(outer, fx.Node):
            return None
        name, source = op_name(outer), outer.args[0]
        if name in SPLITS:
            return self.labels.piece(node)
        if name in _EXTREMES:
            return self.labels.reduce(outer, self.labels.of[source])  # type: ignore[index]
        if name == "sort":
            return list(self.labels.of[source])  # type: ignore[index]
        return None

    def _joined(self, node: fx.Node) -> Axes:
        axes = self.labels.join(node)
        if op_name(node) == "cat":
            dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            self._say(axes, node, dim)
        return axes

    def _resized(self, node: fx.Node, axes: Axes) -> Axes:
        """Axes of a slice or of a padded tensor: new ones where the size changes."""
        before = [self.labels.extent(a) for a in axes]
        out = list(axes)
        for dim, size in enumerate(self.labels.binding.shape(node)):
            if size != before[dim]:
                out[dim] = self.labels.fresh(size)
                self._say(out, node, dim)
        return out

    def _say(self, axes: Axes, node: fx.Node, dim: int) -> None:
        if axes[dim]:
            self.made[axes[dim][0]] = (node, dim % len(axes))

    def _along(self, node: fx.Node, gathers: bool) -> Axes:
        """Axes of a gather or scatter along a dim; the other dims run together."""
        source, dim, index = node.args[:3]
        assert isinstance(dim, int) and isinstance(index, fx.Node)
        axes, places = self.labels.of[source], self.labels.of[index]  # type: ignore[index]
        dim = dim % len(axes)
        for at in range(len(axes)):
            if at != dim and self._equal(axes[at], places[at]):
                self.labels.unify(axes[at], places[at])
        self._link(index, axes[dim])
        written = node.args[3] if len(node.args) > 3 else None
        if isinstance(written, fx.Node):
            for one, other in zip(places, self.labels.of[written], strict=True):
                if self._equal(one, other):
                    self.labels.unify(one, other)
        return list(places if gathers else axes)

    def _indexed(self, node: fx.Node, reads: bool) -> Axes | None:
        """Axes of an index by tensors, or of the tensor that is written to by one."""
        places: Any = node.args[1]
        axes = list(self.labels.of[node.args[0]])  # type: ignore[index]
        at = [i for i, n in enumerate(places) if n is not None]
        nodes: list[fx.Node] = [places[i] for i in at]
        if any(dtype_of(n) == torch.bool for n in nodes) or at != list(range(at[0], at[-1] + 1)):
            return None if reads else axes
        for dim, node_at in zip(at, nodes, strict=True):
            own = [a for axis in self.labels.of[node_at] for a in axis]
            if op_name(source_of(node_at)) in COUNTS and self._equal(own, axes[dim]):
                self.labels.unify(own, axes[dim])
            self._link(node_at, axes[dim])
        found = self.labels.broadcast(*(self.labels.of[n] for n in nodes))
        return [*axes[: at[0]], *found, *axes[at[-1] + 1 :]] if reads else axes

    def _link(self, index: fx.Node, axis: Axis) -> None:
        """Indices that a selection gave belong to the axis that it selected from."""
        roots = {selection_root(n) for n in ancestors([index], mask_leaf)} - {None}
        for root in roots:
            source = self.sources.get(root)  # type: ignore[arg-type]
            if len(roots) == 1 and source is not None and self._equal(source, axis):
                self.labels.unify(axis, source)

    def _equal(self, one: Axis, other: Axis) -> bool:
        return self.labels.extent(one) == self.labels.extent(other)
