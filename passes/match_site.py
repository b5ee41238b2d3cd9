"""Match one selection: propose an indexer, prove it, and put the canonical op in its place."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.passes.assign_roles import Roles, assign_roles
from dsa_compile.passes.axis_labels import LabelError
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.build_call import CallBuilder
from dsa_compile.passes.candidate_ids import Candidates, with_atom
from dsa_compile.passes.check_slots import (
    check_hidden,
    check_leak,
    check_thresholds,
    plain_validity,
    unguarded_use,
)
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import (
    ancestors,
    aten,
    dtype_of,
    is_size,
    is_tensor,
    op_name,
    signature,
    value,
)
from dsa_compile.passes.mask_terms import Term, mask_leaf
from dsa_compile.passes.prove_candidates import CandidateProver, block_hint
from dsa_compile.passes.prove_indexer import IndexerProver
from dsa_compile.passes.read_selection import Selection, constant_k, ranked_scores
from dsa_compile.passes.read_users import Users, read_users
from dsa_compile.passes.recognise_ops import never_negative
from dsa_compile.passes.run_probe import TooLarge, mask_leaves, memory, needed
from dsa_compile.passes.score_trace import Refusal, ScoreTrace
from dsa_compile.passes.sites import Site, SitePair
from dsa_compile.passes.split_masks import Masks, is_candidate, split_masks
from dsa_compile.passes.trace_scores import Walker


@dataclass
class Looked:
    """How far one site got; filled in as the matching goes on, for the report."""

    kind: str = "single"
    heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Shared:
    """What the sites of one graph share.

    Attributes:
        scores: what the selections of the graph rank.
        walker, binder: remember what they met.
        proofs: of equal parts, by signature.
    """

    scores: set[fx.Node]
    walker: Walker = field(default_factory=Walker)
    binder: SizeBinder = field(default_factory=SizeBinder)
    proofs: dict[Hashable, Any] = field(default_factory=dict)


class SiteMatcher:
    """Matches one selection; raises Refusal where it is no proven indexer."""

    def __init__(
        self,
        graph: fx.Graph,
        selection: Selection,
        shared: Shared,
        context: PassContext,
        looked: Looked,
    ) -> None:
        self.graph, self.selection, self.shared = graph, selection, shared
        self.options, self.provider = context.options, context.provider
        self.emission = context.emission
        self.looked = looked

    def match(self) -> tuple[Site, SitePair]:
        """Propose, prove and replace."""
        trace = self.shared.walker.trace(self.selection.score)
        bound = self._bind(trace)
        roles = assign_roles(trace, bound[0])
        self.looked.heads = roles.labels.extent(roles.heads)
        self.looked.head_dim = roles.labels.extent(roles.dims)
        try:
            masks = split_masks(trace, roles)
        except LabelError as error:
            raise Refusal(f"axes of a mask cannot be followed: {error}", 5) from None
        if masks.candidate:
            self.looked.kind = "consumer"
        users = read_users(self.selection, trace, roles, masks)
        publisher, guards = users.publisher, users.guards
        if publisher is not None:
            self.looked.kind, self.looked.block_size = "source", publisher.block_size
        candidates = self._candidates(trace, roles, masks)
        builder = CallBuilder(self.graph, trace, roles, masks, self.selection, self.emission)
        try:
            call = builder.build(candidates)
            self._prove(trace, bound, roles, call)
            check_thresholds(self.selection)
            check_hidden(
                self.selection,
                guards,
                one_fill=masks.one_fill and call.kwargs.get("mask") is None,
            )
            if candidates is not None:
                note = check_leak(
                    self.selection,
                    candidates,
                    guards,
                    only_end_bound=call.kwargs.get("mask") is None
                    and call.kwargs.get("bias") is None,
                    has_start_bound=call.kwargs.get("row_start") is not None,
                    source_agrees=self._source_agrees(roles, masks, candidates),
                )
                self.looked.notes += (note, *candidates.origin_note())
            if self.selection.stable and unguarded_use(self.selection, guards) is not None:
                raise Refusal(
                    "a stable sort hands out hidden positions in order, and no test drops them",
                    8,
                )
            if publisher is not None:
                for other in bound:
                    publisher.prove(assign_roles(trace, other), call)
        except LabelError as error:
            raise Refusal(f"axes cannot be followed: {error}", 5) from None
        return self._replace(builder, call, users)

    def _bind(self, trace: ScoreTrace) -> list[Binding]:
        masks = [e.mask for e in trace.masks]
        leaves = ancestors(masks, mask_leaf)
        operands = [n for p in trace.products for n in p[1:]] + trace.weights + trace.factors
        nodes = [
            n
            for n in [*trace.path, *leaves, *operands]
            if value(n) is not None and (is_tensor(n) or isinstance(value(n), torch.SymInt))
        ]
        members = tuple(Term(m, (), True) for m in masks if is_candidate(Term(m, (), True)))
        found = self.shared.binder.bindings(
            nodes, trace.score, at_least=block_hint(members) if members else 0
        )
        if not found:
            raise Refusal("no small sizes satisfy the guards of the graph", 5)
        size = memory([*trace.path, *leaves], found[0])
        if size > self.options.probe_memory_bytes:
            raise Refusal(
                f"its static sizes need {size / 2**30:.1f} GiB to probe, more than the budget of "
                f"{self.options.probe_memory_bytes / 2**30:.1f} GiB: make them dynamic or raise "
                "probe_memory_bytes",
                5,
            )
        return found

    def _candidates(self, trace: ScoreTrace, roles: Roles, masks: Masks) -> Candidates | None:
        if not masks.candidate:
            return None
        own = set(trace.relus)
        for term in masks.candidate:
            cone = ancestors([term.node])
            if own & set(cone):
                raise Refusal("the candidates come from the layer's own scores", 7)
        if len(masks.candidate) > 1:
            raise Refusal("more than one mask looks like candidate blocks", 7)
        term = masks.candidate[0]
        cone = sorted(ancestors([term.node], mask_leaf))
        key = (
            "candidates",
            signature(cone, mask_leaf),
            _shape(roles),
            term.axes_in(roles),
            term.want,
        )
        if key not in self.shared.proofs:
            proven = CandidateProver(term, roles, self.options.seed).prove()
            self.shared.proofs[key] = proven.located(cone)
        found = self.shared.proofs[key].at(cone, roles)
        self.looked.block_size = found.block_size
        return with_atom(found, roles)

    def _source_agrees(self, roles: Roles, masks: Masks, candidates: Candidates) -> bool:
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
        return bool(self.shared.proofs[key] == masks.described(roles))

    def _visible_to(self, score: fx.Node) -> Hashable:
        """What the masks on other scores let through; None where that cannot be read."""
        try:
            trace = self.shared.walker.trace(score)
            roles = assign_roles(trace, self._bind(trace)[0])
            masks = split_masks(trace, roles, dense=False)
        except (Refusal, LabelError):
            return None
        return None if masks.candidate else masks.described(roles)

    def _prove(self, trace: ScoreTrace, bound: list[Binding], roles: Roles, call: fx.Node) -> None:
        targets = [trace.score, *call.all_input_nodes]
        leaves = [
            roles.query,
            roles.key,
            roles.weights,
            *([roles.key_scale] if roles.key_scale else []),
        ]
        size = memory(needed(targets, leaves), bound[0]) if len(bound) == 1 else 0
        if size > self.options.probe_memory_bytes:
            raise TooLarge
        given = {*leaves, *mask_leaves([e.mask for e in trace.masks])}
        part = sorted(ancestors(targets, lambda n: n in given or is_size(n)))
        key = (
            "indexer",
            signature([*part, call], lambda n: n in given),
            _shape(roles),
            tuple(never_negative(n) for n in leaves),
        )
        if key not in self.shared.proofs:
            prover = IndexerProver(trace, call, self.options.seed + 1)
            prover.check(roles, self.options.draws)
            for other in bound[1:]:
                prover.check(assign_roles(trace, other), self.options.draws)
            if prover.scale is None:
                raise Refusal("no probe showed a single score", 9)
            self.shared.proofs[key] = prover.scale
        call.kwargs = {**call.kwargs, "scale": self.shared.proofs[key]}

    def _replace(
        self,
        builder: CallBuilder,
        call: fx.Node,
        users: Users,
    ) -> tuple[Site, SitePair]:
        selection, trace, publisher = self.selection, builder.trace, users.publisher
        old_name = selection.indices[0].name if selection.indices else selection.node.name
        swaps: list[tuple[fx.Node, fx.Node]] = []
        if publisher is not None:
            call, swaps = publisher.replace(builder, call)
        values, indices = builder.outputs(call)
        swaps += [(n, _as(builder.emit, indices, dtype_of(n))) for n in selection.indices]
        swaps += [(n, _as(builder.emit, values, dtype_of(n))) for n in selection.values]
        for pick in users.gathers:
            found = values
            if pick.order is not None:
                emit = Emitter(self.graph, pick.node, self.emission)
                order = emit(operator.getitem, pick.order, 1)
                found = emit(aten.gather.default, values, -1, order)
                swaps.append((pick.node, _as(emit, found, dtype_of(pick.node))))
            else:
                swaps.append((pick.node, _as(builder.emit, found, dtype_of(pick.node))))
        # All that can fail has been emitted: from here on the graph only changes hands.
        for old, new in swaps:
            old.replace_all_uses_with(new)
        candidates = call.kwargs.get("block_ids") is not None
        kind = "consumer" if candidates else "source" if publisher is not None else "single"
        site = Site(
            kind,
            "rewritten" if candidates else "fused",
            "",
            self.looked.heads,
            self.looked.head_dim,
            self.looked.block_size,
            constant_k(selection.k),
            provider=self.provider,
            notes=self.looked.notes,
            progress=10,
        )
        return site, SitePair(0, trace.score.name, old_name, indices.name)


def _shape(roles: Roles) -> Hashable:
    """The sizes that a proof was made with."""
    labels = roles.labels
    groups = (roles.batch, roles.rows, roles.positions, roles.heads, roles.dims)
    return tuple(tuple(labels.sizes[a] for a in labels.resolve(g)) for g in groups)


def _as(emit: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if dtype_of(node) == dtype else emit(aten._to_copy.default, node, dtype=dtype)
