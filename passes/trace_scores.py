"""Propose an indexer: walk back from a selection to its product, noting each role on the way.

The walk knows three stretches, from the selection down: masks and scales on scores, the weighted
sum over heads, and what lies between the relu and the product of queries and keys. It only
proposes; whether the stretch computes an indexer's scores is decided by probes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import pointwise
from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    HEAVY,
    is_float,
    is_tensor,
    is_view,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.recognise_ops import (
    constant_of,
    float_inputs,
    never_negative,
    relu_input,
)

# A fill above this is within reach of real scores, so hidden and visible could mix.
HIDING = -6.0e4

_PIECES = frozenset({"select", "slice"})
_ADDS = frozenset({"add", "sub"})
_SCALES = frozenset({"mul", "div"})


class Refusal(Exception):
    """Why a selection is left as it is.

    Attributes:
        progress: how far the recognition got, 0 (no indexer in sight) to 9 (proof failed).
        counterexample: the probe that told it apart, if any.
    """

    def __init__(self, reason: str, progress: int, counterexample: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.progress = progress
        self.counterexample = counterexample


@dataclass(frozen=True)
class MaskEvent:
    """One mask met on the way: at path node ``at``, ``mask`` hides, shows, or is added."""

    at: fx.Node
    mask: fx.Node
    kind: str
    fill: float | None = None


@dataclass
class ScoreTrace:
    """What the walk met.

    Attributes:
        path: nodes from the products to the scores, those that carry scores.
        products: contraction nodes with their two operands.
        relus: the relu nodes.
        weights: operands multiplied onto the relu, or contracted with it.
        factors: tensors multiplied onto the scores after the head sum or before it.
        masks: the masks, in walking order (last applied first).
        constant: product of the constant factors along the first branch.
    """

    score: fx.Node
    path: dict[fx.Node, None] = field(default_factory=dict)
    products: list[tuple[fx.Node, fx.Node, fx.Node]] = field(default_factory=list)
    relus: list[fx.Node] = field(default_factory=list)
    weights: list[fx.Node] = field(default_factory=list)
    factors: list[fx.Node] = field(default_factory=list)
    masks: list[MaskEvent] = field(default_factory=list)
    constant: float = 1.0


def _transparent(node: fx.Node) -> bool:
    name = op_name(node)
    known = (
        is_view(node) or name in CASTS or name in _PIECES or name in ("sum", "mean", "cat", "stack")
    )
    return (
        known
        or name == "getitem"
        and selection_root(node) is None
        or (name in ("split", "unbind", "split_with_sizes", "chunk") or pointwise(node))
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
            if not is_float(top) and op_name(top) not in (
                "split",
                "unbind",
                "split_with_sizes",
                "chunk",
            ):
                self._crossings[top] = math.inf
                continue
            if relu_input(top) is not None:
                self._crossings[top] = 0.0
                continue
            step = 1.0 if op_name(top) in CONTRACTIONS else 0.0
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
            self._below_relu(below, found)
            return
        bearing = self._bearing(float_inputs(node))
        if name in CONTRACTIONS:
            others = [n for n in float_inputs(node) if n not in bearing]
            if len(bearing) != 1 or len(others) != 1:
                raise Refusal(f"{name} mixes scores with scores", 3)
            found.weights.append(others[0])
        elif name in ("where", "masked_fill"):
            self._mask(node, bearing, found)
        elif name in _ADDS:
            self._add(node, bearing, found)
        elif name in _SCALES:
            self._scale(node, bearing, found)
        elif name == "neg":
            found.constant = -found.constant
        elif not (
            is_view(node)
            or name in CASTS
            or name in _PIECES
            or name in ("sum", "mean", "cat", "stack")
        ):
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
        self._factor(node, others[0], found, found.factors)

    @staticmethod
    def _factor(node: fx.Node, other: object, found: ScoreTrace, into: list[fx.Node]) -> None:
        number = constant_of(other)
        if number is not None:
            found.constant *= (
                number if op_name(node) == "mul" else 1.0 / number if number else math.nan
            )
        elif op_name(node) == "div":
            raise Refusal("the scores are divided by a tensor", 3)
        elif not is_tensor(other):
            raise Refusal("the scores are scaled by a number that depends on sizes", 3)
        else:
            assert isinstance(other, fx.Node)
            into.append(other)

    def _below_relu(self, node: fx.Node, found: ScoreTrace) -> None:
        while True:
            if node in found.path:
                return
            found.path[node] = None
            name = op_name(node)
            if name in CONTRACTIONS:
                found.products.append(_product(node))
                return
            if name == "sum" and op_name(node.args[0]) == "mul":
                multiply = node.args[0]
                assert isinstance(multiply, fx.Node)
                operands = [a for a in multiply.args if is_float(a)]
                if len(operands) != 2:
                    raise Refusal("the sum behind the relu is no product of queries and keys", 2)
                found.path[multiply] = None
                found.products.append((node, operands[0], operands[1]))  # type: ignore[arg-type]
                return
            if is_view(node) or name in CASTS or name in _PIECES:
                node = node.args[0]  # type: ignore[assignment]
                continue
            if name in ("stack", "cat"):
                for part in node.all_input_nodes:
                    self._below_relu(part, found)
                return
            if name == "getitem" and op_name(node.args[0]) in (
                "unbind",
                "split",
                "split_with_sizes",
            ):
                found.path[node.args[0]] = None  # type: ignore[index]
                node = node.args[0].args[0]  # type: ignore[union-attr,assignment]
                continue
            if name in _SCALES:
                score = next((a for a in node.args[:2] if _leads_to_product(a)), None)
                if score is None:
                    raise Refusal("no product of queries and keys lies behind the relu", 2)
                other = next(a for a in node.args[:2] if a is not score)
                if name == "div" and node.args[0] is other:
                    raise Refusal("the product stands under a fraction inside the relu", 3)
                if constant_of(other) is None and not never_negative(other):
                    raise Refusal(
                        "weights or scales of unknown sign are multiplied inside the relu", 3
                    )
                self._factor(node, other, found, found.factors)
                assert isinstance(score, fx.Node)
                node = score
                continue
            if name in _ADDS:
                raise Refusal("a bias is added inside the relu", 3)
            raise Refusal(f"{name or node.op} stands between the product and the relu", 2)


def _nothing_after(found: ScoreTrace, fill: float | None) -> None:
    """Refuse a mask whose hidden value a later factor could bring back among real scores."""
    if found.weights or found.factors:
        raise Refusal("a mask stands under weights or scales of the scores", 4)
    if found.constant <= 0 or found.constant != 1.0 and fill != -math.inf:
        raise Refusal("a mask stands under a scale of the scores", 4)


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    if op_name(node) in ("addmm", "baddbmm"):
        raise Refusal("a bias is added inside the relu", 3)
    if op_name(node) == "linear" and len(node.args) > 2 and node.args[2] is not None:
        raise Refusal("a bias is added inside the relu", 3)
    operands = list(node.args[1]) if op_name(node) == "einsum" else list(node.args[:2])  # type: ignore[arg-type]
    if len(operands) != 2:
        raise Refusal("the product has more than two operands", 3)
    return node, operands[0], operands[1]  # type: ignore[return-value]


def _leads_to_product(node: object) -> bool:
    for _ in range(12):
        if not isinstance(node, fx.Node) or not is_float(node):
            return False
        name = op_name(node)
        if name in CONTRACTIONS or name == "sum" and op_name(node.args[0]) == "mul":
            return True
        if is_view(node) or name in CASTS or name in _PIECES:
            node = node.args[0]
        elif name in _SCALES:
            return any(_leads_to_product(a) for a in node.args[:2])
        else:
            return False
    return False


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
