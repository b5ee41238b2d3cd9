"""Decide whether slots that found nothing could show a model what the sparse form would hide.

The rewritten selection fills such slots with hidden positions, which is one of the outcomes that a
dense top-k may have. A consumer whose model tells empty slots by index, not by score, would in the
dense form go on to attend positions outside its candidates; it is left alone unless that provably
cannot happen.
"""

from __future__ import annotations

import torch.fx as fx

from dsa_compile.passes.graph_tools import CASTS, SELECTIONS, is_tensor, is_view, op_name, value
from dsa_compile.passes.prove_candidates import Candidates
from dsa_compile.passes.read_selection import Selection, constant_k, constant_size
from dsa_compile.passes.trace_scores import Refusal

_PASSING = frozenset(
    {"add", "sub", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "select", "slice"}
)
_COMPARES = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def unguarded_use(selection: Selection, guards: set[fx.Node]) -> fx.Node | None:
    """A use of the positions that no test of the scores (or of full visibility) guards.

    Args:
        selection: whose positions are followed.
        guards: nodes that tell a found slot from an empty one: the selected scores, and gathers of
            scores or of the complete visibility at the selected positions.
    """
    seen: set[fx.Node] = set()
    stack: list[fx.Node] = list(selection.indices)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            name = op_name(user)
            if user in guards or name in _COMPARES:
                continue
            if name in ("where", "masked_fill"):
                cond = user.args[0] if name == "where" else user.args[1]
                if _depends(cond, guards):
                    continue
                return user
            if name == "scatter" and len(user.args) > 3 and _depends(user.args[3], guards):
                continue
            if name == "gather" and not user.users:
                continue
            if (
                is_view(user)
                or name in CASTS
                or name in _PASSING
                or name in SELECTIONS
                or name == "getitem"
            ):
                stack.append(user)
                continue
            return user
    return None


def _depends(node: object, guards: set[fx.Node]) -> bool:
    stack: list[object] = [node]
    seen: set[fx.Node] = set()
    while stack:
        top = stack.pop()
        if not isinstance(top, fx.Node) or top in seen or len(seen) > 40:
            continue
        if top in guards:
            return True
        seen.add(top)
        if is_tensor(top):
            stack.extend(top.all_input_nodes)
    return False


def check_leak(
    selection: Selection,
    candidates: Candidates,
    guards: set[fx.Node],
    *,
    only_end_bound: bool,
    has_start_bound: bool,
) -> str:
    """Prove that the model's own rule for empty slots cannot show positions outside candidates.

    A row whose candidates hold fewer visible positions than ``k`` has empty slots. With ``n``
    published blocks of ``b``, all full but the newest (which holds at least one position), a row
    with more visible positions than that has at least ``(n - 1) * b + 1`` of them inside.

    Returns:
        A note for the report.

    Raises:
        Refusal: a use is unguarded and the inequality does not hold or cannot be proven.
    """
    use = unguarded_use(selection, guards)
    if use is None:
        return "empty slots are told by their scores"
    text = f"the model tells empty slots by index ({op_name(use)}), not by score"
    if candidates.root is None:
        raise Refusal(
            f"{text}, and how many blocks are published is not known in this graph: positions from "
            "outside the candidates could leak",
            8,
        )
    blocks = constant_size(value(candidates.ids).shape[-1])
    k = constant_k(selection.k)
    extent = value(selection.score).shape[-1]
    if blocks is None or k is None:
        raise Refusal(f"{text}, and its budget is no constant", 8)
    size = candidates.block_size
    if isinstance(extent, int) and blocks * size >= extent:
        return "every position is inside the candidates"
    if not only_end_bound:
        raise Refusal(f"{text}, under a mask that can empty a candidate block", 8)
    partial = 2 if has_start_bound else 1
    least = (blocks - partial) * size + partial
    if k > least:
        raise Refusal(
            f"{text}, and k = {k} exceeds the {least} positions that {blocks} candidate blocks of "
            f"{size} are sure to hold: positions from outside the candidates leak",
            8,
        )
    return f"empty slots are told by index; safe since k = {k} <= {least}"
