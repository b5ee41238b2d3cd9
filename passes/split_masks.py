"""Take the masks on a score apart: candidate membership, additions, and what is neither.

All masks are read as one conjunction of boolean terms over (row, position). Nothing here is
trusted: the probes compare the rebuilt visible set with the model's own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.graph_tools import (
    ancestors,
    aten,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    op_name,
    selection_root,
    signature,
)
from dsa_compile.passes.mask_terms import (
    Term,
    hiding_constants,
    is_bool,
    mask_leaf,
    split_additive,
    split_flags,
    term,
)
from dsa_compile.passes.score_trace import MaskEvent, Refusal, ScoreTrace

_SCATTERS = frozenset(
    {"scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put", "any", "one_hot"}
    | {"isin", "index_add", "index_fill", "index_copy", "bincount", "masked_scatter"}
)
# No score comes near it, and none that does could be told from an overflow.
_LARGEST_SCORE = 1e12


@dataclass(frozen=True)
class Masks:
    """All masks of one site.

    Attributes:
        residual, candidate: terms that are not, or may be, membership in candidates.
        bias: what is added to the scores as numbers.
        fill: the value that hidden scores get in the rewritten form.
        exact: whether every hidden score has that very value in the model, too.
        floor: the largest value that a hidden score may have.
        one_fill: whether one value alone hides.
    """

    residual: tuple[Term, ...]
    candidate: tuple[Term, ...]
    bias: tuple[Term, ...]
    fill: float
    exact: bool
    floor: float
    one_fill: bool

    def described(self, roles: Roles) -> Hashable:
        """Equal for two sites whose other masks than candidates are the same tensors' same ops."""
        return frozenset(
            (kind, part.want, part.axes_in(roles), _origin(part.node))
            for kind, parts in (("term", self.residual), ("added", self.bias))
            for part in parts
        )


def _origin(node: fx.Node) -> Hashable:
    cone = sorted(ancestors([node], mask_leaf))
    inputs = tuple(n for n in cone if mask_leaf(n) and not is_size(n))
    return signature(cone, mask_leaf), inputs


def is_candidate(part: Term) -> bool:
    """Whether a term looks like membership: it reads a selection, or scatters or counts ids."""
    cone = ancestors([part.node], mask_leaf)
    return any(selection_root(n) is not None or op_name(n) in _SCATTERS for n in cone) or any(
        op_name(n) in ("sum", "amax", "max") and not is_float(n.args[0])
        for n in cone
        if n.args and is_tensor(n.args[0])
    )


def split_masks(trace: ScoreTrace, roles: Roles, *, dense: bool = True) -> Masks:
    """Read the masks of a traced score as terms.

    Args:
        trace, roles: of the score.
        dense: add finite masks as numbers where nothing looks like candidates.

    Raises:
        Refusal: two addends that are data, or an addend without an axis of positions.
    """
    parts: list[_Part] = []
    for event in trace.masks:
        at = roles.labels.axes(event.at)
        shape = roles.labels.binding.shape(event.mask)
        if len(shape) > len(at):
            raise Refusal("a mask has more dims than the scores", 5)
        axes = [a if s != 1 else [] for a, s in zip(at[len(at) - len(shape) :], shape, strict=True)]
        if event.kind == "add":
            terms, data = split_additive(roles, event.mask, axes)
            fills = hiding_constants(event.mask)
            parts.append(_Part(terms, data, term(event.mask, axes, True), fills))
        else:
            terms = split_flags(roles, event.mask, axes, event.kind == "show")
            fill = event.fill if event.fill is not None else float("-inf")
            parts.append(_Part(terms, [], None, {fill}))
    unique = list(dict.fromkeys(t for p in parts for t in p.terms))
    candidate = tuple(t for t in unique if is_candidate(t))
    if dense and not candidate:
        # Dense scoring can add finite masks as they are, and so keep the order of what they hide.
        parts = [p.as_bias() if p.addend is not None and p.finite() else p for p in parts]
        unique = list(dict.fromkeys(t for p in parts for t in p.terms))
    addends = [t for p in parts for t in p.data]
    for addend in addends:
        if not addend.axes or not addend.axes[-1]:
            raise Refusal("a number per row is added to the scores", 5)
    fills = {f for p in parts for f in p.fills} or {float("-inf")}
    finite = [i for i, p in enumerate(parts) if p.addend is not None and p.finite() and p.terms]
    # Masks are in walking order: the one added first is the last. Nothing else may be added: what
    # hides by data alone has no such value.
    swallowed = (
        not addends and finite == [len(parts) - 1] and _swallows(trace.masks[-1], max(fills))
    )
    exact = len(fills) == 1 and (not finite or swallowed)
    return Masks(
        tuple(t for t in unique if t not in candidate),
        candidate,
        tuple(addends),
        min(fills),
        exact,
        max(fills),
        len(fills) == 1,
    )


def _swallows(event: MaskEvent, fill: float) -> bool:
    """Whether a score plus the fill is the fill itself, by rounding, whatever the score."""
    rounding = torch.finfo(dtype_of(event.at)).eps * abs(fill) / 4
    return rounding >= _LARGEST_SCORE


@dataclass(frozen=True)
class _Part:
    """What one mask came apart into; ``addend`` is the whole of an additive one."""

    terms: list[Term]
    data: list[Term]
    addend: Term | None
    fills: set[float]

    def finite(self) -> bool:
        return any(f != float("-inf") for f in self.fills)

    def as_bias(self) -> _Part:
        assert self.addend is not None
        return _Part([], [self.addend], None, set())


def predicate(layout: Layout, term: Term) -> fx.Node:
    """A boolean node in the term's own shape, True where the term lets a position be seen."""
    node = term.node
    if not is_bool(node):
        if is_float(node):
            return layout.emit(aten.eq.Scalar, node, 0)
        node = layout.emit(aten.ne.Scalar, node, 0)
    return node if term.want else layout.emit(aten.logical_not.default, node)
