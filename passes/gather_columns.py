"""Evaluate a mask at chosen columns only, without building it over the whole context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.axis_labels import Axes, Axis, Labels
from dsa_compile.passes.graph_tools import CASTS, aten, dtype_of, is_tensor, is_view, op_name, value
from dsa_compile.passes.lower_axes import lower_axes, pointwise
from dsa_compile.passes.read_bounds import COUNTS, arange_bounds
from dsa_compile.passes.recognise_ops import constant_of


@dataclass(frozen=True)
class Frame:
    """Axes of a canonical ``[B, S, T]`` mask."""

    labels: Labels
    batch: Axis
    rows: Axis
    positions: Axis


class ColumnGatherer:
    """Re-emits a mask's expression with its position axis replaced by gathered columns.

    Elementwise ops are re-applied to gathered operands, so that a mask made of positions and
    lengths costs ``rows * columns`` and never ``rows * context``. A tensor that exists anyway (a
    mask given as an input) is gathered.

    Args:
        layout: emits in canonical order.
        roles: the site's axes.
        columns: int64 node ``[B, S, W]`` of positions.
    """

    def __init__(self, layout: Layout, roles: Frame, columns: fx.Node) -> None:
        self.layout, self.roles, self.columns = layout, roles, columns
        self.emit = layout.emit
        self._done: dict[tuple[fx.Node, str], fx.Node] = {}

    def gather(self, node: fx.Node, axes: Axes) -> fx.Node:
        """The node at the columns, broadcastable to ``[B, S, W]``."""
        # The same tensor may be read both ways round (a mask and its transpose).
        key = (node, str([self.roles.labels.resolve(a) for a in axes]))
        if key not in self._done:
            self._done[key] = self._gather(node, axes)
        return self._done[key]

    def _gather(self, node: fx.Node, axes: Axes) -> fx.Node:
        roles, name = self.roles, op_name(node)
        flat = {a for axis in axes for a in roles.labels.resolve(axis)}
        if not flat & set(roles.positions):
            if not flat and value(node).dim() == 0:
                return node
            return self.layout.canonical(node, axes, [roles.batch, roles.rows, []])
        has_rows = bool(flat & set(roles.rows))
        if name in COUNTS and flat == set(roles.positions):
            start, step = arange_bounds(node)
            if step == 1 and isinstance(start, int):
                found = (
                    self.columns if not start else self.emit(aten.add.Scalar, self.columns, start)
                )
                if dtype_of(node) != torch.int64:
                    found = self.emit(aten._to_copy.default, found, dtype=dtype_of(node))
                return found
        lowered = lower_axes(roles.labels, node, axes) if node.op == "call_function" else None
        if has_rows and lowered is not None:
            if is_view(node) or name == "slice":
                return self.gather(node.args[0], lowered[node.args[0]])  # type: ignore[arg-type,index]
            if name in CASTS:
                inner = self.gather(node.args[0], lowered[node.args[0]])  # type: ignore[arg-type,index]
                return self.emit(aten._to_copy.default, inner, dtype=dtype_of(node))
            if pointwise(node) or name in ("where", "masked_fill"):
                return self._again(node, lowered)
        canonical = self.layout.canonical(node, axes, [roles.batch, roles.rows, roles.positions])
        lead = [self.emit.size(self.columns, d) for d in (0, 1)]
        whole = self.emit(
            aten.expand.default, canonical, [*lead, self.layout.group_size(roles.positions)]
        )
        return self.emit(aten.gather.default, whole, -1, self.columns)

    def _again(self, node: fx.Node, lowered: dict[fx.Node, Axes]) -> fx.Node:
        """The same elementwise op on gathered operands."""

        def swap(arg: fx.Node) -> fx.Node:
            if not is_tensor(arg) or constant_of(arg) is not None and value(arg).dim() == 0:
                return arg
            return self.gather(arg, lowered[arg])

        args = fx.map_arg(node.args, swap)
        kwargs = fx.map_arg(node.kwargs, swap)
        return self.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
