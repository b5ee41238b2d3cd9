"""Give the tensors around a traced score their roles: query, key, head weights, key scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from dsa_compile.passes.axis_labels import Axes, Axis, LabelError, Labels
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    is_tensor,
    is_upcast,
    is_view,
    op_name,
)
from dsa_compile.passes.lower_axes import pointwise
from dsa_compile.passes.score_trace import Refusal, ScoreTrace

_SPLITS = frozenset({"unbind", "split", "split_with_sizes", "chunk"})


@dataclass(frozen=True)
class Roles:
    """The operands of one indexer and what their axes mean.

    ``batch``, ``rows``, ``positions``, ``heads`` and ``dims`` are atoms of ``labels``; the query
    carries batch, rows, heads and dims, the key batch, positions and dims, the head weights batch,
    rows and heads. ``lead`` is the order of batch and rows in the scores' leading dims.
    """

    labels: Labels
    query: fx.Node
    key: fx.Node
    weights: fx.Node
    key_scale: fx.Node | None
    batch: Axis
    rows: Axis
    positions: Axis
    heads: Axis
    dims: Axis
    weight_heads: Axis
    lead: Axes


def _chain(node: fx.Node, through_pieces: bool) -> list[fx.Node]:
    """Nodes from an operand up to its leaf, through what changes no value."""
    out = [node]
    while True:
        name = op_name(node)
        if is_view(node) or is_upcast(node) or through_pieces and name in ("select", "slice"):
            step = node.args[0]
        elif through_pieces and name == "getitem" and op_name(node.args[0]) in _SPLITS:
            step = node.args[0].args[0]  # type: ignore[union-attr]
        else:
            return out
        assert isinstance(step, fx.Node)
        if not is_tensor(step):
            return out
        node = step
        out.append(node)


def _common(operands: list[fx.Node], what: str) -> tuple[fx.Node, list[fx.Node]]:
    """The leaf that all operands are views (or parts) of, and the nodes between."""
    unique = list(dict.fromkeys(operands))
    chains = [_chain(n, through_pieces=len(unique) > 1) for n in unique]
    others = [set(c) for c in chains[1:]]
    for candidate in chains[0]:
        if all(candidate in c for c in others):
            leaf = candidate
            break
    else:
        raise Refusal(f"the products do not share one {what} tensor", 4)
    if len(unique) == 1:
        leaf = chains[0][-1]
    between = [n for c in chains for n in c[: c.index(leaf)]]
    return leaf, list(dict.fromkeys(between))


def _label(labels: Labels, node: fx.Node) -> None:
    if node in labels.of:
        return
    name = op_name(node)
    source = node.args[0] if node.args else None
    piece = labels.piece(node)
    if piece is not None:
        labels.of[node] = piece
    elif name in _SPLITS:
        labels.of[node] = labels.of[source]  # type: ignore[index]
    elif name in CONTRACTIONS:
        labels.of[node] = labels.contract(node)
    elif is_view(node):
        labels.of[node] = labels.view(node, labels.of[source])  # type: ignore[index]
    elif name in ("sum", "mean"):
        labels.of[node] = labels.reduce(node, labels.of[source])  # type: ignore[index]
    elif name in ("cat", "stack"):
        labels.of[node] = labels.join(node)
    elif name in CASTS or pointwise(node) or name in ("masked_fill", "where"):
        labels.of[node] = labels.elementwise(node)
    else:
        raise Refusal(f"{name} changes axes in a way that is not known", 4)


def assign_roles(trace: ScoreTrace, binding: Binding) -> Roles:
    """Label every tensor of a traced score and read the roles off the labels.

    Raises:
        Refusal: an axis has no role in an indexer's formula; the text says which.
    """
    labels = Labels(binding)
    left, left_path = _common([p[1] for p in trace.products], "left")
    right, right_path = _common([p[2] for p in trace.products], "right")
    weight_operands = [w for w in trace.weights]
    factors = list(dict.fromkeys(trace.factors))
    region = dict.fromkeys([*left_path, *right_path, *trace.path])
    outside: list[fx.Node] = []
    for operand in [*weight_operands, *factors]:
        chain = _chain(operand, through_pieces=False)
        outside.append(chain[-1])
        region.update(dict.fromkeys(chain[:-1]))
    for leaf in (left, right, *outside):
        region.pop(leaf, None)
    try:
        for leaf in dict.fromkeys((left, right, *outside)):
            if leaf not in region:
                labels.leaf(leaf)
        for node in sorted(region):
            _label(labels, node)
        score_axes = labels.axes(trace.score)
    except LabelError as error:
        raise Refusal(f"axes cannot be followed: {error}", 4) from None
    positions = score_axes[-1]
    lead = score_axes[:-1]
    lead_atoms = [a for axis in lead for a in axis]

    def atoms(node: fx.Node) -> Axis:
        return [a for axis in labels.axes(node) for a in axis]

    sides = [(left, atoms(left)), (right, atoms(right))]
    if not positions:
        raise Refusal("the scores have no axis of key positions", 4)
    keyed = [i for i, (_, a) in enumerate(sides) if set(positions) <= set(a)]
    if len(keyed) != 1:
        raise Refusal("the positions of the scores are not the positions of one key tensor", 4)
    key, key_atoms = sides[keyed[0]]
    query, query_atoms = sides[1 - keyed[0]]
    batch = [a for a in lead_atoms if a in key_atoms]
    rows = [a for a in lead_atoms if a not in batch]
    dims = [a for a in key_atoms if a in query_atoms and a not in lead_atoms]
    heads = [a for a in query_atoms if a not in lead_atoms and a not in dims]
    if set(key_atoms) != {*batch, *positions, *dims}:
        raise Refusal("the key has an axis that is no batch, position or dim (keys per head?)", 4)
    if not set(lead_atoms) <= set(query_atoms):
        raise Refusal("some score rows do not come from rows of the query", 4)
    if not rows and len(batch) > 1:
        raise Refusal(
            "every row has keys of its own: it scores gathered keys, so it is sparse already", 5
        )
    weights, key_scale, weight_heads = _weights(
        trace, labels, outside, len(weight_operands), lead_atoms, heads, positions, batch
    )
    return Roles(
        labels,
        query,
        key,
        weights,
        key_scale,
        batch,
        rows,
        positions,
        heads,
        dims,
        weight_heads,
        lead,
    )


def _weights(
    trace: ScoreTrace,
    labels: Labels,
    outside: list[fx.Node],
    sure: int,
    lead: Axis,
    heads: Axis,
    positions: Axis,
    batch: Axis,
) -> tuple[fx.Node, fx.Node | None, Axis]:
    """Tell head weights and a key scale among the tensors multiplied onto the scores."""
    weights: list[fx.Node] = list(outside[:sure])
    scales: list[fx.Node] = []
    pieces: list[fx.Node] = []
    for operand, leaf in zip(dict.fromkeys(trace.factors), outside[sure:], strict=True):
        have = {a for axis in labels.axes(leaf) for a in axis}
        if have and have <= {*positions, *batch} and have & set(positions):
            scales.append(leaf)
        else:
            weights.append(leaf)
            pieces.append(operand)
    if len(set(weights)) > 1 and pieces:
        merged, between = _common(pieces + list(trace.weights), "head weights")
        _relabel(labels, merged, between)
        weights = [merged]
    elif len(set(weights)) > 1:
        merged, between = _common(list(trace.weights), "head weights")
        _relabel(labels, merged, between)
        weights = [merged]
    if len(set(weights)) != 1:
        raise Refusal("no single tensor of head weights is multiplied onto the relu", 5)
    if len(set(scales)) > 1:
        raise Refusal("more than one scale per key stands on the scores", 5)
    own = [a for axis in labels.axes(weights[0]) for a in axis]
    extra = [a for a in own if a not in lead]
    if labels.extent(extra) != labels.extent(heads):
        raise Refusal("the head weights do not have one weight a head", 5)
    return weights[0], scales[0] if scales else None, extra


def _relabel(labels: Labels, leaf: fx.Node, between: list[fx.Node]) -> None:
    """Label a leaf above tensors that are labelled already, and identify the shared axes."""
    if leaf in labels.of:
        return
    known = {n: labels.of.pop(n) for n in between if n in labels.of}
    labels.leaf(leaf)
    for node in sorted(between):
        _label(labels, node)
        if node in known:
            # The known atoms stay the roots: roles read off before hold them.
            labels.of[node] = labels.broadcast(known[node], labels.of[node])
