"""Operands of the paged scorers: block table and cache as they take them."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import aten, dtype_of, same_size, value
from dsa_compile.passes.prove_pages import Pages


def lines_of_batch(emit: Emitter, pages: Pages) -> fx.Node:
    """The pages of every batch item [B|1, P] int64, with the model's own rule for odd entries."""
    table = pages.table
    if value(table).dim() == 1:
        table = emit(aten.unsqueeze.default, table, 0)
    if pages.lines is not None:
        lines = pages.lines
        if value(lines).dim() != 1:
            lines = emit(aten.reshape.default, lines, [-1])
        table = emit(aten.index_select.default, table, 0, lines)
    if dtype_of(table) != torch.int64:
        table = emit(aten._to_copy.default, table, dtype=torch.int64)
    count = _page_count(emit, pages)
    if pages.low == "wrap":
        negative = emit(aten.lt.Scalar, table, 0)
        table = emit(aten.where.self, negative, emit(aten.add.Tensor, table, count), table)
    elif pages.low == "zero":
        table = emit(aten.clamp.default, table, 0)
    if pages.high == "clamp":
        last = count - 1 if isinstance(count, int) else emit(operator.sub, count, 1)
        table = emit(aten.clamp.default, table, None, last)
    return table


def _page_count(emit: Emitter, pages: Pages) -> fx.Node | int:
    shape = value(pages.cache).shape
    if len(shape) > 2:
        return emit.size(pages.cache, 0)
    rows = emit.size(pages.cache, 0)
    return (
        rows // pages.page if isinstance(rows, int) else emit(operator.floordiv, rows, pages.page)
    )


def fused(emit: Emitter, pages: Pages) -> fx.Node:
    """A fused cache as [pages, page, bytes]."""
    cache = pages.cache
    while value(cache).dim() > 3:
        cache = emit(aten.squeeze.dim, cache, 2)
    return cache


def per_item(emit: Emitter, table: fx.Node, query: fx.Node) -> fx.Node:
    """A table with one line a batch item of the query."""
    if same_size(value(table).shape[0], value(query).shape[0]):
        return table
    return emit(aten.expand.default, table, [emit.size(query, 0), emit.size(table, 1)])
