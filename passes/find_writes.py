"""Find the caches that matched scorers read and that the graph has written into before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from dsa_compile.passes.context import Recorder
from dsa_compile.passes.graph_tools import (
    CONTRACTIONS,
    FUNCTIONALIZED,
    ancestors,
    dtype_of,
    is_tensor,
    namespace,
    op_name,
    same_size,
    value,
)
from dsa_compile.passes.note_sites import add_note, sites_of

PAGED = frozenset({"paged_mqa_logits", "paged_sparse_mqa_logits"})
KEYED = frozenset(
    {"indexer_select", "indexer_publish", "indexer_block_max", "sparse_mqa_logits"}
    | {"mxfp4_sparse_mqa_logits"}
)
# What only lays the bytes of a whole cache out anew, in their order.
_RELAID = frozenset(
    {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"}
    | {"alias", "detach", "clone", "contiguous", "lift_fresh_copy"}
)


@dataclass(frozen=True)
class CacheWrite:
    """A cache that is read after a write.

    Attributes:
        call: the scorer that reads it.
        written: the node that holds its new bytes, uint8.
        cache: the input, buffer or earlier write that holds the old ones, [pages, page, width].
        quants: formats that its pages may have.
    """

    call: fx.Node
    written: fx.Node
    cache: fx.Node
    quants: tuple[str, ...]


@dataclass(frozen=True)
class LeftWrite:
    """A cache that is read after a write which cannot be looked at, and why."""

    call: fx.Node
    written: fx.Node
    reason: str


@dataclass(frozen=True)
class FusedRead:
    """A cache that is read after a write which is one op already."""

    call: fx.Node
    written: fx.Node


def find_writes(graph: fx.Graph) -> Iterator[CacheWrite | LeftWrite | FusedRead]:
    """Each read of a written cache by a scorer, in graph order; the graph may change meanwhile."""
    for call in list(graph.nodes):
        if namespace(call) != "dsa":
            continue
        for read, quants in _reads(call):
            written = top_of(read)
            if written.op != "call_function":
                continue
            if is_fused_write(written):
                yield FusedRead(call, written)
                continue
            source = _source(written)
            if isinstance(source, str):
                yield LeftWrite(call, written, source)
            else:
                yield CacheWrite(call, written, source, quants)


def top_of(node: fx.Node) -> fx.Node:
    """The node whose uint8 bytes another one holds in the same order."""
    while op_name(node) in _RELAID:
        above = node.args[0]
        if not is_tensor(above) or dtype_of(above) != torch.uint8:  # type: ignore[arg-type]
            break
        node = above  # type: ignore[assignment]
    return node


def is_fused_write(node: fx.Node) -> bool:
    """Whether a node is the cache that a fused write gives."""
    source = node.args[0] if op_name(node) == "getitem" else None
    return isinstance(source, fx.Node) and source.target is FUNCTIONALIZED


def _reads(call: fx.Node) -> list[tuple[fx.Node, tuple[str, ...]]]:
    """Caches of fused pages that a scorer reads, and their formats."""
    if op_name(call) in PAGED:
        return [(call.args[1], (str(call.kwargs.get("quant", "fp8")),))]  # type: ignore[list-item]
    if op_name(call) not in KEYED:
        return []
    given = (call.args[1], call.args[2], call.kwargs.get("key_scale"))
    keys = given if op_name(call).startswith("mxfp4") else (given[0], given[2])
    nodes = ancestors([n for n in keys if isinstance(n, fx.Node)], _ends_read)
    return [(n, ("fp8", "mxfp4")) for n in sorted(nodes) if _may_be_cache(n)]


def _ends_read(node: fx.Node) -> bool:
    return op_name(node) in CONTRACTIONS or _may_be_cache(node)


def _may_be_cache(node: fx.Node) -> bool:
    """Whether a node is the last write of a cache of bytes in pages, or a view of it."""
    if not is_tensor(node) or dtype_of(node) != torch.uint8 or value(node).dim() < 3:
        return False
    top = top_of(node)
    return top.op == "call_function" and isinstance(_source(top), fx.Node)


def _source(written: fx.Node) -> fx.Node | str:
    """What held the old bytes of a written cache, or why that cannot be told."""
    held = value(written)
    # What is above a product belongs to the keys, and to all that comes before them.
    cone = ancestors([written], lambda n: _holds_bytes(n) or op_name(n) in CONTRACTIONS)
    sources = [n for n in cone if _holds_bytes(n) and _elements(n) == _product(held)]
    if not sources:
        return "its cache is no input or buffer of the graph"
    if len(sources) > 1:
        return "its cache is made of several"
    cache = value(sources[0])
    if cache.dim() != 3 or not all(isinstance(n, int) for n in cache.shape[1:]):
        shape = "x".join(str(n) for n in cache.shape)
        return (
            f"its cache is {shape}, and a fused write takes [pages, page, bytes of a token] with "
            "page and bytes constant"
        )
    return sources[0]


def _holds_bytes(node: fx.Node) -> bool:
    if not is_tensor(node) or dtype_of(node) != torch.uint8:
        return False
    return node.op in ("placeholder", "get_attr") or is_fused_write(node)


def _elements(node: fx.Node) -> object:
    return _product(value(node))


def _product(held: torch.Tensor) -> object:
    total = held.numel()
    return total if isinstance(total, int) else total.node.expr


def note_readers(call: fx.Node, note: str, recorder: Recorder) -> None:
    """Add a note to the sites whose picks come from a scorer."""
    stack, seen = [call], {call}
    while stack:
        node = stack.pop()
        if any(True for _ in sites_of(node, recorder)):
            add_note(node, note, recorder)
            continue
        for user in node.users:
            if user not in seen and op_name(user) in _TO_PICKS:
                seen.add(user)
                stack.append(user)


_TO_PICKS = frozenset({"topk", "getitem", "topk_remap", "where", "add", "masked_fill", "view"})


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes hold tensors of one dtype and shape."""
    one, other = value(a), value(b)
    return (
        one.dtype == other.dtype
        and one.dim() == other.dim()
        and all(map(same_size, one.shape, other.shape))
    )
