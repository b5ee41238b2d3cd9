"""Walk back from a scorer's queries and head weights to the projections that they come from.

The walk only proposes: what lies between is proven by running it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.graph_tools import (
    CASTS,
    CONTRACTIONS,
    HEAVY,
    SELECTIONS,
    ancestors,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    is_view,
    namespace,
    op_name,
    value,
)
from dsa_compile.passes.recognise_ops import constant_of, is_constant
from dsa_compile.passes.score_trace import Refusal

REDUCTIONS = frozenset({"amax", "max", "amin", "min"})
_PLAIN = frozenset({"mul", "div", "neg"})
_CLAMPS = frozenset({"clamp", "clamp_min", "maximum", "clamp_max"})
_KNOWN = frozenset({"aten", "prims", ""})
_FLOAT8 = frozenset({torch.float8_e4m3fn})


@dataclass(frozen=True)
class QueryTrace:
    """The stretch between two projections and a scorer's operands.

    Attributes:
        query, weights: the scorer's operands, [B, S, H, D] and [B, S, H].
        root: the projection that the queries come from.
        weight_roots: tensors that the weights come from, the projection first, each nearer.
        part: all nodes between, in graph order, roots included.
        leaves: where the stretch begins: roots, and whatever else it reads.
        sides: tensors that the query is multiplied with on the way.
        mixes: whether dims of a query are added to each other without being multiplied.
        fp8, reduced: whether fp8 numbers, a maximum of numbers, are met.
        floors: candidates for the least amax.
        factors: constants that the weights are multiplied with.
    """

    query: fx.Node
    weights: fx.Node
    root: fx.Node
    weight_roots: tuple[fx.Node, ...]
    part: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    sides: tuple[fx.Node, ...]
    mixes: bool
    fp8: bool
    reduced: bool
    floors: tuple[float, ...]
    factors: tuple[float, ...]


def trace_query(
    query: fx.Node, weights: fx.Node, binder: SizeBinder, positions: Any
) -> QueryTrace | None:
    """The stretch above a scorer's operands; None where there is nothing to fuse.

    Args:
        query, weights: the operands, [B, S, H, D] and [B, S, H].
        binder: remembers sizes.
        positions: number of keys.

    Raises:
        Refusal: queries do not come from one projection; the text says what they come from.
    """
    size = _Sizes(binder, query, positions)
    cone = ancestors([query], size.is_root)
    if any(op_name(n) == "fused_indexer_q" for n in cone):
        return None
    roots = [n for n in cone if size.is_root(n) and is_float(n) and size.same(n, query)]
    if len(roots) != 1:
        # Without a rotation or a format there is nothing that a fused op would do.
        if not any(op_name(n) in REDUCTIONS or dtype_of(n) in _FLOAT8 for n in _tensors(cone)):
            return None
        raise Refusal(f"the queries come from {len(roots) or 'no'} projections, not from one", 1)
    root = roots[0]
    carriers = _below(root, cone)
    if all(_changes_nothing(n) for n in carriers if n is not root):
        return None
    own = ancestors([weights], size.is_root)
    weight_roots = _weight_roots(weights, own, set(cone), size)
    leaves = [n for n in {*cone, *own} if size.is_root(n) and not is_constant(n)]
    leaves += [n for n in weight_roots[:1] if n not in leaves]
    sides = _sides(carriers)
    both = sorted({*cone, *own})
    return QueryTrace(
        query,
        weights,
        root,
        weight_roots,
        tuple(both),
        tuple(sorted(leaves)),
        sides,
        any(op_name(n) in CONTRACTIONS or op_name(n) in ("add", "sub") for n in carriers),
        any(dtype_of(n) in _FLOAT8 for n in _tensors(both)),
        any(op_name(n) in REDUCTIONS for n in carriers),
        _floors(both),
        _factors(own),
    )


def _tensors(nodes: list[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if is_tensor(n)]


class _Sizes:
    """Numbers of elements under small sizes, and what stops the walk by them."""

    def __init__(self, binder: SizeBinder, query: fx.Node, positions: Any) -> None:
        self.query = query
        found = binder.bindings([query], query, positions=positions, count=1)
        if not found:
            raise Refusal("no small sizes satisfy the guards of the graph", 1)
        self.binding: Binding = found[0]
        self._stops: dict[fx.Node, bool] = {}
        self._counts: dict[fx.Node, int] = {}

    def count(self, node: fx.Node) -> int:
        if node not in self._counts:
            self._counts[node] = self._counted(node)
        return self._counts[node]

    def _counted(self, node: fx.Node) -> int:
        total = 1
        try:
            for extent in self.binding.shape(node):
                total *= extent
        except (KeyError, ValueError, TypeError, AttributeError):
            # Sizes that the query does not have.
            return -1
        return total

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        return self.count(a) == self.count(b)

    def is_root(self, node: fx.Node) -> bool:
        if node not in self._stops:
            self._stops[node] = self._root(node)
        return self._stops[node]

    def _root(self, node: fx.Node) -> bool:
        name = op_name(node)
        if is_size(node):
            return True
        if node.op != "call_function":
            return not is_constant(node)
        if namespace(node) not in _KNOWN:
            return True
        if name in CONTRACTIONS:
            dim = value(self.query).shape[-1]
            return not any(_constant_matrix(n, dim) for n in node.all_input_nodes)
        if name in HEAVY and name not in REDUCTIONS or name in SELECTIONS:
            return True
        if not is_float(node) or not self.same(node, self.query):
            return False
        # Part of a projection that serves others too.
        source: Any = node.args[0] if node.args else None
        if name == "getitem" and isinstance(source, fx.Node) and source.args:
            source = source.args[0]
        cuts = name in ("slice", "select", "getitem", "narrow")
        return cuts and is_float(source) and self.count(source) > self.count(node)


def _constant_matrix(node: fx.Node, dim: Any) -> bool:
    """Whether a tensor is a constant [.., dim, dim], whatever happens to the parameters."""
    shape = tuple(value(node).shape[-2:]) if is_tensor(node) else ()
    # No constant has a symbolic size, and comparing one would forbid calls of that very size.
    if not all(isinstance(size, int) for size in shape) or shape != (dim, dim):
        return False
    cone = ancestors([node], lambda n: n.op != "call_function")
    return all(_deterministic(n) if n.op == "call_function" else is_constant(n) for n in cone)


def _deterministic(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and not op_name(node).startswith("empty")


def _below(root: fx.Node, cone: list[fx.Node]) -> list[fx.Node]:
    """Nodes of a cone that depend on a node, in graph order, that one first."""
    found = {root}
    for node in sorted(cone):
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return sorted(found)


def _changes_nothing(node: fx.Node) -> bool:
    if is_view(node) or op_name(node) in CASTS:
        return True
    scalars = all(constant_of(a) is not None for a in node.args if not is_tensor(a))
    tensors = [a for a in node.args if is_tensor(a) and constant_of(a) is None]
    return op_name(node) in _PLAIN and scalars and len(tensors) == 1


def _sides(carriers: list[fx.Node]) -> tuple[fx.Node, ...]:
    """What carriers are multiplied with, each tensor once, however often it is computed."""
    inside = set(carriers)
    found: dict[Any, fx.Node] = {}
    for node in carriers:
        if op_name(node) in CONTRACTIONS:
            continue
        for given in node.all_input_nodes:
            if given in inside or not is_tensor(given) or constant_of(given) is not None:
                continue
            if not (is_float(given) or value(given).is_complex()):
                continue
            source = given
            while op_name(source) in ("unsqueeze", "alias", "detach", "clone"):
                source = source.args[0]  # type: ignore[assignment]
            found.setdefault(_made(source), source)
    return tuple(found.values())


def _made(node: fx.Node) -> Any:
    """The same for two nodes that hold the same: captured graphs spell a cosine twice."""
    if node.op != "call_function" or not _deterministic(node):
        return node
    return node.target, repr(node.args), repr(node.kwargs)


def _weight_roots(
    weights: fx.Node, own: list[fx.Node], cone: set[fx.Node], size: _Sizes
) -> tuple[fx.Node, ...]:
    """Tensors of one number a row and head that the weights come from, the furthest first."""
    tops = [
        n
        for n in own
        if n not in cone and size.is_root(n) and is_float(n) and size.same(n, weights)
    ]
    chain = _below(tops[0], own) if len(tops) == 1 else [weights]
    wanted = [n for n in chain if size.same(n, weights) and is_float(n)]
    nearer = [n for n in wanted if not is_view(n) or n is weights]
    free = [n for n in nearer if not _depends(n, cone, size)]
    if not free:
        raise Refusal("the head weights do not come from one projection", 1)
    alone = tuple(n for n in free if not _meets_data(n, weights, cone, size))
    if not alone:
        raise Refusal("the head weights meet other data beside the scale of the queries", 1)
    return alone


def _depends(node: fx.Node, cone: set[fx.Node], size: _Sizes) -> bool:
    shared = ancestors([node], lambda n: n in cone or size.is_root(n))
    return any(n in cone and is_tensor(n) and n.op == "call_function" for n in shared)


def _meets_data(node: fx.Node, weights: fx.Node, cone: set[fx.Node], size: _Sizes) -> bool:
    """Whether other data than the queries' enters between a node and the weights.

    Dynamo hands a model's float over as a tensor without dims, say.
    """
    between = ancestors([weights], lambda n: n is node or n in cone or size.is_root(n))
    others = (n for n in between if n is not node and n not in cone and is_tensor(n))
    return any(size.is_root(n) and not is_constant(n) for n in others)


def _floors(nodes: list[fx.Node]) -> tuple[float, ...]:
    found: dict[float, None] = {}
    for node in nodes:
        if op_name(node) in _CLAMPS:
            for given in (*node.args[1:], *node.kwargs.values()):
                number = constant_of(given)
                if number is not None and number > 0:
                    found[number] = None
    # Some bound the scale, not the maximum.
    return tuple(dict.fromkeys([*found, *(448.0 * f for f in found)])) or (1e-4,)


def _factors(nodes: list[fx.Node]) -> tuple[float, ...]:
    found: list[float] = []
    for node in sorted(nodes):
        if op_name(node) not in ("mul", "div") or len(node.args) < 2:
            continue
        number = constant_of(node.args[1])
        if number is None and op_name(node) == "mul":
            number = constant_of(node.args[0])
        if number:
            found.append(number if op_name(node) == "mul" else 1.0 / number)
    return tuple(found)
