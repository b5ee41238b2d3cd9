"""Refuse key writes whose ops choose by integers or old bytes, or cap numbers, on their own.

Draws show what is computed, but a rule that holds at few positions, slots or rows, or for numbers
larger than any drawn, shows in the ops alone. Looked at is what a fused write would replace: all
between what the op is given and the written cache. Each node there is told by what it depends on:

* the old cache: it is laid out anew, and is what a write goes into; nothing reads its bytes;
* keys: nothing made of slots or of a count of rows goes in, and other tensors only where they are
  multiplied or added; constants that bound or are compared with are those of the quantisation;
* slots: integers of 32 bits at least, counted in pages of the cache, and indices of writes; keys
  without one may be left out by a mask of them;
* other tensors: no more than what turns positions into angles is done to them.

What lies above the tensors that the op is given stays in the graph, so that it may be anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.fit_keys import KeyForm
from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    VIEWS,
    ancestors,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    op_name,
    value,
)
from dsa_compile.passes.recognise_ops import constant_of, is_constant
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import STAGES, KeyTrace

_CACHE, _KEYS, _SLOTS, _ROWS, _OTHERS = "cache", "keys", "slots", "rows", "others"
_Labels = frozenset[str]
_NONE: _Labels = frozenset()

_FILLS = frozenset(
    {"scalar_tensor", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like"}
    | {"new_full", "new_zeros", "new_ones"}
)
_PIECES = frozenset({"slice", "select", "narrow", "getitem", "split", "split_with_sizes", "unbind"})
_LAYOUT = VIEWS | _PIECES | {"chunk", "cat", "stack"}
_INTO_PLACES = frozenset({"index_put", "_unsafe_index_put", "index_copy", "scatter"})
_INTO_PARTS = frozenset({"slice_scatter", "select_scatter", "copy"})
_SMOOTH = (
    _LAYOUT
    | CASTS
    | CONTRACTIONS
    | STAGES
    | {"mul", "add", "sub", "rsub", "neg", "div", "reciprocal", "pow", "exp", "cos", "sin", "outer"}
    | {"polar", "complex", "view_as_complex", "view_as_real", "_conj", "real", "imag", "roll"}
    | {"flip", "index", "index_select", "gather", "embedding"}
)
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_COUNTED = _COMPARISONS | {
    *("floor_divide", "div", "remainder", "fmod", "clamp", "clamp_min", "clamp_max"),
    *("minimum", "maximum", "bitwise_and", "__rshift__", "bitwise_right_shift"),
}
_COUNTS = _LAYOUT | CASTS | {"mul", "add", "sub", "rsub", "neg"}
_ADDRESSES = (
    _COUNTS
    | _COUNTED
    | {"where", "masked_fill", "logical_and", "logical_or"}
    | {"logical_not", "bitwise_not", "bitwise_or", "__lshift__", "bitwise_left_shift"}
)
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "fmin", "fmax"})
_WIDE = (torch.int32, torch.int64)
_LARGEST = (6.0, 7.0, 127.0, 128.0, 254.0, 255.0, 448.0)
"""Largest numbers and exponents of fp8, fp4 and e8m0: what a quantisation may bound at."""
_MOST, _ENDLESS = 448.0, 1e30
"""Draws of large weights pass the one; hardly anything but an infinity passes the other."""


def check_flow(trace: KeyTrace, form: KeyForm) -> None:
    """Look at the ops that a fused write of this form would replace.

    Raises:
        Refusal: one does what no draw can be trusted to show; the text says what.
    """
    flow = _Flow(trace, form)
    for node in flow.nodes:
        flow.look_at(node)


class _Flow:
    def __init__(self, trace: KeyTrace, form: KeyForm) -> None:
        cache = trace.write.cache
        at = [n for n in (form.weight, form.bias) if n is not None]
        others = [trace.vectors[n] for n in at]
        others += [trace.sides[angles.side] for angles in form.angles or ()]
        self.labels: dict[fx.Node, _Labels] = dict.fromkeys(others, frozenset({_OTHERS}))
        for node, label in ((trace.root, _KEYS), (trace.slots, _SLOTS), (cache, _CACHE)):
            self.labels[node] = frozenset({label})
        given = set(self.labels)
        leaves = set(trace.leaves)
        cone = ancestors([trace.write.written], lambda n: n in given or n in leaves or is_size(n))
        for node in cone:
            if node in leaves and not is_constant(node):
                self.labels.setdefault(node, frozenset({_OTHERS}))
        self.nodes = [n for n in sorted(cone) if n not in self.labels and not is_size(n)]
        self.counts = _counts(cache)

    def look_at(self, node: fx.Node) -> None:
        """Label a node, all of whose inputs are.

        Raises:
            Refusal: it is none that may be replaced.
        """
        name = op_name(node)
        labels: _Labels = _NONE
        if name not in _FILLS:
            labels = _NONE.union(*(self._of(n) for n in node.all_input_nodes))
        if _CACHE in labels:
            labels = self._cache(node, name)
        elif _KEYS in labels:
            labels = self._keys(node, name)
        elif _SLOTS in labels:
            self._slots(node, name, labels)
        elif _OTHERS in labels:
            labels = self._others(node, name)
        elif _is_sized(node) and constant_of(node) is None:
            if name not in (_COUNTS if _ROWS in labels else {"arange"}):
                raise Refusal(f"it depends on the number of its keys ({node.name})", 8)
            labels = frozenset({_ROWS})
        self.labels[node] = labels

    def _of(self, node: object) -> _Labels:
        return self.labels.get(node, _NONE) if isinstance(node, fx.Node) else _NONE

    def _all_of(self, *nodes: Any) -> _Labels:
        flat: list[fx.Node] = []
        fx.map_arg(nodes, flat.append)
        return _NONE.union(*(self._of(n) for n in flat))

    def _cache(self, node: fx.Node, name: str) -> _Labels:
        args = node.args
        tensors = [n for n in node.all_input_nodes if not is_size(n)]
        if name in _LAYOUT:
            fine = all(_CACHE in self._of(n) or not self._of(n) for n in tensors)
        elif name in _INTO_PLACES and len(args) > 2:
            puts = name in ("index_put", "_unsafe_index_put")
            index, data = (args[1], args[2]) if puts else (args[2], args[3:4])
            fine = self._all_of(index) <= {_SLOTS, _ROWS} and self._all_of(data) <= {_KEYS}
            fine = fine and not node.kwargs and len(args) == (3 if puts else 4)
        elif name in _INTO_PARTS and len(args) > 1:
            fine = _CACHE in self._of(args[1]) and not self._all_of(*args[2:])
        else:
            fine = False
        if not fine:
            raise Refusal(f"what it writes depends on the old bytes of its cache ({node.name})", 8)
        return self._all_of(*tensors) & {_CACHE, _KEYS}

    def _keys(self, node: fx.Node, name: str) -> _Labels:
        for given in node.all_input_nodes:
            labels = self._of(given)
            if _KEYS in labels or labels == {_SLOTS} and _is_subset(node):
                continue
            if labels & {_SLOTS, _ROWS} or is_size(given) and name not in _LAYOUT:
                what = "slots" if _SLOTS in labels else "the number of its keys"
                raise Refusal(f"its codes or scales depend on {what} ({node.name})", 8)
            if _OTHERS in labels and name not in _SMOOTH:
                raise _chosen(node)
        self._check_bounds(node, name)
        return frozenset({_KEYS})

    def _check_bounds(self, node: fx.Node, name: str) -> None:
        below: list[float] = []
        above: list[float] = []
        if name in _BOUNDS | {"hardtanh"}:
            lows, highs = _bounds(node, name)
            below = [-n for n in lows if n < 0]
            above = highs
            fine = all(n in _LARGEST or n >= _ENDLESS for n in (*below, *above))
        elif name in _COMPARISONS:
            numbers = [constant_of(n) for n in node.args]
            above = [abs(n) for n in numbers if n is not None]
            fine = all(n <= _MOST or n >= _ENDLESS for n in above)
        else:
            return
        if not fine:
            numbers_of = ", ".join(f"{n:g}" for n in dict.fromkeys([*below, *above]))
            what = f"its keys are bounded by {numbers_of}, which no quantisation does"
            raise Refusal(f"{what} ({node.name})", 8)

    def _slots(self, node: fx.Node, name: str, labels: _Labels) -> None:
        if _OTHERS in labels:
            raise Refusal(f"where it writes depends on more than its slots ({node.name})", 8)
        if is_tensor(node) and dtype_of(node) not in (*_WIDE, torch.bool):
            dtype = str(dtype_of(node)).removeprefix("torch.")
            raise Refusal(f"its slots go through {dtype} ({node.name})", 8)
        known = name in _ADDRESSES or _is_subset(node)
        if name in _COUNTED:
            numbers = [constant_of(n) for n in (*node.args, *node.kwargs.values())]
            known = all(n is None or n in self.counts for n in numbers)
        if not known:
            raise Refusal(f"its slots go through {name} of its own ({node.name})", 8)

    def _others(self, node: fx.Node, name: str) -> _Labels:
        known = name in _SMOOTH and not node.kwargs.get("rounding_mode")
        if name in CASTS and not is_float(node):
            before = node.args[0]
            whole = is_tensor(before) and dtype_of(before) in _WIDE  # type: ignore[arg-type]
            known = value(node).is_complex() or whole and dtype_of(node) in _WIDE
        if not known:
            raise _chosen(node)
        return frozenset({_OTHERS})


def _is_subset(node: fx.Node) -> bool:
    """Whether a node takes what a mask names, and leaves out the rest: keys that have slots."""
    if op_name(node) != "index":
        return False
    given: Any = node.args[1]
    masks = [n for n in given if n is not None]
    return len(masks) == 1 and is_tensor(masks[0]) and dtype_of(masks[0]) == torch.bool


def _chosen(node: fx.Node) -> Refusal:
    what = "its keys are chosen by, or bounded by, tensors that are no part of a write"
    return Refusal(f"{what} ({node.name})", 8)


def _counts(cache: fx.Node) -> frozenset[float]:
    """Numbers that slots may be divided by or compared with: sizes of the cache and of a page."""
    pages, page, width = value(cache).shape
    found = [-1, 0, 1, page, page - 1, page.bit_length() - 1]
    if isinstance(pages, int):
        found += [pages, pages - 1, pages * page, pages * page - 1, pages * page * width]
    return frozenset(float(n) for n in found)


def _is_sized(node: fx.Node) -> bool:
    """Whether a tensor has a size that is known at run time alone."""
    return is_tensor(node) and not all(isinstance(n, int) for n in value(node).shape)


def _bounds(node: fx.Node, name: str) -> tuple[list[float], list[float]]:
    """Constants that a node does not let numbers fall below, and rise above."""
    args: list[Any] = list(node.args[1:])
    if name in ("clamp", "hardtanh"):
        usual = -1.0 if name == "hardtanh" else None
        low = args[0] if args else node.kwargs.get("min", node.kwargs.get("min_val", usual))
        usual = 1.0 if name == "hardtanh" else None
        named = node.kwargs.get("max", node.kwargs.get("max_val", usual))
        high = args[1] if len(args) > 1 else named
        lows, highs = [low], [high]
    else:
        every = [*node.args, *node.kwargs.values()]
        upper = name in ("clamp_max", "minimum", "fmin")
        lows, highs = ([], every) if upper else (every, [])
    held = [[constant_of(n) for n in found] for found in (lows, highs)]
    numbers = [[n for n in found if n is not None] for found in held]
    return numbers[0], numbers[1]
