"""Read selections: what a top-k or a sort keeps, and who uses what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import (
    CASTS,
    SELECTIONS,
    is_float,
    is_tensor,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.score_trace import Refusal


@dataclass(frozen=True)
class Selection:
    """A selection over the last dim of ``score``.

    Attributes:
        node: the top-k or sort.
        score: what it ranks.
        k: positions kept, an int or a size node.
        ordered: whether the scores must come out descending.
        stable: whether equal scores must come out by position, hidden ones too.
        values: nodes that hold the selected scores.
        indices: nodes that hold the selected positions.
    """

    node: fx.Node
    score: fx.Node
    k: fx.Node | int
    ordered: bool
    stable: bool
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
        ordered = bool(_argument(node, "sorted", True))
        return Selection(node, score, k, ordered, False, outs[0], outs[1])
    if not _argument(node, "descending", False):
        raise Refusal("the selection sorts ascending", 0)
    stable = bool(_argument(node, "stable", False))
    if op_name(node) == "argsort":
        k, indices = _slices([node], rank)
        return Selection(node, score, k, True, stable, (), indices)
    first, second = _outputs(node)
    k, both = _slices([*first, *second], rank)
    values = tuple(n for n in both if n.args[0] in first)
    indices = tuple(n for n in both if n.args[0] in second)
    return Selection(node, score, k, True, stable, values, indices)


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
        if isinstance(value(end), int) and value(end) < 0:
            raise Refusal("the whole order of the scores is used, not a top-k of it", 0)
        if isinstance(value(end), torch.SymInt) and _may_be_negative(end):
            raise Refusal("the end of the slice of a sort may be negative", 0)
        ends.append(end)
    if not ends or any(e is not ends[0] and e != ends[0] for e in ends):
        raise Refusal("the whole order of the scores is used, not a top-k of it", 0)
    extent = value(taken[0]).shape[-1]
    return (extent if isinstance(extent, int) else ends[0]), tuple(taken)


def _may_be_negative(size: object) -> bool:
    """Whether a size is written as a difference, so that it could count from the end."""
    return op_name(size) in ("sub", "neg")


def constant_k(k: fx.Node | int) -> int | None:
    """The constant in ``k`` or ``min(k, T)``; None where there is none."""
    return constant_size(value(k))


def constant_size(number: object) -> int | None:
    """The constant of a size ``n`` or ``min(n, ...)``; None where there is none."""
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


def ranked_scores(node: fx.Node, scores: set[fx.Node]) -> fx.Node | None:
    """The scores, ranked by another selection, whose maxima over blocks a selection ranks."""
    stack: list[object] = [node.args[0]]
    seen: set[fx.Node] = set()
    while stack:
        top = stack.pop()
        if not isinstance(top, fx.Node) or top in seen or len(seen) > 48:
            continue
        seen.add(top)
        if top in scores and top is not node.args[0]:
            return top if any(op_name(n) in ("amax", "max") for n in seen) else None
        if is_float(top) or op_name(top) == "max":
            stack.extend(n for n in top.all_input_nodes if selection_root(n) is None)
    return None


@dataclass(frozen=True)
class Picked:
    """A gather at the selected positions; ``order`` re-orders slots, None where it keeps them."""

    node: fx.Node
    order: fx.Node | None


def picked(gather: fx.Node, selection: Selection) -> Picked | None:
    """Read ``gather(x, -1, positions)`` where the positions are those selected, else None.

    Casts to integer and clamps that cannot change a position are looked through, and one sort of
    the positions.
    """
    rank = value(gather.args[0]).dim()
    if op_name(gather) != "gather" or gather.args[1] not in (-1, rank - 1):
        return None
    index: Any = gather.args[2]
    order: Any = None
    for _ in range(12):
        if index in selection.indices:
            return Picked(gather, order)
        if not isinstance(index, fx.Node):
            return None
        name = op_name(index)
        if (
            name == "getitem"
            and op_name(index.args[0]) == "sort"
            and index.args[1] == 0
            and not order
        ):
            order = index.args[0]
            assert isinstance(order, fx.Node)
            if not _sorts_last(order):
                return None
            index = order.args[0]
        elif name in CASTS and is_tensor(index) and not is_float(index):
            index = index.args[0]
        elif name in ("clone", "alias", "detach") or _harmless_clamp(index, selection):
            index = index.args[0]
        else:
            return None
    return None


def _sorts_last(node: object) -> bool:
    assert isinstance(node, fx.Node)
    return _argument(node, "dim", -1) in (-1, value(node.args[0]).dim() - 1)


def _harmless_clamp(node: fx.Node, selection: Selection) -> bool:
    """A clamp to bounds that hold every position anyway."""
    name = op_name(node)
    if name not in ("clamp", "clamp_min", "clamp_max"):
        return False
    low = node.args[1] if name != "clamp_max" and len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[-1] if name == "clamp_max" else None
    if name == "clamp":
        high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    if low is not None and not (isinstance(low, int) and low <= 0):
        return False
    if high is None:
        return True
    extent, limit = value(selection.score).shape[-1], value(high)
    if isinstance(extent, int):
        return isinstance(limit, int) and limit >= extent - 1
    if not isinstance(limit, torch.SymInt):
        return False
    slack = sympy.simplify(limit.node.expr - extent.node.expr + 1)
    return bool(slack.is_nonnegative)
