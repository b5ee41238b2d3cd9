"""Propose an indexer: walk back from a selection to its product, noting each role on the way.

The walk knows three stretches, from the selection down: masks and scales on scores, the weighted
sum over heads, and what lies between the relu and the product of queries and keys. It only
proposes; whether the stretch computes an indexer's scores is decided by probes.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    HEAVY,
    VIEWS,
    is_float,
    is_tensor,
    is_view,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.lower_axes import pointwise
from dsa_compile.passes.recognise_ops import constant_of, float_inputs, relu_input
from dsa_compile.passes.score_trace import HIDING, MaskEvent, Refusal, ScoreTrace
from dsa_compile.passes.trace_products import ADDS, PIECES, SCALES, note_factor, trace_product

_JOINS = frozenset({"sum", "mean", "cat", "stack"})
_PARTS = frozenset({"split", "unbind", "split_with_sizes", "chunk"})


def _transparent(node: fx.Node) -> bool:
    name = op_name(node)
    known = name in VIEWS or name in CASTS or name in PIECES or name in _JOINS
    return (
        known
        or name == "getitem"
        and selection_root(node) is None
        or (name in _PARTS or pointwise(node))
    )


class Walker:
    """Finds the relus behind a selection and walks every branch down to its product."""

    def __init__(self) -> None:
        self._crossings: dict[fx.Node, float] = {}

    def crossings(self, node: fx.Node) -> float:
        """Fewest contractions between a node and a relu above it; infinite if none within two."""
        order = [node]
        while order:
            top = order[-1]
            if top in self._crossings:
                order.pop()
                continue
            name = op_name(top)
            if not is_float(top) and name not in _PARTS:
                self._crossings[top] = math.inf
                continue
            if relu_input(top) is not None:
                self._crossings[top] = 0.0
                continue
            step = 1.0 if name in CONTRACTIONS else 0.0
            if not step and not _transparent(top):
                self._crossings[top] = math.inf
                continue
            inputs = [n for n in top.all_input_nodes if n.op == "call_function"]
            missing = [n for n in inputs if n not in self._crossings]
            if missing:
                order.extend(missing)
                continue
            best = min((self._crossings[n] for n in inputs), default=math.inf) + step
            self._crossings[top] = best if best <= 2 else math.inf
        return self._crossings[node]

    def trace(self, score: fx.Node) -> ScoreTrace:
        """Walk from the scores of a selection to its products.

        Raises:
            Refusal: what stands on the way is not an indexer; the text says what it is.
        """
        if self.crossings(score) > 1:
            raise Refusal(_why_no_relu(score), 1)
        found = ScoreTrace(score)
        self._scores(score, found)
        if not found.products:
            raise Refusal("no product of queries and keys lies behind the relu", 2)
        return found

    def _bearing(self, nodes: list[fx.Node]) -> list[fx.Node]:
        best = min((self.crossings(n) for n in nodes), default=math.inf)
        return [n for n in nodes if self.crossings(n) == best and best < math.inf]

    def _scores(self, node: fx.Node, found: ScoreTrace) -> None:
        if node in found.path:
            return
        found.path[node] = None
        name = op_name(node)
        below = relu_input(node)
        if below is not None:
            found.relus.append(node)
            trace_product(below, found)
            return
        bearing = self._bearing(float_inputs(node))
        if name in CONTRACTIONS:
            others = [n for n in float_inputs(node) if n not in bearing]
            if len(bearing) != 1 or len(others) != 1:
                raise Refusal(f"{name} mixes scores with scores", 3)
            found.weights.append(others[0])
        elif name in ("where", "masked_fill"):
            self._mask(node, bearing, found)
        elif name in ADDS:
            self._add(node, bearing, found)
        elif name in SCALES:
            self._scale(node, bearing, found)
        elif name == "neg":
            found.constant = -found.constant
        elif not (is_view(node) or name in CASTS or name in PIECES or name in _JOINS):
            raise Refusal(f"{name} stands between the head sum and the selection", 3)
        if not bearing:
            raise Refusal(f"the scores do not come through {name}", 3)
        for source in bearing:
            self._scores(source, found)

    def _mask(self, node: fx.Node, bearing: list[fx.Node], found: ScoreTrace) -> None:
        if op_name(node) == "masked_fill":
            kept, cond, filled, kind = node.args[0], node.args[1], node.args[2], "hide"
        else:
            cond, yes, no = node.args[:3]
            hides = constant_of(yes) is not None
            kept, filled, kind = (no, yes, "hide") if hides else (yes, no, "show")
        fill = constant_of(filled)
        if fill is None or len(bearing) != 1 or bearing[0] is not kept:
            raise Refusal("scores are mixed with other values under a condition", 3)
        if fill > HIDING:
            raise Refusal(
                f"the mask value {fill:g} is within reach of real scores: hidden ones could win",
                4,
            )
        _nothing_after(found, fill)
        assert isinstance(cond, fx.Node)
        found.masks.append(MaskEvent(node, cond, kind, fill))

    def _add(self, node: fx.Node, bearing: list[fx.Node], found: ScoreTrace) -> None:
        if node.kwargs.get("alpha", 1) != 1:
            raise Refusal("an addition with alpha stands on the scores", 3)
        others = [a for a in node.args[:2] if a not in bearing]
        if not others:
            if op_name(node) == "sub":
                raise Refusal("scores are subtracted from scores", 3)
            return
        other = others[0]
        if op_name(node) == "sub" and node.args[0] is other:
            raise Refusal("scores are subtracted from another tensor", 3)
        if not isinstance(other, fx.Node):
            if other == 0:
                return
            raise Refusal(f"a constant {other} is added to the scores", 3)
        if op_name(node) == "sub":
            raise Refusal("a tensor is subtracted from the scores", 3)
        _nothing_after(found, None)
        found.masks.append(MaskEvent(node, other, "add"))

    def _scale(self, node: fx.Node, bearing: list[fx.Node], found: ScoreTrace) -> None:
        others = [a for a in node.args[:2] if a not in bearing]
        if len(bearing) != 1 or len(others) != 1:
            raise Refusal("scores are multiplied with scores", 3)
        if op_name(node) == "div" and node.args[0] is others[0]:
            raise Refusal("the scores stand under a fraction", 3)
        note_factor(node, others[0], found, found.factors)


def _nothing_after(found: ScoreTrace, fill: float | None) -> None:
    """Refuse a mask whose hidden value a later factor could bring back among real scores."""
    if found.weights or found.factors:
        raise Refusal("a mask stands under weights or scales of the scores", 4)
    if found.constant <= 0 or found.constant != 1.0 and fill != -math.inf:
        raise Refusal("a mask stands under a scale of the scores", 4)


def _why_no_relu(score: fx.Node) -> str:
    """Name what stands where an indexer has its relu."""
    seen: set[fx.Node] = set()
    stack = [score]
    while stack:
        node = stack.pop(0)
        if node in seen or len(seen) > 64:
            continue
        seen.add(node)
        name = op_name(node)
        if name in (
            "sigmoid",
            "silu",
            "gelu",
            "tanh",
            "softplus",
            "exp",
            "leaky_relu",
            "elu",
            "hardtanh",
        ):
            return f"{name} stands where an indexer has its relu"
        if name in ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"):
            return "softmax stands where an indexer has its relu"
        if name in CONTRACTIONS:
            return "no relu between the product and the selection"
        if name in HEAVY or node.op != "call_function" or not is_tensor(node):
            continue
        stack.extend(n for n in node.all_input_nodes if isinstance(value(n), torch.Tensor))
    return "no relu over a product of queries and keys lies behind the selection"
