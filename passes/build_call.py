"""Build the canonical call of a proposed indexer out of the model's own tensors."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.candidate_ids import Candidates
from dsa_compile.passes.emit_nodes import Emission, Emitter
from dsa_compile.passes.graph_tools import aten, value
from dsa_compile.passes.read_bounds import BoundReader
from dsa_compile.passes.read_selection import Selection
from dsa_compile.passes.score_trace import ScoreTrace
from dsa_compile.passes.split_masks import Masks, predicate


class CallBuilder:
    """Emits operands, masks, the call, and its outputs in the model's layout, after the scores."""

    def __init__(
        self,
        graph: fx.Graph,
        trace: ScoreTrace,
        roles: Roles,
        masks: Masks,
        selection: Selection,
        emission: Emission,
    ) -> None:
        self.trace, self.roles, self.masks, self.selection = trace, roles, masks, selection
        self.graph = graph
        self.emit = Emitter(graph, self._place(trace.score, selection), emission)
        self.layout = Layout(roles.labels, self.emit)

    @staticmethod
    def _place(score: fx.Node, selection: Selection) -> fx.Node:
        """After the scores, and after ``k``, which may be computed later."""
        k = selection.k
        return k if isinstance(k, fx.Node) and k > score else score

    def build(self, candidates: Candidates | None) -> fx.Node:
        """The call of ``dsa::indexer_select`` with scale 1, for the proof to set."""
        roles, layout, emit = self.roles, self.layout, self.emit
        labels = roles.labels
        query = layout.canonical(
            roles.query,
            labels.axes(roles.query),
            [roles.batch, roles.rows, roles.heads, roles.dims],
        )
        key = layout.canonical(
            roles.key, labels.axes(roles.key), [roles.batch, roles.positions, roles.dims]
        )
        weights = layout.canonical(
            roles.weights, labels.axes(roles.weights), [roles.batch, roles.rows, roles.weight_heads]
        )
        lead = [emit.size(query, 0), emit.size(query, 1)]
        if [str(s) for s in value(weights).shape[:2]] != [str(s) for s in value(query).shape[:2]]:
            weights = emit(aten.expand.default, weights, [*lead, emit.size(weights, 2)])
        starts, ends, mask = self._terms()
        kwargs: dict[str, object] = {"topk": self.selection.k, "scale": 1.0}
        if roles.key_scale is not None:
            kwargs["key_scale"] = layout.canonical(
                roles.key_scale, labels.axes(roles.key_scale), [roles.batch, roles.positions]
            )
        if starts:
            kwargs["row_start"] = self._fold(starts, aten.maximum.default)
        if ends:
            kwargs["row_end"] = self._fold(ends, aten.minimum.default)
        if mask is not None:
            kwargs["mask"] = mask
        if self.masks.bias:
            groups = [roles.batch, roles.rows, roles.positions]
            added = [layout.canonical(t.node, t.labels(), groups) for t in self.masks.bias]
            kwargs["bias"] = self._fold(added, aten.add.Tensor)
        if candidates is not None:
            kwargs["block_ids"] = candidates.emit(layout, roles)
            kwargs["block_size"] = candidates.block_size
        if self.masks.fill != float("-inf"):
            kwargs["fill"] = self.masks.fill
        if not self.selection.ordered:
            kwargs["sorted"] = False
        return emit(torch.ops.dsa.indexer_select.default, query, key, weights, **kwargs)

    def _fold(self, nodes: list[fx.Node], join: object) -> fx.Node:
        total = nodes[0]
        for node in nodes[1:]:
            total = self.emit(join, total, node)  # type: ignore[arg-type]
        return total

    def _terms(self) -> tuple[list[fx.Node], list[fx.Node], fx.Node | None]:
        """Row bounds and the conjunction of what is left."""
        reader = BoundReader(self.layout, self.roles)
        bounds: dict[str, list[fx.Node]] = {"start": [], "end": []}
        rest: list[fx.Node] = []
        groups = [self.roles.batch, self.roles.rows, self.roles.positions]
        for term in self.masks.residual:
            bound = reader.read(term)
            if bound is not None:
                bounds[bound[0]].append(bound[1])
            else:
                shown = self.layout.canonical(predicate(self.layout, term), term.labels(), groups)
                rest.append(shown)
        mask = self._fold(rest, aten.logical_and.default) if rest else None
        if (
            mask is not None
            and isinstance(value(mask).shape[-1], int)
            and value(mask).shape[-1] == 1
        ):
            sizes = [self.emit.size(mask, d) for d in (0, 1)]
            mask = self.emit(
                aten.expand.default, mask, [*sizes, self.layout.group_size(self.roles.positions)]
            )
        return bounds["start"], bounds["end"], mask

    def outputs(self, call: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Values and indices of a call, back in the layout of the model's selection."""
        values = self.emit(operator.getitem, call, 0)
        indices = self.emit(operator.getitem, call, 1)
        return self.restore(values), self.restore(indices)

    def restore(self, node: fx.Node) -> fx.Node:
        """A canonical ``[B, S, n]`` tensor in the layout of the scores' leading dims."""
        roles, labels = self.roles, self.roles.labels
        width = labels.binding.shape(node)[-1]
        last = labels.fresh(width)
        axes = [list(roles.batch), list(roles.rows), last]
        labels.of[node] = axes
        return self.layout.canonical(node, axes, [*roles.lead, last])
