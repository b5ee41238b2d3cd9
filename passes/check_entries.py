"""Refuse rules on the entries of a block table that no draw shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.check_reach import ReachCheck
from dsa_compile.passes.graph_tools import is_float, is_tensor, is_view, op_name
from dsa_compile.passes.number_spans import Span

BEYOND = 3
"""How far beyond the cache drawn entries lie; those below it go down to -2."""
_READS = frozenset({"index", "index_select", "gather", "embedding"})
_PIECES = frozenset({"slice", "select"})


def check_entries(
    cone: Iterable[fx.Node],
    targets: list[fx.Node],
    table: fx.Node,
    cache: set[fx.Node],
    page: int,
    binding: Binding,
) -> None:
    """Look at all that is done to entries of a block table, and to bits of them.

    Args:
        cone: all nodes between the keys, and what they are read from.
        targets: the keys [B, T, D] first, and whatever else comes out of the read.
        table: the block table.
        cache: the cache of the keys [.., D], and that of their scales where there is one.
        page: tokens a page.
        binding: the captured sizes.

    Raises:
        Refusal: a number beyond all drawn entries is looked for; the text names it.
    """
    reads = [n for n in cone if is_tensor(n) and _reads(n, cache)]
    indices = [i for n in reads for i in n.all_input_nodes if not is_float(i)]
    tokens = max(math.prod(binding.shape(n)[:-1]) for n in cache)
    cut: dict[fx.Node, Span | None] = dict.fromkeys([*reads, *cache])
    cut[table] = Span(-2, tokens // page + BEYOND, True, True, drawn=True)
    reach = ReachCheck(binding, binding.shape(targets[0])[1], strict=False)
    reach.check([*targets, *indices], cut)


def _reads(node: fx.Node, cache: set[fx.Node]) -> bool:
    """Whether a node takes something at given places out of a cache, or a view of one."""
    if op_name(node) == "gather_indexer_k":
        return True
    source: Any = node.args[0] if node.args else None
    while source not in cache and (is_view(source) or op_name(source) in _PIECES):
        source = source.args[0]
    return op_name(node) in _READS and source in cache
