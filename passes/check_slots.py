"""Decide whether slots that found nothing could show a model what the sparse form would hide.

The rewritten selection fills such slots with hidden positions, which is one of the outcomes that a
dense top-k over ties may have. A consumer whose model tells empty slots by index, not by score,
would in the dense form go on to attend positions outside its candidates; it is left alone unless
that provably cannot happen. Where hidden scores are finite and differ, the dense form ranks them,
so that every use must drop them by their scores.
"""

from __future__ import annotations

import torch.fx as fx

from dsa_compile.passes.candidate_ids import Candidates
from dsa_compile.passes.graph_tools import (
    CASTS,
    is_float,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.read_selection import Selection, constant_k, constant_size
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.slot_guards import COMPARES, Guards, source_of

_PASSING = frozenset(
    {"add", "sub", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "select", "slice"}
)
_LOGIC = frozenset(
    {"bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not", "mul"}
)


def unguarded_use(
    selection: Selection, guards: Guards, *, by_index: bool = False
) -> fx.Node | None:
    """A use of the positions that no test of the scores (or of full visibility) guards.

    Args:
        selection: whose positions are followed.
        guards: what tells a found slot from an empty one.
        by_index: let a test of the position itself pass for a guard.
    """
    seen: set[fx.Node] = set()
    stack: list[tuple[fx.Node, bool]] = [(n, False) for n in selection.indices]
    while stack:
        node, resorted = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            name = op_name(user)
            if user in guards.flags or user in guards.scores:
                continue
            if name in COMPARES:
                odd = _odd_use_of_test(user, seen)
                if odd is not None:
                    return odd
            elif name in ("where", "masked_fill"):
                cond = user.args[0] if name == "where" else user.args[1]
                kept = _kept_branch(user, seen)
                if kept is not None and guards.drops(cond, kept, resorted):
                    continue
                if kept is None or not (by_index and _reads(cond, seen)):
                    return user
            elif name == "scatter" and len(user.args) > 3:
                if not guards.silences(user.args[3], resorted):
                    return user
            elif name == "gather" and not user.users:
                continue
            elif is_view(user) or name in CASTS or name in _PASSING or name == "getitem":
                if name != "getitem" or user.args[1] == 0:
                    stack.append((user, resorted))
            elif name == "sort":
                stack.append((user, True))
            else:
                return user
    return None


def _kept_branch(user: fx.Node, picks: set[fx.Node]) -> bool | None:
    """The value of the condition that lets a pick through; None where both values do."""
    if op_name(user) == "masked_fill":
        return False if _reads(user.args[0], picks) and not _reads(user.args[2], picks) else None
    yes, no = (_reads(a, picks) for a in user.args[1:3])
    return None if yes and no or not (yes or no) else yes


def _odd_use_of_test(test: fx.Node, picks: set[fx.Node]) -> fx.Node | None:
    """A use of a comparison of the picks that does more than choose what becomes of a pick."""
    stack, seen = [test], 0
    while stack and seen < 40:
        node, seen = stack.pop(), seen + 1
        for user in node.users:
            name = op_name(user)
            if name in _LOGIC or is_view(user):
                stack.append(user)
                continue
            data = user.args[1:3] if name == "where" else user.args[:1]
            if name not in ("where", "masked_fill") or not any(_reads(d, picks) for d in data):
                return user
    return None


def _reads(node: object, picks: set[fx.Node]) -> bool:
    stack, seen = [node], 0
    while stack and seen < 16:
        top, seen = stack.pop(), seen + 1
        if not isinstance(top, fx.Node):
            continue
        if top in picks:
            return True
        if is_tensor(top) and (
            is_view(top)
            or op_name(top) in CASTS
            or op_name(top) in _PASSING
            or op_name(top) in COMPARES
            or op_name(top) in _LOGIC
        ):
            stack.extend(top.all_input_nodes)
    return False


def check_hidden(selection: Selection, guards: Guards, *, one_fill: bool) -> None:
    """Refuse where hidden scores are finite, differ, and could be seen.

    Args:
        one_fill: nothing but a bound on the row hides positions, with one value, so that a test of
            the position drops just what is hidden.

    Raises:
        Refusal: the selected scores, or positions of hidden ones, reach the model.
    """
    if guards.exact:
        return
    if not guards.values_are_tests(selection):
        raise Refusal("hidden positions keep finite scores of their own, which the model reads", 8)
    use = unguarded_use(selection, guards, by_index=one_fill)
    if use is not None:
        raise Refusal(
            "hidden positions keep finite scores of their own, and their order reaches the model "
            f"through {op_name(use) or use.op}",
            8,
        )


def check_thresholds(selection: Selection) -> None:
    """Refuse where the selected scores are compared with scores that are computed elsewhere.

    Raises:
        Refusal: equal scores may differ in their last bit there, and the comparison would tell.
    """
    seen: set[fx.Node] = set()
    stack = list(selection.values)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            name = op_name(user)
            if is_view(user) or name in CASTS or name in _PASSING or name in ("amin", "min"):
                stack.append(user)
            elif name in COMPARES and any(
                is_float(a) and constant_of(a) is None for a in _others(user, seen)
            ):
                raise Refusal(
                    "the selected scores are compared with scores computed elsewhere, where "
                    "rounding would show",
                    8,
                )


def _others(user: fx.Node, seen: set[fx.Node]) -> list[fx.Node]:
    return [a for a in user.all_input_nodes if a not in seen]


def check_leak(
    selection: Selection,
    candidates: Candidates,
    guards: Guards,
    *,
    only_end_bound: bool,
    has_start_bound: bool,
    source_agrees: bool,
) -> str:
    """Prove that the model's own rule for empty slots cannot show positions outside candidates.

    A row whose candidates hold fewer visible positions than ``k`` has empty slots. With ``n``
    published blocks of ``b``, all full but the newest (which holds at least one position), a row
    with more visible positions than that has at least ``(n - 1) * b + 1`` of them inside.

    Args:
        source_agrees: the ids are the best blocks of a source that sees what this layer sees.

    Returns:
        A note for the report.

    Raises:
        Refusal: a use is unguarded and the inequality does not hold or cannot be proven.
    """
    use = unguarded_use(selection, guards)
    if use is None:
        return "empty slots are told by their scores"
    text = f"the model tells empty slots by index ({op_name(use) or use.op}), not by score"
    if candidates.root is None or not source_agrees:
        raise Refusal(
            f"{text}, and which blocks are published is not known from this graph: positions from "
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


def plain_validity(candidates: Candidates) -> bool:
    """Whether ids count as unused exactly where their block's score is hidden."""
    valid, root = candidates.valid, candidates.root
    if root is None:
        return False
    if valid is None:
        made = candidates.ids
        for _ in range(8):
            if op_name(made) in ("where", "masked_fill"):
                cond = made.args[0] if op_name(made) == "where" else made.args[1]
                return _compares_root(cond, root)
            if is_view(made) or op_name(made) in CASTS:
                made = made.args[0]  # type: ignore[assignment]
            else:
                return op_name(made) == "getitem"
        return False
    return _compares_root(valid, root)


def _compares_root(cond: object, root: fx.Node) -> bool:
    while op_name(cond) in ("logical_not", "bitwise_not") or is_view(cond):
        assert isinstance(cond, fx.Node)
        cond = cond.args[0]
    zero = isinstance(cond, fx.Node) and len(cond.args) > 1 and constant_of(cond.args[1]) == 0
    if op_name(cond) in ("lt", "ge") and zero and isinstance(cond, fx.Node):
        # ids < 0 or ids >= 0, of ids that a test of the scores made negative
        ids = source_of(cond.args[0])
        if op_name(ids) in ("where", "masked_fill") and isinstance(ids, fx.Node):
            inner = ids.args[0] if op_name(ids) == "where" else ids.args[1]
            return _compares_root(inner, root)
    if op_name(cond) not in ("gt", "ne", "eq", "isfinite") or not isinstance(cond, fx.Node):
        return False
    held = source_of(cond.args[0])
    edge = constant_of(cond.args[1]) if len(cond.args) > 1 else float("-inf")
    if not isinstance(held, fx.Node) or op_name(held) != "getitem":
        return False
    from_root = held.args[0] is root and held.args[1] == 0
    return bool(from_root and edge is not None and edge <= -6e4)
