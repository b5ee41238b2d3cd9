"""Prove that published blocks are the best of those that hold a visible position.

Where a model tells empty slots by index, how many positions its candidates are sure to hold is
counted from the number of published blocks. That count stands only if every visible block may be
published and no block that a row cannot see takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles, assign_roles
from dsa_compile.passes.axis_labels import LabelError
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.check_reach import check_reach
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import CASTS, ancestors, is_view, op_name, same_size, value
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.run_probe import (
    Draw,
    EagerLayout,
    ProbeError,
    draw_masks,
    evaluate,
    mask_leaves,
    memory,
    needed,
)
from dsa_compile.passes.score_trace import HIDING, Refusal, ScoreTrace
from dsa_compile.passes.shrink_sizes import SLOW, Shrinker

_PINNED = 6e4
NEVER = float("-inf")


def maxima_of(root: fx.Node, score: fx.Node) -> fx.Node | None:
    """The maxima of scores that a selection of blocks ranks; None where more than one is read.

    Between scores and maxima may stand what fills up the last block and no more.
    """
    cone = ancestors(root.all_input_nodes, lambda n: op_name(n) in ("amax", "max"))
    reduced = [n for n in cone if op_name(n) in ("amax", "max")]
    if len(reduced) != 1:
        return None
    maxima, node = reduced[0], _first(reduced[0])
    if op_name(maxima) == "max":
        first = [n for n in cone if op_name(n) == "getitem" and n.args == (maxima, 0)]
        if str(maxima.target) != "aten.max.dim" or len(first) != 1:
            return None
        maxima = first[0]
    for _ in range(24):
        if node is score or not isinstance(node, fx.Node):
            break
        name, source = op_name(node), _first(node)
        if name == "cat":
            parts: Any = source
            if not all((constant_of(p) or 0) <= HIDING for p in parts[1:]):
                return None
            source = parts[0]
        elif name in ("pad", "constant_pad_nd"):
            if len(node.args) < 3 or (constant_of(node.args[-1]) or 0) > HIDING:
                return None
        elif name == "slice":
            sizes = zip(value(node).shape, value(source).shape, strict=True)
            if not all(same_size(a, b) for a, b in sizes):
                return None
        elif not (is_view(node) or name in CASTS):
            return None
        node = source
    return maxima if node is score else None


def _first(node: fx.Node) -> Any:
    return node.args[0]


def ranks_visible_blocks(
    ranked: fx.Node, maxima: fx.Node, trace: ScoreTrace, roles: Roles, block: int, limit: int
) -> bool:
    """Whether blocks rank by their maxima, but for pins, which a row must be able to see.

    Args:
        ranked: what the selection of blocks ranks.
        maxima: as :func:`maxima_of` gives them.
        trace, roles: of the source's scores.
        block: positions a block.
        limit: most bytes that a run may take.
    """
    binding = roles.labels.binding
    targets = [ranked, *(e.mask for e in trace.masks)]
    leaves = [n for n in mask_leaves(targets) if n is not maxima and n is not maxima.args[0]]
    try:
        check_reach([ranked], [binding], trace.score, strict=False)
        if memory(needed(targets, [maxima, *leaves]), binding) > min(SLOW, limit):
            roles, binding = _smaller(roles, trace, targets, leaves, limit)
        return all(
            _visible(ranked, maxima, trace, roles, binding, block, turn, leaves)
            for turn in range(3)
        )
    except (ProbeError, LabelError, Refusal):
        return False


def _smaller(
    roles: Roles, trace: ScoreTrace, targets: list[fx.Node], leaves: list[fx.Node], limit: int
) -> tuple[Roles, Binding]:
    operands = [roles.query, roles.key, roles.weights]
    operands += [] if roles.key_scale is None else [roles.key_scale]
    again = assign_roles(trace, roles.labels.binding)
    follower = AxisFollower(again.labels)
    axes = (again.positions, again.rows, again.batch)
    given = list(dict.fromkeys([*operands, *leaves]))
    members = Shrinker(follower, axes, [trace.score, *targets], given, limit).members(1)
    return assign_roles(trace, members[0]), members[0]


def _visible(
    ranked: fx.Node,
    maxima: fx.Node,
    trace: ScoreTrace,
    roles: Roles,
    binding: Binding,
    block: int,
    turn: int,
    leaves: list[fx.Node],
) -> bool:
    total = roles.labels.extent(roles.positions)
    draw = Draw(torch.Generator().manual_seed(17 + turn), total)
    targets = [ranked, *(e.mask for e in trace.masks)]
    operands = [roles.query, roles.key, roles.weights, roles.key_scale, *leaves]
    binding.cover([trace.score, *targets], [n for n in operands if n is not None])
    drawn = draw.normal(binding.shape(maxima), torch.float32).to(value(maxima).dtype)
    drawn = drawn.masked_fill(~draw.boolean(drawn.shape), NEVER)
    env = draw_masks(leaves, draw, binding, special={maxima: drawn})
    values = evaluate(needed(targets, env), env, binding)
    eager = EagerLayout(roles.labels)
    groups = [roles.batch, roles.rows, roles.positions]
    shown = torch.ones([roles.labels.extent(g) for g in groups], dtype=torch.bool)
    for event in trace.masks:
        at, mask = roles.labels.axes(event.at), values[event.mask]
        tail = at[len(at) - mask.dim() :]
        axes = [a if s != 1 else [] for a, s in zip(tail, mask.shape, strict=True)]
        flags = mask > HIDING if event.kind == "add" else mask == (event.kind == "show")
        shown &= eager.arrange(flags, axes, groups)
    blocks = -(-total // block)
    shown = torch.nn.functional.pad(shown, (0, blocks * block - total))
    alive = shown.unflatten(-1, (blocks, block)).any(-1)
    # A row that sees nothing picks nothing, whatever is pinned for it.
    alive |= ~alive.any(-1, keepdim=True)
    rows = [list(roles.batch), list(roles.rows)]
    lead = torch.stack([eager.arrange(a, rows, list(roles.lead)) for a in alive.unbind(-1)], -1)
    found = values[ranked]
    if not found.shape == drawn.shape == lead.shape:
        return False
    pinned = found >= _PINNED
    return bool((pinned | (found == drawn)).all()) and not bool((pinned & ~lead).any())
