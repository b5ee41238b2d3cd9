"""Read selections: what a top-k or a sort keeps, and who uses what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import (
    CASTS,
    SELECTIONS,
    is_float,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.trace_scores import Refusal


@dataclass(frozen=True)
class Selection:
    """A selection over the last dim of ``score``.

    Attributes:
        node: the top-k or sort.
        score: what it ranks.
        k: positions kept, an int or a size node.
        ordered: whether the scores must come out descending.
        values: nodes that hold the selected scores.
        indices: nodes that hold the selected positions.
    """

    node: fx.Node
    score: fx.Node
    k: fx.Node | int
    ordered: bool
    values: tuple[fx.Node, ...]
    indices: tuple[fx.Node, ...]


def selections(graph: fx.Graph) -> list[fx.Node]:
    """Every top-k, sort or argsort of floating-point numbers along some dim, in graph order."""
    return [n for n in graph.nodes if op_name(n) in SELECTIONS and is_float(n.args[0])]


def _argument(node: fx.Node, name: str, default: object) -> object:
    schema = node.target._schema  # type: ignore[union-attr]
    for at, argument in enumerate(schema.arguments):
        if argument.name == name:
            given = node.args[at] if at < len(node.args) else node.kwargs.get(name)
            return default if given is None else given
    return default


def read_selection(node: fx.Node) -> Selection:
    """The selection that a node makes.

    Raises:
        Refusal: it ranks another dim, keeps the smallest, or uses the whole order.
    """
    score = node.args[0]
    assert isinstance(score, fx.Node)
    rank = value(score).dim()
    if _argument(node, "dim", -1) not in (-1, rank - 1):
        raise Refusal("the selection is not over the last dim", 0)
    if op_name(node) == "topk":
        if not _argument(node, "largest", True):
            raise Refusal("the selection keeps the smallest scores", 0)
        outs = _outputs(node)
        k = node.args[1]
        assert isinstance(k, (int, fx.Node))
        return Selection(node, score, k, bool(_argument(node, "sorted", True)), outs[0], outs[1])
    if not _argument(node, "descending", False):
        raise Refusal("the selection sorts ascending", 0)
    if op_name(node) == "argsort":
        k, indices = _slices([node], rank)
        return Selection(node, score, k, True, (), indices)
    first, second = _outputs(node)
    k, both = _slices([*first, *second], rank)
    values = tuple(n for n in both if n.args[0] in first)
    return Selection(node, score, k, True, values, tuple(n for n in both if n.args[0] in second))


def _outputs(node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    gets = [u for u in node.users if op_name(u) == "getitem"]
    return tuple(g for g in gets if g.args[1] == 0), tuple(g for g in gets if g.args[1] == 1)


def _slices(nodes: list[fx.Node], rank: int) -> tuple[fx.Node | int, tuple[fx.Node, ...]]:
    """The common end of all leading slices that are taken of a sort's outputs."""
    taken = [u for n in nodes for u in n.users]
    ends: list[fx.Node | int] = []
    for use in taken:
        dim = use.args[1] if len(use.args) > 1 else 0
        start = use.args[2] if len(use.args) > 2 else None
        step = use.args[4] if len(use.args) > 4 else 1
        end = use.args[3] if len(use.args) > 3 else None
        leading = (
            op_name(use) == "slice" and dim in (-1, rank - 1) and start in (None, 0) and step == 1
        )
        if not leading or not isinstance(end, (int, fx.Node)):
            raise Refusal("the whole order of the scores is used, not a top-k of it", 0)
        ends.append(end)
    if not ends or any(e is not ends[0] and e != ends[0] for e in ends):
        raise Refusal("the whole order of the scores is used, not a top-k of it", 0)
    extent = value(taken[0]).shape[-1]
    return (extent if isinstance(extent, int) else ends[0]), tuple(taken)


def constant_k(k: fx.Node | int) -> int | None:
    """The constant in ``k`` or ``min(k, T)``; None where there is none."""
    number = value(k)
    if isinstance(number, int):
        return number
    if isinstance(number, torch.SymInt):
        expr = number.node.expr
        parts = (
            list(expr.args)
            if isinstance(expr, sympy.Min) or type(expr).__name__ == "Min"
            else [expr]
        )
        whole = [int(p) for p in parts if p.is_Integer]
        return min(whole) if whole else None
    return None


def same_slots(index: object, selection: Selection) -> bool:
    """Whether a node holds the selection's positions slot by slot (casts, clamps, views)."""
    for _ in range(12):
        if index in selection.indices:
            return True
        if not isinstance(index, fx.Node) or not is_tensor(index):
            return False
        if not (
            is_view(index)
            or op_name(index) in CASTS
            or op_name(index) in ("clamp", "clamp_min", "clamp_max")
        ):
            return False
        index = index.args[0]
    return False
