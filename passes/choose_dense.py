"""Let contexts that are hardly longer than their candidates be scored densely.

Gathered keys serve one row each, keys of a dense tile serve many, so that scoring all positions is
the cheaper form until the context is well beyond the candidates. The choice is made on the host,
from shapes alone, in one op that holds both forms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import (
    dtype_of,
    erase_unused,
    is_view,
    namespace,
    op_name,
    value,
)
from dsa_compile.passes.read_selection import constant_size

_BOTH = "select_columns"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Join ``sparse_mqa_logits`` and ``topk_positions`` to ``select_columns``.

    Needs ``fuse_remap``. A provider without the op, or without a known crossover, keeps the two.
    """
    graph = graph_module.graph
    found = [n for n in graph.nodes if op_name(n) == "topk_positions"]
    joined = [n for n in found if _join(graph, n, context)]
    erase_unused(graph, joined)
    return PassResult(graph_module, bool(joined))


def _join(graph: fx.Graph, selection: fx.Node, context: PassContext) -> bool:
    logits, end, blocks, *row_start = selection.args
    library = getattr(torch.ops, namespace(selection))
    if context.crossover is None or not hasattr(library, _BOTH):
        return False
    if not isinstance(logits, fx.Node) or op_name(logits) != "sparse_mqa_logits":
        return False
    plain = len(logits.users) == 1 and logits.args[3:5] == (blocks, end)
    masked = any(logits.kwargs.get(name) is not None for name in ("mask", "bias"))
    query, key = logits.args[0], logits.args[1]
    count = constant_size(value(blocks).shape[-1])
    size: Any = selection.kwargs["sparse_block"]
    heads, head_dim = value(query).shape[2:]
    known = isinstance(heads, int) and isinstance(head_dim, int) and count is not None
    if not plain or masked or not known or selection.kwargs.get("anchored", False):
        return False
    assert isinstance(key, fx.Node) and count is not None
    below = context.crossover(count * size, heads, head_dim, dtype_of(key).itemsize)
    kwargs = {k: v for k, v in logits.kwargs.items() if k not in ("mask", "bias")}
    kwargs |= {k: v for k, v in selection.kwargs.items() if k != "num_positions"}
    kwargs["dense_below"] = below
    with graph.inserting_before(selection):
        both = graph.call_function(getattr(library, _BOTH).default, logits.args, kwargs)
    both.meta = dict(selection.meta)
    selection.replace_all_uses_with(both)
    _note(both, below, context)
    return True


def _note(both: fx.Node, below: int, context: PassContext) -> None:
    """Name the crossover at the sites whose picks come from here."""
    made, stack = set(), [both]
    while stack:
        for user in stack.pop().users:
            if op_name(user) == "getitem" or is_view(user):
                made.add(user.name)
                stack.append(user)
    given = {a.name: a.default_value for a in both.target._schema.arguments}  # type: ignore[union-attr]
    few = ""
    if "few_rows" in given:
        few = (
            f"; of up to {given['few_rows_ratio']} times the candidates' columns in calls of "
            f"{given['few_rows']} rows or fewer"
        )
    sites = context.recorder.sites
    for pair in context.recorder.pairs:
        if pair.new_indices in made:
            note = f"contexts of fewer than {below:,} positions are scored densely" + few
            sites[pair.site] = replace(sites[pair.site], notes=(*sites[pair.site].notes, note))
