"""Prove that a mask term is membership in candidate blocks: which ids, of which size.

A term is accepted when, on drawn ids, it shows exactly the positions whose block number is among
them. What counts as an unused id is found the same way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.candidate_ids import Candidates, lead_axes, orders, root_of
from dsa_compile.passes.graph_tools import (
    ancestors,
    dtype_of,
    is_float,
    is_tensor,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.mask_terms import Term, mask_leaf
from dsa_compile.passes.run_probe import (
    Draw,
    EagerLayout,
    ProbeError,
    draw_masks,
    evaluate,
    mask_leaves,
    needed,
)
from dsa_compile.passes.score_trace import Refusal

_WILD = ("holes", "twice", "beyond", "odd")
_MAX_BLOCK = 1024
_EDGES = frozenset(
    {"ge", "gt", "le", "lt", "eq", "ne", "clamp", "clamp_min", "clamp_max", "add", "sub", "slice"}
)


def _hints(cone: list[fx.Node], binding: Binding) -> list[int]:
    """Integers that a block size may be: literals and static extents inside the term."""
    found: set[int] = set()
    for node in cone:
        for arg in node.args:
            found |= {
                a for a in (arg if isinstance(arg, (list, tuple)) else [arg]) if type(a) is int
            }
        if is_tensor(node):
            found |= {s for s in value(node).shape if isinstance(s, int)}
    return sorted(n for n in found if 1 <= n <= _MAX_BLOCK)


def block_hint(terms: tuple[Term, ...]) -> int:
    """A number of positions that spans a few blocks, whatever the block size turns out to be."""
    sizes: set[int] = set()
    for node in ancestors([t.node for t in terms], mask_leaf):
        name = op_name(node)
        literal: list[Any] = []
        if name in ("floor_divide", "div", "mul", "repeat_interleave", "remainder"):
            literal = [a for a in node.args[1:] if type(a) is int]
        elif name in ("view", "expand", "reshape", "arange", "iota", "unflatten"):
            literal = [
                a for arg in node.args for a in (arg if isinstance(arg, (list, tuple)) else [arg])
            ]
        sizes |= {a for a in literal if type(a) is int and 2 <= a <= 256}
    block = max(sizes, default=8)
    edges = {0}
    for node in ancestors([t.node for t in terms], mask_leaf):
        if op_name(node) in _EDGES and is_tensor(node):
            edges |= {abs(a) for a in node.args[1:] if type(a) is int and abs(a) < 1 << 31}
    # A rule that starts at some position or block shows itself only beyond it.
    edge = max(edges)
    return max(3 * block + 1, edge + 2 * block if edge > 64 else (edge + 2) * min(block, 64))


class CandidateProver:
    """Tries hypotheses about one membership term, cheapest first."""

    def __init__(self, term: Term, roles: Roles, seed: int) -> None:
        self.term, self.roles, self.binding = term, roles, roles.labels.binding
        self.total = roles.labels.extent(roles.positions)
        self.draw = Draw(torch.Generator().manual_seed(seed), self.total)
        self.cone = ancestors([term.node], mask_leaf)
        self.leaves = mask_leaves([term.node])
        self.binding.cover([term.node], self.leaves)
        self.eager = EagerLayout(roles.labels)
        self.counterexample: str | None = None
        literals = {a for n in self.cone for a in n.args if type(a) is int}
        near = {a + d for a in literals for d in (-1, 0, 1)}
        self.draw.odd = tuple(sorted({*self.draw.odd, *near}))
        rows = roles.labels.extent(roles.batch) * roles.labels.extent(roles.rows)
        self.rounds = max(2, -(-12 // rows))

    def prove(self) -> Candidates:
        """The one hypothesis that holds on every draw.

        Raises:
            Refusal: none holds; the counterexample is that of the closest.
        """
        hints = [h for h in _hints(self.cone, self.binding) if 1 < h < self.total]
        # Single positions come last: a list of positions is membership in blocks of one, too.
        for block in [*hints, 1]:
            for found in self._hypotheses(block):
                if not self._holds(found, ("full", "prefix")):
                    continue
                if found.block_size == 1:
                    raise Refusal("the candidates are single positions, not blocks", 7)
                if found.root is None and not self._holds(found, _WILD):
                    raise Refusal(
                        "ids that are repeated, unused or out of range are not what they should be",
                        7,
                        self.counterexample,
                    )
                return found
        raise Refusal(
            "the mask is not membership in published candidate blocks of one size",
            7,
            self.counterexample,
        )

    def _hypotheses(self, block: int) -> list[Candidates]:
        ordered = sorted(self.cone)
        # The tensor nearest the mask says most about what an id means (casts, wraps, sentinels).
        integers = [n for n in reversed(ordered) if self._may_be_ids(n)]
        out: list[Candidates] = []
        for ids in integers:
            shape = self.binding.shape(ids)
            flags = [
                n
                for n in reversed(ordered)
                if is_tensor(n) and dtype_of(n) == torch.bool and self.binding.shape(n) == shape
            ]
            for order, lead in enumerate(orders(self.roles, len(shape) - 1)):
                extents = [self.roles.labels.extent(a) for a in lead]
                if any(s not in (1, e) for s, e in zip(shape[:-1], extents, strict=True)):
                    continue
                labels = (*(tuple(a) for a in lead_axes(self.roles, shape, order)), ())
                for valid in [None, *flags]:
                    out.append(Candidates(ids, valid, labels, block, root_of(ids), order))
        return out

    def _may_be_ids(self, node: fx.Node) -> bool:
        if not is_tensor(node) or is_float(node) or dtype_of(node) == torch.bool:
            return False
        if value(node).dim() < 1 or value(node).dim() > len(self.roles.lead) + 2:
            return False
        from_ids = any(
            selection_root(n) is not None or n.op != "call_function" and not is_float(n)
            for n in ancestors([node], mask_leaf)
        )
        return from_ids and op_name(node) not in ("scatter", "scatter_add")

    def _holds(self, found: Candidates, kinds: tuple[str, ...]) -> bool:
        targets = [self.term.node, found.ids] + ([found.valid] if found.valid is not None else [])
        for kind in kinds:
            for _ in range(self.rounds):
                special = {
                    n: self.draw.ids(
                        self.binding.shape(n), dtype_of(n), -(-self.total // found.block_size), kind
                    )
                    for n in self.leaves
                    if selection_root(n) is None and not is_float(n) and self._is_id_leaf(n, found)
                }
                env = draw_masks(self.leaves, self.draw, self.binding, special=special)
                try:
                    values = evaluate(needed(targets, env), env, self.binding)
                except ProbeError:
                    if kind in _WILD:
                        continue
                    return False
                if not self._same(values, found):
                    return False
        return True

    def _is_id_leaf(self, node: fx.Node, found: Candidates) -> bool:
        return dtype_of(node) != torch.bool and node in set(ancestors([found.ids], mask_leaf))

    def _same(self, values: dict[fx.Node, torch.Tensor], found: Candidates) -> bool:
        roles = self.roles
        shown = values[self.term.node]
        shown = shown if shown.dtype == torch.bool else shown == 0
        if not self.term.want:
            shown = ~shown
        shown = self.eager.arrange(
            shown, self.term.labels(), [roles.batch, roles.rows, roles.positions]
        )
        ids = values[found.ids].long()
        if found.valid is not None:
            ids = torch.where(values[found.valid], ids, -1)
        axes = [list(a) for a in found.axes[:-1]]
        lead = self.eager.arrange(
            ids[..., 0] if ids.shape[-1] else ids.sum(-1), axes, [roles.batch, roles.rows]
        )
        parts = [
            self.eager.arrange(ids[..., c], axes, [roles.batch, roles.rows])
            for c in range(ids.shape[-1])
        ]
        flat = torch.stack(parts, -1) if parts else lead.unsqueeze(-1)[..., :0]
        numbers = torch.arange(self.total) // found.block_size
        inside = torch.zeros((*flat.shape[:-1], self.total), dtype=torch.bool)
        for c in range(flat.shape[-1]):
            inside |= flat[..., c, None] == numbers
        wrong = (shown != inside).broadcast_to(torch.broadcast_shapes(shown.shape, inside.shape))
        if not wrong.any():
            return True
        self._remember(wrong, shown.broadcast_to(wrong.shape), flat, found.block_size)
        return False

    def _remember(
        self, wrong: torch.Tensor, shown: torch.Tensor, ids: torch.Tensor, block: int
    ) -> None:
        if self.counterexample is not None and wrong.float().mean() > 0.3:
            return
        b, row, position = (int(i) for i in wrong.nonzero()[0])
        held = ids[min(b, ids.shape[0] - 1), min(row, ids.shape[1] - 1)]
        blocks = ", ".join(str(int(i)) for i in held[:6] if i >= 0) or "none"
        verb = "keeps" if shown[b, row, position] else "hides"
        place = "outside" if verb == "keeps" else "inside"
        self.counterexample = (
            f"row {row} {verb} position {position}, {place} its candidate blocks "
            f"{blocks} of {block}"
        )
