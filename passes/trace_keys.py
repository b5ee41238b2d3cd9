"""Walk back from a written cache to the projection that its keys come from, and to their slots.

The walk only proposes: what lies between is proven by running it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.find_writes import CacheWrite, is_fused_write
from dsa_compile.passes.graph_tools import (
    CONTRACTIONS,
    HEAVY,
    SELECTIONS,
    ancestors,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.recognise_ops import constant_of, is_constant
from dsa_compile.passes.score_trace import Refusal

_KNOWN = frozenset({"aten", "prims", ""})
STAGES = frozenset({"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"})
_REDUCTIONS = frozenset({"amax", "max", "amin", "min"})
_CLAMPS = frozenset({"clamp", "clamp_min", "maximum"})
_PIECES = frozenset({"slice", "select", "getitem", "narrow"})
_MOST_ROOTS, _MOST_SLOTS = 6, 24
_MOST_EPS = 1e-2


@dataclass(frozen=True)
class KeyTrace:
    """The stretch between a projection, a slot mapping and a cache that gets keys.

    Attributes:
        write: the cache.
        quant: format of its pages.
        dim: of a key.
        root: the keys [.., D], where the stretch begins.
        slots: the slot of each key, an integer each.
        part: all nodes between, in graph order, leaves included.
        leaves: where the stretch begins: root, slots, cache, and whatever else it reads.
        carriers: tensors of as many numbers as the keys that come from them, in graph order.
        sides: tensors that the keys are multiplied with on the way.
        vectors: tensors of D numbers: weights and biases of a norm.
        epsilons, floors: candidates for the eps of a norm, and for the least amax.
    """

    write: CacheWrite
    quant: str
    dim: int
    root: fx.Node
    slots: fx.Node
    part: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    carriers: tuple[fx.Node, ...]
    sides: tuple[fx.Node, ...]
    vectors: tuple[fx.Node, ...]
    epsilons: tuple[float, ...]
    floors: tuple[float, ...]

    @property
    def targets(self) -> list[fx.Node]:
        """What must be run to compare the stretch with an op."""
        return [self.write.written, *self.sides, *self.vectors]


def trace_keys(write: CacheWrite, quant: str, binder: SizeBinder) -> list[KeyTrace]:
    """What the stretch above a written cache may be, likeliest first: slots vary slowest.

    Raises:
        Refusal: it begins in no keys, or in no slots; the text says so.
    """
    dim = _head_dim(write, quant)
    cone = ancestors([write.written], lambda n: n is write.cache or _is_root(n, dim))
    tops = [n for n in sorted(cone) if _is_key(n, dim) and _is_root(n, dim)]
    # A table of angles may be as wide as a key, but keys are computed or given, never held.
    tops = [n for n in tops if n.op != "get_attr"] or tops
    if not tops:
        raise Refusal(f"its keys come from no projection to {dim} dims", 3)
    sizes = _Counts(cone, write.cache, binder)
    found: list[KeyTrace] = []
    for top in tops:
        count = sizes.of(top) // dim
        slots_of_all = sorted(n for n in cone if _may_be_slots(n) and sizes.of(n) == count)
        for slots in slots_of_all[:_MOST_SLOTS]:
            base = _trace(write, quant, dim, top, slots, sizes)
            if base is not None:
                found.append(base)
    if not found:
        raise Refusal("no tensor of the graph holds the slots of its keys", 4)
    return found


def later_roots(trace: KeyTrace, binder: SizeBinder) -> Iterator[KeyTrace]:
    """The same stretch cut further down, where the op's stages may begin, the furthest up first."""
    sizes = _Counts(list(trace.part), trace.write.cache, binder)
    count = 0
    for node in trace.carriers[1:]:
        if is_view(node) or not _is_key(node, trace.dim):
            continue
        cut = _trace(trace.write, trace.quant, trace.dim, node, trace.slots, sizes)
        if cut is None:
            continue
        count += 1
        yield cut
        if count == _MOST_ROOTS:
            return


def _head_dim(write: CacheWrite, quant: str) -> int:
    width = value(write.cache).shape[2]
    if quant == "fp8":
        dim = width - 4
        known = 0 < dim <= 128 and dim % 4 == 0
    else:
        dim = width // 17 * 32
        known = width % 17 == 0
    if not known:
        raise Refusal(f"{width} bytes a token are no {quant} key and its scale", 3)
    return int(dim)


def _trace(
    write: CacheWrite, quant: str, dim: int, root: fx.Node, slots: fx.Node, sizes: _Counts
) -> KeyTrace | None:
    given = (root, slots, write.cache)
    cone = ancestors([write.written], lambda n: n in given or _is_root(n, dim))
    if root not in cone or slots not in cone:
        return None
    part = tuple(sorted(cone))
    leaves = [n for n in part if (n in given or _is_root(n, dim)) and not is_constant(n)]
    below = _below(root, part)
    total = sizes.of(root)
    carriers = [n for n in below if is_float(n) and sizes.of(n) == total]
    return KeyTrace(
        write,
        quant,
        dim,
        root,
        slots,
        part,
        tuple(n for n in leaves if is_tensor(n)),
        tuple(carriers),
        _sides(below),
        tuple(n for n in part if is_float(n) and n is not root and _is_vector(n, dim)),
        _epsilons(part),
        _floors(part),
    )


