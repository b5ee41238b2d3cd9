"""Prove what was read of one selection: its candidates, its scores, what it publishes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles, assign_roles
from dsa_compile.passes.axis_labels import LabelError
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.candidate_ids import Candidates, Located, with_atom
from dsa_compile.passes.check_slots import plain_validity
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import (
    ancestors,
    is_size,
    is_tensor,
    op_name,
    selection_root,
    signature,
    value,
)
from dsa_compile.passes.mask_terms import Term, mask_leaf
from dsa_compile.passes.match_publishers import Publisher
from dsa_compile.passes.prove_candidates import CandidateProver, block_hint
from dsa_compile.passes.prove_indexer import IndexerProver
from dsa_compile.passes.prove_source import maxima_of, ranks_visible_blocks
from dsa_compile.passes.read_selection import Selection, ranked_scores
from dsa_compile.passes.recognise_ops import never_negative
from dsa_compile.passes.run_probe import mask_leaves, memory, needed
from dsa_compile.passes.score_trace import Refusal, ScoreTrace
from dsa_compile.passes.shrink_sizes import Shrinker
from dsa_compile.passes.split_masks import Masks, is_candidate, split_masks
from dsa_compile.passes.trace_scores import Walker


@dataclass
class Shared:
    """What the sites of one graph share.

    Attributes:
        scores: what the selections of the graph rank.
        walker, binder: remember what they met.
        proofs: of equal parts, by signature.
    """

    scores: set[fx.Node]
    binder: SizeBinder
    walker: Walker = field(default_factory=Walker)
    proofs: dict[Hashable, Any] = field(default_factory=dict)


def bind(trace: ScoreTrace, binder: SizeBinder) -> list[Binding]:
    """Small numbers for the size symbols of a traced score and its masks.

    Raises:
        Refusal: none satisfy the guards of the graph.
    """
    masks = [e.mask for e in trace.masks]
    leaves = ancestors(masks, mask_leaf)
    operands = [n for p in trace.products for n in p[1:]] + trace.weights + trace.factors
    nodes = [
        n
        for n in [*trace.path, *leaves, *operands]
        if value(n) is not None and (is_tensor(n) or isinstance(value(n), torch.SymInt))
    ]
    members = tuple(Term(m, (), True) for m in masks if is_candidate(Term(m, (), True)))
    found = binder.bindings(nodes, trace.score, at_least=block_hint(members) if members else 0)
    if not found:
        raise Refusal("no small sizes satisfy the guards of the graph", 5)
    return found


def too_large(size: int, options: MatchOptions, why: object) -> Refusal:
    """Why a part of static sizes is left alone that need more memory than a probe may take."""
    return Refusal(
        f"its static sizes need {size / 2**30:.1f} GiB to probe, more than the budget of "
        f"{options.probe_memory_bytes / 2**30:.1f} GiB: make them dynamic or raise "
        f"probe_memory_bytes (smaller sizes do not stand for them: {why})",
        5,
    )


class SiteProver:
    """Proofs for one site; equal parts of a graph are proven once.

    Args:
        trace, roles, masks: what was read, at the sizes of ``bound[0]``.
        bound: sizes to prove at.
    """

    def __init__(
        self,
        trace: ScoreTrace,
        roles: Roles,
        masks: Masks,
        bound: list[Binding],
        shared: Shared,
        options: MatchOptions,
    ) -> None:
        self.trace, self.roles, self.masks = trace, roles, masks
        self.bound, self.shared, self.options = bound, shared, options
        self.operands = [roles.query, roles.key, roles.weights]
        self.operands += [] if roles.key_scale is None else [roles.key_scale]

    def restate(self, selection: Selection, publisher: Publisher | None) -> str:
        """Take smaller sizes to prove at, and say which; see :mod:`restate_sizes`.

        Raises:
            Unrestated: none stand for those of the graph.
        """
        roles = assign_roles(self.trace, self.bound[0])
        extra: list[fx.Node] = []
        pins: list[fx.Node] = []
        if publisher is not None:
            pins = [publisher.pinned[0]] if publisher.pinned else []
            ranked = [] if publisher.ranked is None else [publisher.ranked]
            extra = [publisher.maxima, *pins, *ranked]
        leaves = mask_leaves([*(e.mask for e in self.trace.masks), *pins])
        picks = [*selection.values, *selection.indices]
        chosen = [n if selection_root(n) is not None else n.args[0] for n in picks]
        given = dict.fromkeys([*self.operands, *(n for n in leaves if n not in extra), *chosen])
        shrinker = Shrinker(
            AxisFollower(roles.labels),
            (roles.positions, roles.rows, roles.batch),
            [self.trace.score, *extra, *picks],
            list(given),  # type: ignore[arg-type]
            self.options.probe_memory_bytes,
        )
        members = shrinker.members()
        self.bound = list(members)
        return f"proven on smaller sizes: {' and '.join(m.name for m in members)}"

    def _small(self) -> list[Roles]:
        """The roles at each of the sizes that proofs are made at."""
        first, own = self.bound[0], self.roles
        found = [own if first is own.labels.binding else assign_roles(self.trace, first)]
        return found + [assign_roles(self.trace, b) for b in self.bound[1:]]

    def candidates(self) -> Candidates | None:
        """The proven candidates of the site, None where no mask looks like any.

        Raises:
            Refusal: a mask that does is no membership in published blocks.
        """
        if not self.masks.candidate:
            return None
        own = set(self.trace.relus)
        for term in self.masks.candidate:
            if own & set(ancestors([term.node])):
                raise Refusal("the candidates come from the layer's own scores", 7)
        if len(self.masks.candidate) > 1:
            raise Refusal("more than one mask looks like candidate blocks", 7)
        term = self.masks.candidate[0]
        cone = sorted(ancestors([term.node], mask_leaf))
        key = (
            "candidates",
            signature(cone, mask_leaf),
            _shape(self.roles),
            term.axes_in(self.roles),
            term.want,
        )
        if key not in self.shared.proofs:
            self.shared.proofs[key] = self._prove_candidates(term, cone)
        found = self.shared.proofs[key].at(cone, self.roles)
        return with_atom(found, self.roles)

    def _prove_candidates(self, term: Term, cone: list[fx.Node]) -> Located:
        if self.bound[0] is self.roles.labels.binding:
            return CandidateProver(term, self.roles, self.options.seed).prove().located(cone)
        proven = set()
        for roles in self._small():
            same = split_masks(self.trace, roles).candidate
            if [(t.node, t.want) for t in same] != [(term.node, term.want)]:
                raise Refusal("its masks are read differently at different sizes", 7)
            proven.add(CandidateProver(same[0], roles, self.options.seed).prove().located(cone))
        if len(proven) > 1:
            raise Refusal("its candidates are read differently at different sizes", 7)
        return proven.pop()

    def source_agrees(self, candidates: Candidates) -> bool:
        """Whether the ids are the best blocks of scores under the very masks of this layer."""
        root = candidates.root
        if root is None or op_name(root) != "topk" or not plain_validity(candidates):
            return False
        source = ranked_scores(root, self.shared.scores - {root.args[0]})
        if source is None:
            return False
        key = ("visible to", source)
        if key not in self.shared.proofs:
            self.shared.proofs[key] = self._visible_to(source)
        if self.shared.proofs[key] != self.masks.described(self.roles):
            return False
        pinned = ("pinned of", root, candidates.block_size)
        if pinned not in self.shared.proofs:
            self.shared.proofs[pinned] = self._best_of(root, source, candidates.block_size)
        return bool(self.shared.proofs[pinned])

    def _best_of(self, root: fx.Node, source: fx.Node, block: int) -> bool:
        """Whether a selection keeps the best visible blocks of scores, and pins no others."""
        maxima, ranked = maxima_of(root, source), root.args[0]
        if maxima is None or not isinstance(ranked, fx.Node):
            return False
        trace = self.shared.walker.trace(source)
        roles = assign_roles(trace, bind(trace, self.shared.binder)[0])
        limit = self.options.probe_memory_bytes
        return ranks_visible_blocks(ranked, maxima, trace, roles, block, limit)

    def _visible_to(self, score: fx.Node) -> Hashable:
        """What the masks on other scores let through; None where that cannot be read."""
        try:
            trace = self.shared.walker.trace(score)
            roles = assign_roles(trace, bind(trace, self.shared.binder)[0])
            masks = split_masks(trace, roles, dense=False)
        except (Refusal, LabelError):
            return None
        return None if masks.candidate else masks.described(roles)

    def prove(self, call: fx.Node) -> None:
        """Prove that a canonical call computes the scores, and give it their scale.

        Raises:
            Refusal: it does not.
        """
        targets = [self.trace.score, *call.all_input_nodes]
        one = len(self.bound) == 1
        size = memory(needed(targets, self.operands), self.bound[0]) if one else 0
        if size > self.options.probe_memory_bytes:
            raise too_large(size, self.options, "what takes their place is larger")
        given = {*self.operands, *mask_leaves([e.mask for e in self.trace.masks])}
        part = sorted(ancestors(targets, lambda n: n in given or is_size(n)))
        key = (
            "indexer",
            signature([*part, call], lambda n: n in given),
            _shape(self.roles),
            tuple(never_negative(n) for n in self.operands),
        )
        if key not in self.shared.proofs:
            prover = IndexerProver(self.trace, call, self.options.seed + 1)
            for roles in self._small():
                prover.check(roles, self.options.draws)
            if prover.scale is None:
                raise Refusal("no probe showed a single score", 9)
            self.shared.proofs[key] = prover.scale
        call.kwargs = {**call.kwargs, "scale": self.shared.proofs[key]}

    def prove_blocks(self, publisher: Publisher, call: fx.Node) -> None:
        """Prove the block maxima of a source, and its pin where it has one.

        Raises:
            Refusal: the maxima are not those of contiguous blocks from position 0.
        """
        for binding in self.bound:
            publisher.prove(assign_roles(self.trace, binding), call)


def _shape(roles: Roles) -> Hashable:
    """The sizes that a proof was made with."""
    labels = roles.labels
    groups = (roles.batch, roles.rows, roles.positions, roles.heads, roles.dims)
    return tuple(tuple(labels.sizes[a] for a in labels.resolve(g)) for g in groups)
