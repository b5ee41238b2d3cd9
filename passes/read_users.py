"""Read who uses a site's scores besides its own selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.graph_tools import is_view, op_name, where_in_model
from dsa_compile.passes.match_publishers import Publisher, read_publisher
from dsa_compile.passes.read_selection import Picked, Selection, picked
from dsa_compile.passes.score_trace import MaskEvent, Refusal, ScoreTrace
from dsa_compile.passes.slot_guards import Guards
from dsa_compile.passes.split_masks import Masks


@dataclass(frozen=True)
class Users:
    """Readers of the scores.

    Attributes:
        publisher: what makes candidate blocks of them, if anything.
        guards: nodes that tell found slots from empty ones.
        gathers: reads of the scores at the selected positions.
    """

    publisher: Publisher | None
    guards: Guards
    gathers: tuple[Picked, ...]


def read_users(selection: Selection, trace: ScoreTrace, roles: Roles, masks: Masks) -> Users:
    """Who else reads the scores: gathers at the picks, a publisher, or one that forbids it.

    Raises:
        Refusal: a reader needs the scores themselves.
    """
    gathers = _picks(selection, [trace.score])
    seen = [n for e in trace.masks if (n := _visibility(e)) is not None]
    flags = [
        pick
        for pick in _picks(selection, list(dict.fromkeys(seen)))
        if len(trace.masks) == 1 or _implies(pick.node.args[0], masks)
    ]
    guards = Guards(
        frozenset({*selection.values, *(p.node for p in gathers)}),
        frozenset(p.node for p in flags),
        frozenset(p.node for p in [*gathers, *flags] if p.order is not None),
        masks.floor,
        masks.exact,
        roles.labels.binding,
    )
    own = {selection.node, *(p.node for p in gathers)}
    extra = [u for u in trace.score.users if u not in own and not _only_shape(u)]
    for node in trace.path:
        if node is trace.score:
            continue
        for user in node.users:
            read = not (user in trace.path or _only_shape(user) or _own_compare(user, trace))
            if read and selection.node is not user:
                raise Refusal(
                    f"its scores are also used by {op_name(user) or user.op} at "
                    f"{where_in_model(user)}",
                    6,
                )
    if not extra:
        return Users(None, guards, tuple(gathers))
    return Users(read_publisher(trace.score, extra), guards, tuple(gathers))


def _picks(selection: Selection, sources: list[fx.Node]) -> list[Picked]:
    users = [u for n in sources for u in n.users if op_name(u) == "gather" and u.args[0] is n]
    return [p for u in users if (p := picked(u, selection)) is not None]


def _own_compare(user: fx.Node, trace: ScoreTrace) -> bool:
    """A comparison that belongs to a relu spelled ``where(x > 0, x, 0)``."""
    return op_name(user) in ("gt", "ge", "lt", "le") and all(u in trace.path for u in user.users)


def _visibility(event: MaskEvent) -> fx.Node | None:
    """The boolean node that is True where a mask shows a position, if there is one."""
    if event.kind == "show":
        return event.mask
    negated = op_name(event.mask) in ("bitwise_not", "logical_not")
    source = event.mask.args[0] if negated and event.kind == "hide" else None
    return source if isinstance(source, fx.Node) else None


def _implies(node: object, masks: Masks) -> bool:
    """Whether a conjunction holds the candidate term among its parts."""
    wanted = {t.node for t in masks.candidate if t.want}
    stack, seen = [node], 0
    while stack and seen < 24:
        top, seen = stack.pop(), seen + 1
        if not isinstance(top, fx.Node):
            continue
        if top in wanted:
            return True
        if (
            op_name(top) in ("bitwise_and", "logical_and")
            or is_view(top)
            or op_name(top) == "slice"
        ):
            stack.extend(top.all_input_nodes)
    return False


def _only_shape(user: fx.Node) -> bool:
    """Users that read sizes or fill a tensor of the same shape, not scores."""
    return op_name(user) in (
        "sym_size",
        "full_like",
        "zeros_like",
        "ones_like",
        "empty_like",
        "_assert_tensor_metadata",
        "new_full",
        "new_zeros",
        "new_ones",
        "new_empty",
        "dim",
        "sym_numel",
    )
