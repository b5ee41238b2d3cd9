"""Refuse rules on positions that sizes smaller than a model's may not show.

A proof at small sizes stands for large ones where a rule grows with positions as it does there.
Whole numbers of 32 or 64 bits that are added, compared, multiplied by constants and counted in
blocks do. Others need not: 8 and 16 bits wrap, floats round, products and sums of numbers bend, and
a constant that is multiplied lies further out than it says.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import (
    CASTS,
    dtype_of,
    is_float,
    is_tensor,
    is_view,
    op_name,
)
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.read_bounds import COUNTS
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.score_trace import Refusal

_WIDE = frozenset({torch.int32, torch.int64})
_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod", "bitwise_right_shift"})
_DIVISIONS |= {"__rshift__"}
_PRODUCTS = frozenset({"mul", "bitwise_left_shift", "__lshift__"}) | _DIVISIONS
_STRAIGHT = frozenset(
    {"add", "sub", "rsub", "neg", "where", "masked_fill", "clamp", "clamp_min", "clamp_max"}
    | {"minimum", "maximum", "amin", "amax", "min", "max", "getitem", "gather", "index"}
    | {"index_select", "cat", "stack", "pad", "constant_pad_nd", "repeat_interleave", "flip"}
    | {"roll", "scatter", "slice_scatter", "sort", "topk", "bitwise_and", "bitwise_or"}
    | {"bitwise_xor", "bitwise_not", "clone", "contiguous", "scalar_tensor", "full", "new_full"}
    | {"full_like", "zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like", "eye"}
    | {"slice", "select", "narrow", "split", "split_with_sizes", "unbind", "chunk", "index_fill"}
    | {"index_put", "copy", "masked_scatter", "fill", "abs", "triu", "tril"}
)
# What gives numbers that come from the places of others, or from whether they hold.
_PLACES = frozenset({"argsort", "argmax", "argmin", "nonzero", "searchsorted"})


class RuleCheck:
    """Follows positions through the parts of a model that a proof replaces."""

    def __init__(self) -> None:
        self.counts: set[fx.Node] = set()
        self.made: set[fx.Node] = set()
        self.flags: set[fx.Node] = set()
        self.blocks: dict[fx.Node, int] = {}

    def check(self, nodes: Iterable[fx.Node], *, small: bool) -> None:
        """Look at nodes in graph order.

        Args:
            small: the proof is made at sizes that are not those of the model.

        Raises:
            Refusal: a rule may show itself at large sizes alone; the text names it.
        """
        for node in nodes:
            if not is_tensor(node):
                continue
            if dtype_of(node) == torch.bool:
                self.flags.add(node)
                continue
            if node.op != "call_function" or mask_leaf(node):
                if not is_float(node):
                    self.counts.add(node)
                continue
            inputs = [n for n in node.all_input_nodes if is_tensor(n)]
            if any(n in self.flags for n in inputs):
                self._count_flags(node)
            counted = [n for n in _values(node, inputs) if n in self.counts]
            if op_name(node) in COUNTS or counted or op_name(node) in _PLACES:
                self.counts.add(node)
                self._narrow(node)
                if small:
                    self._bent(node, inputs, counted)
            elif not inputs or any(n in self.made for n in inputs):
                self.made.add(node)
                if small:
                    self._computed(node, inputs)

    def _count_flags(self, node: fx.Node) -> None:
        """How many positions are let through is a number of them, too."""
        if op_name(node) in ("sum", "cumsum"):
            self._narrow(node)
        elif op_name(node) in CASTS or is_view(node):
            self.flags.add(node)

    def _narrow(self, node: fx.Node) -> None:
        kind = dtype_of(node)
        if kind not in _WIDE and not (kind.is_floating_point and kind.itemsize >= 4):
            name = str(kind).removeprefix("torch.")
            raise Refusal(f"positions are computed in {name}, which does not hold all of them", 7)

    def _bent(self, node: fx.Node, inputs: list[fx.Node], counted: list[fx.Node]) -> None:
        name = op_name(node)
        if is_float(node):
            raise Refusal("positions are computed in floating point, which may round them", 7)
        if name in COUNTS or name in _PLACES or is_view(node) or name in CASTS:
            pass
        elif name in _PRODUCTS:
            if sum(n in self.counts for n in inputs) > 1:
                raise Refusal(f"{name} of positions does not grow in proportion to them", 7)
        elif name not in _STRAIGHT:
            raise Refusal(f"positions pass through {name}", 7)
        nest = max((self.blocks.get(n, 1) for n in counted), default=1)
        if name in _DIVISIONS:
            size = _size(node)
            if nest > 1 and size > 1:
                raise Refusal("positions are counted in blocks of blocks", 7)
            # What is left over lies below the size, whatever it is counted in next.
            nest = 1 if name in ("remainder", "fmod") else size
        self.blocks[node] = nest

    def _computed(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """A constant that comes out of others."""
        name = op_name(node)
        if not inputs or is_float(node) or is_view(node) or name in CASTS:
            return
        if name == "cumsum" and constant_of(inputs[0]) == 1:
            self.made.discard(node)
            self.counts.add(node)
        elif name not in _STRAIGHT:
            raise Refusal(f"a constant that positions may meet comes out of {name}", 7)


def _values(node: fx.Node, inputs: list[fx.Node]) -> list[fx.Node]:
    """The inputs whose numbers may come out, conditions and places left out."""
    name = op_name(node)
    if name == "where":
        return [n for n in node.args[1:] if isinstance(n, fx.Node)]
    if name == "masked_fill":
        return [n for n in (node.args[0], node.args[2]) if isinstance(n, fx.Node)]
    if name in ("gather", "index", "index_select"):
        return [n for n in node.args[:1] if isinstance(n, fx.Node)]
    if name == "scatter":
        return [n for n in (node.args[0], *node.args[3:]) if isinstance(n, fx.Node)]
    return inputs


def _size(node: fx.Node) -> int:
    number = constant_of(node.args[1]) if len(node.args) > 1 else None
    if number is None or number != int(number):
        return 1
    size = abs(int(number))
    if op_name(node) in ("bitwise_right_shift", "__rshift__"):
        return 1 << min(size, 62)
    return max(size, 1)


def check_rules(nodes: Iterable[fx.Node], *, small: bool) -> None:
    """Look at the nodes of rules, in graph order; see :meth:`RuleCheck.check`."""
    RuleCheck().check(nodes, small=small)
