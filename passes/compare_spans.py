"""Refuse comparisons of spans whose answer may turn beyond the probes."""

from __future__ import annotations

import torch.fx as fx

from dsa_compile.passes.graph_tools import op_name
from dsa_compile.passes.number_spans import Span
from dsa_compile.passes.score_trace import HIDING, Refusal

# Sizes of one graph lie so close to each other that a comparison of two of them decides nothing.
_NEAR = 2
# A size that is computed with a larger constant is no count of blocks.
_LARGE = 256


def compare_spans(
    node: fx.Node, one: Span | None, other: Span | None, *, exact: bool = False, strict: bool
) -> None:
    """Refuse a comparison that gives one answer on all probes, and may give another.

    Args:
        node: the op that compares.
        one, other: what its sides hold; None where that is not followed.
        exact: whether it asks for equality.
        strict: refuse every comparison of an input of the model with a constant.

    Raises:
        Refusal: no probe shows both answers.
    """
    if one is None or other is None:
        return
    for held, constant in ((one, other), (other, one)):
        if not constant.alone() or not held.grows():
            continue
        number = constant.low
        if number in held.points or held.wide and abs(number) >= -HIDING:
            return
        if held.given and strict and not held.drawn_around(number):
            raise Refusal(f"an input is compared with {number:g}, which no probe draws", 7)
        _beyond(node, held.minus(constant), f"{number:,.0f}", 0 if exact else 1)
        return
    for held, size in ((one, other), (other, one)):
        fixed = not (size.grows() or size.alone() or size.drawn)
        if fixed and (held.up and size.high > held.high or held.down and size.low < held.low):
            raise Refusal(f"no probe reaches all numbers that {op_name(node)} looks for", 7)
        for mark in size.marks:
            if held.up and mark > held.high + _NEAR:
                raise Refusal(f"no probe reaches {mark:,}, which a size is computed with", 7)
    bent = any(mark > _LARGE for mark in (*one.marks, *other.marks))
    _beyond(node, one.minus(other), "the other side", 1 if bent else -_NEAR)


def _beyond(node: fx.Node, gap: Span, what: str, least: int) -> None:
    above, below = gap.up and gap.high < least, gap.down and gap.low > -least
    if above or below:
        raise Refusal(f"no probe reaches {what} of {op_name(node)}", 7)
