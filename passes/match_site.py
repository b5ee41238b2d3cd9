"""Match one selection: propose an indexer, prove it, and put the canonical op in its place."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.passes.assign_roles import assign_roles
from dsa_compile.passes.axis_labels import LabelError
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.build_call import CallBuilder
from dsa_compile.passes.candidate_ids import Candidates
from dsa_compile.passes.check_reach import check_reach
from dsa_compile.passes.check_rules import check_rules
from dsa_compile.passes.check_slots import (
    check_hidden,
    check_leak,
    check_thresholds,
    unguarded_use,
)
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import ancestors, aten, dtype_of, is_float
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.prove_site import Shared, SiteProver, bind, too_large
from dsa_compile.passes.read_selection import Selection, constant_k
from dsa_compile.passes.read_users import Users, read_users
from dsa_compile.passes.run_probe import ProbeError, memory
from dsa_compile.passes.score_trace import Refusal, ScoreTrace
from dsa_compile.passes.shrink_sizes import SLOW
from dsa_compile.passes.sites import Site, SitePair
from dsa_compile.passes.split_masks import Masks, split_masks


@dataclass
class Looked:
    """How far one site got; filled in as the matching goes on, for the report."""

    kind: str = "single"
    heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None
    notes: tuple[str, ...] = ()


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
        """Propose, prove and replace; on smaller sizes than captured where those are large."""
        trace = self.shared.walker.trace(self.selection.score)
        found = bind(trace, self.shared.binder)
        size = memory([*trace.path, *ancestors([e.mask for e in trace.masks], mask_leaf)], found[0])
        if size <= min(SLOW, self.options.probe_memory_bytes):
            return self._match(trace, found, restated=False)
        count, before = len(self.emission.added), replace(self.looked)
        try:
            return self._match(trace, found, restated=True)
        except (Refusal, ProbeError, LabelError) as error:
            if size > self.options.probe_memory_bytes:
                refused = isinstance(error, Refusal)
                raise error if refused else too_large(size, self.options, error) from None
        self.emission.erase_since(count)
        vars(self.looked).update(vars(before))
        return self._match(trace, found, restated=False)

    def _match(
        self, trace: ScoreTrace, found: list[Binding], *, restated: bool
    ) -> tuple[Site, SitePair]:
        """Match under some sizes, or under smaller ones that stand for them."""
        roles = assign_roles(trace, found[0])
        self.looked.heads = roles.labels.extent(roles.heads)
        self.looked.head_dim = roles.labels.extent(roles.dims)
        try:
            masks = split_masks(trace, roles)
        except LabelError as error:
            raise Refusal(f"axes of a mask cannot be followed: {error}", 5) from None
        if masks.candidate:
            self.looked.kind = "consumer"
        users = read_users(self.selection, trace, roles, masks)
        publisher = users.publisher
        if publisher is not None:
            self.looked.kind, self.looked.block_size = "source", publisher.block_size
        prover = SiteProver(trace, roles, masks, found, self.shared, self.options)
        if restated:
            self.looked.notes += (prover.restate(self.selection, publisher),)
        candidates = prover.candidates()
        if candidates is not None:
            self.looked.block_size = candidates.block_size
        small = restated or bool(found[0].numbers)
        _check_rules([t.node for t in masks.candidate], small)
        self._check_reach(trace, found, masks, candidates)
        builder = CallBuilder(self.graph, trace, roles, masks, self.selection, self.emission)
        try:
            call = builder.build(candidates)
            if any(call.kwargs.get(name) is not None for name in ("row_start", "row_end")):
                _check_rules([e.mask for e in trace.masks], small)
            if publisher is not None and publisher.pinned is not None:
                try:
                    _check_rules([publisher.pinned[0]], small)
                    check_reach([publisher.pinned[0]], found, trace.score, strict=False)
                except Refusal:
                    publisher.leave_ranking()
            prover.prove(call)
            self._check(prover, users, masks, candidates, call)
            if publisher is not None:
                prover.prove_blocks(publisher, call)
        except LabelError as error:
            raise Refusal(f"axes cannot be followed: {error}", 5) from None
        return self._replace(builder, call, users)

    def _check_reach(
        self,
        trace: ScoreTrace,
        found: list[Binding],
        masks: Masks,
        candidates: Candidates | None,
    ) -> None:
        """Refuse rules of what is replaced that no probe reaches."""
        if candidates is not None:
            check_reach(
                [t.node for t in masks.candidate],
                found,
                trace.score,
                ids=candidates.ids,
                flags=candidates.valid,
                drawn_wild=candidates.root is None,
            )
        added = [t.node for t in masks.residual if is_float(t.node)]
        check_reach(added, found, trace.score)

    def _check(
        self,
        prover: SiteProver,
        users: Users,
        masks: Masks,
        candidates: Candidates | None,
        call: fx.Node,
    ) -> None:
        """Refuse where the model could see what differs in slots that found nothing."""
        guards = replace(users.guards, binding=prover.bound[0])
        unmasked = call.kwargs.get("mask") is None
        check_thresholds(self.selection)
        check_hidden(self.selection, guards, one_fill=masks.one_fill and unmasked)
        if candidates is not None:
            note = check_leak(
                self.selection,
                candidates,
                guards,
                only_end_bound=unmasked and call.kwargs.get("bias") is None,
                has_start_bound=call.kwargs.get("row_start") is not None,
                source_agrees=prover.source_agrees(candidates),
            )
            self.looked.notes += (note, *candidates.origin_note())
        if self.selection.stable and unguarded_use(self.selection, guards) is not None:
            raise Refusal(
                "a stable sort hands out hidden positions in order, and no test drops them", 8
            )

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


def _check_rules(rules: list[fx.Node], small: bool) -> None:
    """Refuse where what is replaced may go on otherwise than it shows at small sizes."""
    check_rules(sorted(ancestors(rules, mask_leaf)), small=small)


def _as(emit: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if dtype_of(node) == dtype else emit(aten._to_copy.default, node, dtype=dtype)


__all__ = ["Looked", "Shared", "SiteMatcher"]