class _Counts:
    """Numbers of elements under small sizes."""

    def __init__(self, nodes: list[fx.Node], cache: fx.Node, binder: SizeBinder) -> None:
        found = binder.bindings([n for n in nodes if is_tensor(n)], cache, count=1)
        if not found:
            raise Refusal("no small sizes satisfy the guards around its key write", 3)
        self.binding: Binding = found[0]

    def of(self, node: fx.Node) -> int:
        if not is_tensor(node):
            return -1
        total = 1
        for extent in self.binding.shape(node):
            total *= extent
        return total


def _is_root(node: fx.Node, dim: int) -> bool:
    """Whether the walk ends at a node: a projection, an input, or what no stage contains."""
    name = op_name(node)
    if is_size(node):
        return True
    if node.op != "call_function":
        return not is_constant(node)
    if getattr(node.target, "namespace", "") not in _KNOWN or is_fused_write(node):
        return True
    if name in CONTRACTIONS:
        return not any(_constant_matrix(n, dim) for n in node.all_input_nodes)
    if name in SELECTIONS or name in HEAVY and name not in STAGES | _REDUCTIONS:
        return True
    source: Any = node.args[0] if node.args else None
    if name == "getitem" and isinstance(source, fx.Node) and _of_others(source):
        return True
    # A part of a projection that serves others too.
    if name in _PIECES and is_float(node) and value(node).shape[-1:] == (dim,):
        while name == "getitem" and isinstance(source, fx.Node) and not is_tensor(source):
            source = source.args[0]
        return is_float(source) and bool(value(source).shape[-1] != dim)
    return False


def _of_others(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") not in _KNOWN


def _constant_matrix(node: fx.Node, dim: int) -> bool:
    """Whether a tensor is a constant [.., dim, dim], whatever happens to the parameters."""
    if not is_tensor(node) or tuple(value(node).shape[-2:]) != (dim, dim):
        return False
    cone = ancestors([node], lambda n: n.op != "call_function")
    return all(n.op == "call_function" or is_constant(n) for n in cone)


def _is_key(node: fx.Node, dim: int) -> bool:
    if not is_float(node) or dtype_of(node).itemsize < 2 or value(node).dim() < 2:
        return False
    last = value(node).shape[-1]
    return isinstance(last, int) and last == dim


def _may_be_slots(node: fx.Node) -> bool:
    return is_tensor(node) and dtype_of(node) in (torch.int32, torch.int64)


def _is_vector(node: fx.Node, dim: int) -> bool:
    shape = value(node).shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == dim


def _below(root: fx.Node, part: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Nodes of a part that depend on a node, in graph order, that one first."""
    found = {root}
    for node in part:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return sorted(found)


def _sides(below: list[fx.Node]) -> tuple[fx.Node, ...]:
    """What the keys, the first of the nodes, are multiplied with further down, each tensor once."""
    inside = set(below)
    found: dict[fx.Node, None] = {}
    for node in below[1:]:
        if op_name(node) in CONTRACTIONS or not is_tensor(node):
            continue
        if not (is_float(node) or value(node).is_complex()):
            continue
        for given in node.all_input_nodes:
            if given in inside or not is_tensor(given) or constant_of(given) is not None:
                continue
            if is_float(given) or value(given).is_complex():
                source = given
                while op_name(source) in ("unsqueeze", "alias", "detach", "clone"):
                    source = source.args[0]  # type: ignore[assignment]
                found.setdefault(source)
    return tuple(found)


def _numbers(nodes: tuple[fx.Node, ...], names: frozenset[str]) -> Iterator[float]:
    for node in nodes:
        if op_name(node) in names:
            for given in (*node.args, *node.kwargs.values()):
                number = constant_of(given)
                if number is not None and number > 0:
                    yield number


def _epsilons(nodes: tuple[fx.Node, ...]) -> tuple[float, ...]:
    """Small numbers that are added, or that a norm is given, and PyTorch's own."""
    given = _numbers(nodes, STAGES | {"add", "clamp", "clamp_min", "maximum"})
    own = (torch.finfo(torch.float32).eps, 0.0)
    return tuple(dict.fromkeys([*(n for n in given if n <= _MOST_EPS), *own]))


def _floors(nodes: tuple[fx.Node, ...]) -> tuple[float, ...]:
    """Least values of clamps, and what bounds of the scale mean for the maximum."""
    found = list(dict.fromkeys(_numbers(nodes, _CLAMPS)))
    return tuple(dict.fromkeys([*found, *(448.0 * f for f in found)])) or (1e-4,)
