"""What a walk from a selection back to its product finds, or why it stops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

# A fill above this is within reach of real scores, so hidden and visible could mix.
HIDING = -6.0e4


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
