"""Find out whether keys are a read of a cache through a block table, and prove it by running it.

Keys [B, T, D] are such a read when position t of batch item b is token ``t % page`` of page
``table[b, t // page]`` of the cache, for every table. Two forms of cache are known: rows of D
numbers, and the fused pages of uint8 that ``kernels.serving_schemas`` describes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.graph_tools import (
    CASTS,
    HEAVY,
    ancestors,
    dtype_of,
    is_float,
    is_tensor,
    is_view,
    op_name,
    value,
)
from dsa_compile.passes.lower_axes import pointwise
from dsa_compile.passes.prove_pages import MOST_CODES, Pages, PagesProver
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.score_trace import Refusal

_READS = frozenset({"index", "index_select", "gather", "embedding", "gather_indexer_k"})
_PIECES = frozenset({"slice", "select", "getitem"})


@dataclass(frozen=True)
class _Read:
    """One op that reads a cache; ``chain`` is its source and what that is a view of."""

    node: fx.Node
    chain: tuple[fx.Node, ...]
    indices: tuple[fx.Node, ...]


def read_pages(
    key: fx.Node,
    scale: fx.Node | None,
    options: MatchOptions,
    proofs: dict[Hashable, tuple[str, str] | Refusal],
) -> Pages:
    """How keys [B, T, D] with scales [B, T] are read through a block table.

    ``proofs`` remembers what was found of equal reads, of other layers say.

    Raises:
        Refusal: they are no such read; progress 0 where nothing looks like one.
    """
    reads = _reads(key)
    beside = [] if scale is None else _reads(scale)
    if not reads or scale is not None and not beside:
        raise Refusal("the keys are not read through a block table", 0)
    refusal = Refusal(
        "no constant of the graph is their page size: capture with a static page dim", 4
    )
    for pages in _proposals(key, reads, beside):
        try:
            return PagesProver(key, scale, pages, options).prove(proofs)
        except Refusal as error:
            refusal = error if error.progress >= refusal.progress else refusal
    raise refusal


def _reads(node: fx.Node) -> list[_Read]:
    """Every read behind keys, through what rearranges, casts or scales them; none if more is."""
    found: dict[fx.Node, _Read] = {}
    stack, seen = [node], set()
    while stack:
        top = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        name = op_name(top)
        if name in _READS and is_tensor(top) or name == "gather_indexer_k":
            read = _read(top)
            if _is_lookup(read.chain[-1]):
                stack.extend(read.indices)
            else:
                found[top] = read
        elif is_view(top) or name in CASTS or name in _PIECES:
            stack.append(top.args[0])  # type: ignore[arg-type]
        elif pointwise(top) or name in ("stack", "cat", "__rshift__"):
            inputs = [n for n in top.all_input_nodes if is_tensor(n) and constant_of(n) is None]
            stack.extend(inputs)
        else:
            return []
    return list(found.values())


def _is_lookup(source: fx.Node) -> bool:
    """Whether a read is that of a small table of the model, such as the numbers of fp4 codes."""
    held = value(source)
    small = all(isinstance(n, int) for n in held.shape) and held.numel() <= MOST_CODES
    return source.op == "get_attr" and small


def _read(node: fx.Node) -> _Read:
    args: Any = node.args
    source = args[0]
    chain = [source]
    while is_view(chain[-1]) or op_name(chain[-1]) in ("slice", "select"):
        chain.append(chain[-1].args[0])
    indices = [n for n in node.all_input_nodes if n is not source and is_tensor(n)]
    return _Read(node, tuple(chain), tuple(indices))


def _proposals(key: fx.Node, reads: list[_Read], beside: list[_Read]) -> Iterator[Pages]:
    """What the read may be, likeliest first; nothing here is trusted."""
    every = [*reads, *beside]
    cone = ancestors([i for r in every for i in r.indices], _stop)
    tables = sorted(n for n in cone if _may_be_table(n))
    lines = _lines(cone)
    numbers = sorted(
        {a for n in cone for a in n.args if type(a) is int and 1 < a <= 1 << 12}, reverse=True
    )
    common = [n for n in every[0].chain if all(n in r.chain for r in every)]
    for table in tables:
        choices = [None, *(at for source, at in lines if source is table)]
        for line in choices:
            for cache in common:
                if dtype_of(cache) == torch.uint8:
                    for quant in ("fp8", "mxfp4"):
                        page = _page_of(cache)
                        if page is not None:
                            yield Pages(cache, table, line, page, quant)
            if len(reads) == 1 and len(beside) <= 1 and is_float(reads[0].chain[0]):
                for cache in reads[0].chain:
                    own = _page_of(cache)
                    for page in [own] if own is not None else numbers:
                        scales = beside[0].chain[0] if beside else None
                        yield Pages(cache, table, line, page, "none", scales=scales)


def _stop(node: fx.Node) -> bool:
    return op_name(node) in HEAVY or is_float(node)


def _may_be_table(node: fx.Node) -> bool:
    if not is_tensor(node) or dtype_of(node) not in (torch.int32, torch.int64):
        return False
    return value(node).dim() in (1, 2)


def _lines(cone: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Two-dimensional reads ``table[line, page]``: the table and the lines."""
    found = []
    for node in cone:
        if op_name(node) == "index":
            args: Any = node.args
            source, (first, *rest) = args[:2]
            if len(rest) == 1 and is_tensor(first) and rest[0] is not None:
                found.append((source, first))
    return found


def _page_of(cache: fx.Node) -> int | None:
    """Tokens a page where the cache has a dim of them, which must be a constant."""
    shape = value(cache).shape
    if len(shape) < 3:
        return None
    return shape[1] if isinstance(shape[1], int) else None
