"""Published candidate ids as a consumer's mask reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.axis_labels import Axes
from dsa_compile.passes.graph_tools import ancestors, aten, is_tensor, selection_root
from dsa_compile.passes.mask_terms import mask_leaf


@dataclass(frozen=True)
class Located:
    """Candidates of a cone by index; ``lead`` says which order of rows the ids have."""

    ids: int
    valid: int | None
    order: int
    block_size: int

    def at(self, cone: list[fx.Node], roles: Roles) -> Candidates:
        """The candidates that this describes in a cone equal to the one it was found in."""
        ids = cone[self.ids]
        shape = roles.labels.binding.shape(ids)
        axes = lead_axes(roles, shape, self.order)
        valid = None if self.valid is None else cone[self.valid]
        labels = (*(tuple(a) for a in axes), ())
        return Candidates(ids, valid, labels, self.block_size, root_of(ids), self.order)


@dataclass(frozen=True)
class Candidates:
    """The ids behind a membership term.

    Attributes:
        ids: integer node, its last dim the published ids.
        valid: boolean node of the same shape, True where an id is used; None if ids say it (< 0).
        axes: atoms of the ids' dims.
        block_size: positions a block.
        root: the selection that made the ids in this graph, None where they come from outside.
        order: which of the possible orders of rows the leading dims have.
    """

    ids: fx.Node
    valid: fx.Node | None
    axes: tuple[tuple[int, ...], ...]
    block_size: int
    root: fx.Node | None
    order: int

    def located(self, cone: list[fx.Node]) -> Located:
        """The same finding by places in a cone, so that it serves an equal cone elsewhere."""
        where = {n: i for i, n in enumerate(cone)}
        valid = None if self.valid is None else where[self.valid]
        return Located(where[self.ids], valid, self.order, self.block_size)

    def origin_note(self) -> tuple[str, ...]:
        """Says so where the ids were published in another graph."""
        if self.root is not None:
            return ()
        given = [n for n in ancestors([self.ids]) if n.op == "placeholder" and is_tensor(n)]
        if not given:
            return ()
        names = ", ".join(sorted(n.name for n in given))
        return (f"the candidates come into the graph as an input ({names}), and are proven on it",)

    def emit(self, layout: Layout, roles: Roles) -> fx.Node:
        """The ids as one ``[B|1, S|1, C]`` node, -1 where unused."""
        node = self.ids
        if self.valid is not None:
            node = layout.emit(aten.where.ScalarOther, self.valid, node, -1)
        axes: Axes = [list(a) for a in self.axes]
        return layout.canonical(node, axes, [roles.batch, roles.rows, axes[-1]])


def orders(roles: Roles, rank: int) -> list[Axes]:
    """Ways in which leading dims of ids may be the rows of the scores."""
    canonical = [[a] for a in [*roles.batch, *roles.rows]]
    options: list[Axes] = [roles.lead, canonical, canonical[::-1], [[*roles.batch, *roles.rows]]]
    out: list[Axes] = []
    for option in options:
        for short in (option, [[]] * (rank - len(option)) + option):
            if len(short) == rank and short not in out:
                out.append(short)
    return out


def lead_axes(roles: Roles, shape: tuple[int, ...], order: int) -> Axes:
    lead = orders(roles, len(shape) - 1)[order]
    return [a if s != 1 else [] for a, s in zip(lead, shape[:-1], strict=True)]


def root_of(ids: fx.Node) -> fx.Node | None:
    roots = {selection_root(n) for n in ancestors([ids], mask_leaf)} - {None}
    return roots.pop() if len(roots) == 1 else None


def with_atom(found: Candidates, roles: Roles) -> Candidates:
    """The same candidates with an atom for the axis of ids, so that it can be laid out."""
    width = roles.labels.binding.shape(found.ids)[-1]
    axis = roles.labels.fresh(width)
    axes: Axes = [*(list(a) for a in found.axes[:-1]), axis]
    roles.labels.of.setdefault(found.ids, axes)
    return replace(found, axes=tuple(tuple(a) for a in axes))
