"""What tells a slot that found something from an empty one: tests of scores, tried out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.check_reach import ReachCheck
from dsa_compile.passes.graph_tools import CASTS, ancestors, dtype_of, is_tensor, is_view, op_name
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.read_selection import Selection
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.run_probe import Draw, ProbeError, draw_masks, evaluate, needed
from dsa_compile.passes.score_trace import HIDING, Refusal

_POSITIONS = 64
COMPARES = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


@dataclass(frozen=True)
class Guards:
    """Nodes that tell a found slot from an empty one.

    Attributes:
        scores: the selected scores, and gathers of scores at the picks, slot by slot.
        flags: gathers of the complete visibility at the picks, slot by slot.
        resorted: those of either kind that follow the picks' order after a sort of the picks.
        floor: the value of hidden scores; the largest where they differ.
        exact: whether all hidden scores are that one value.
        binding: sizes at which conditions are tried out.
    """

    scores: frozenset[fx.Node]
    flags: frozenset[fx.Node]
    resorted: frozenset[fx.Node]
    floor: float
    exact: bool
    binding: Binding

    def drops(self, cond: object, kept_when: bool, resorted: bool) -> bool:
        """Whether a condition is never ``kept_when`` where the scores are hidden ones.

        It is tried out: scores of the slots in the right order are set to the floor and their
        flags to False, everything else that it reads is drawn.
        """
        if not isinstance(cond, fx.Node):
            return False
        known = self.resorted if resorted else (self.scores | self.flags) - self.resorted
        values = self._tried(cond, known)
        return bool(values) and not any(bool((v == kept_when).any()) for v in values)

    def silences(self, source: object, resorted: bool) -> bool:
        """Whether what is scattered at a hidden slot is False or a hiding value."""
        if not isinstance(source, fx.Node):
            return False
        known = self.resorted if resorted else (self.scores | self.flags) - self.resorted
        values = self._tried(source, known)
        quiet = (not v.any() if v.dtype == torch.bool else (v <= HIDING).all() for v in values)
        return bool(values) and all(bool(q) for q in quiet)

    def _tried(self, node: fx.Node, known: frozenset[fx.Node]) -> list[torch.Tensor]:
        cone = set(ancestors([node], lambda n: n in known or mask_leaf(n)))
        if not cone & known or len(cone) > 200:
            return []
        leaves = [n for n in cone if n not in known and mask_leaf(n) and is_tensor(n)]
        draw = Draw(torch.Generator().manual_seed(3), _POSITIONS)
        try:
            reach = ReachCheck(self.binding, _POSITIONS, strict=False)
            reach.check([node], dict.fromkeys(cone & known))
        except Refusal:
            return []
        out: list[torch.Tensor] = []
        for _ in range(3):
            try:
                self.binding.cover([node], [*leaves, *(cone & known)])
                special = {n: self._hidden(n) for n in cone & known}
                env = draw_masks(leaves, draw, self.binding, special=special)
                found = evaluate(needed([node], env), env, self.binding)[node]
            except ProbeError:
                return []
            out.append(found)
        return out

    def _hidden(self, node: fx.Node) -> torch.Tensor:
        shape, dtype = self.binding.shape(node), dtype_of(node)
        if dtype == torch.bool:
            return torch.zeros(shape, dtype=torch.bool)
        return torch.full(
            shape,
            max(self.floor, torch.finfo(dtype).min) if math.isfinite(self.floor) else self.floor,
            dtype=dtype,
        )

    def _threshold(self, compare: fx.Node) -> bool:
        for one, other in (compare.args[:2], compare.args[1::-1]):
            if source_of(one) in self.scores:
                edge = constant_of(other)
                return edge is not None and edge >= (self.floor if self.exact else self.floor / 2)
        return False

    def values_are_tests(self, selection: Selection) -> bool:
        """Whether the selected scores are read by such tests alone."""
        stack: list[fx.Node] = [*selection.values]
        while stack:
            for user in stack.pop().users:
                if is_view(user) or op_name(user) in CASTS:
                    stack.append(user)
                elif not (op_name(user) in COMPARES and self._threshold(user)):
                    return False
        return True


def source_of(node: object) -> object:
    """What a node is a view or a cast of."""
    while isinstance(node, fx.Node) and (is_view(node) or op_name(node) in CASTS):
        node = node.args[0]
    return node
