"""Score keys where they lie: a gather through a block table before the scores disappears.

Candidates of a cache of numbers are scored by ``sparse_mqa_logits`` on the cache itself, with the
candidate blocks named by where they lie in it. Fused pages of fp8 or MXFP4 are scored by the paged
ops, also where no candidates restrict the row. Dense scores of a cache of numbers have no paged
form: those keep their gather, and the report says so.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.providers import load
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import (
    aten,
    erase_unused,
    namespace,
    op_name,
    same_size,
    value,
)
from dsa_compile.passes.note_sites import add_note
from dsa_compile.passes.page_operands import fused, lines_of_batch, per_item
from dsa_compile.passes.prove_pages import Pages
from dsa_compile.passes.read_pages import read_pages
from dsa_compile.passes.score_pages import replace_dense
from dsa_compile.passes.score_trace import Refusal

_CHAIN = ("topk", "getitem", "topk_remap")
_DENSE = ("indexer_select", "indexer_publish", "indexer_block_max")


@dataclass
class _Known:
    """What the scorers of one graph share.

    Attributes:
        pages: how a pair of keys and scales is read, or why it is no such read.
        proofs: of equal reads, by signature.
    """

    pages: dict[tuple[fx.Node, object], Pages | Refusal] = field(default_factory=dict)
    proofs: dict[Hashable, tuple[str, str] | Refusal] = field(default_factory=dict)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Rewrite the scorers whose keys are read through a block table; needs ``expand_candidates``.

    What a site's keys were read through, or why they are still gathered, becomes a note of it.
    """
    graph = graph_module.graph
    known = _Known()
    changed = False
    for call in list(graph.nodes):
        if namespace(call) != "dsa" or op_name(call) not in (*_DENSE, "sparse_mqa_logits"):
            continue
        count = len(context.emission.added)
        try:
            pages = _pages(call, known, context)
            _rewrite(graph, call, pages, context)
            changed = True
        except Exception as error:  # noqa: BLE001 - a fault in here must cost a rewrite, no model
            context.emission.erase_since(count)
            refusal = error if isinstance(error, Refusal) else _unforeseen(error)
            if refusal.progress == 0:
                continue
            note = f"its keys are gathered through a block table: {refusal.reason}"
            add_note(_selection_of(call), note, context.recorder)
    return PassResult(graph_module, changed)


def _unforeseen(error: Exception) -> Refusal:
    """A refusal for what an op says of its operands, or for an error that no rule foresaw."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Refusal(text, 8)


def _needs(context: PassContext, op: str) -> None:
    """Refuse a form that the provider has no op for."""
    if not hasattr(getattr(torch.ops, load(context.provider)), op):
        raise Refusal(f"provider {context.provider!r} has no {op}", 8)


def _pages(call: fx.Node, known: _Known, context: PassContext) -> Pages:
    key, scale = call.args[1], call.kwargs.get("key_scale")
    assert isinstance(key, fx.Node)
    at = (key, scale)
    if at not in known.pages:
        try:
            known.pages[at] = read_pages(key, scale, context.options, known.proofs)  # type: ignore[arg-type]
        except Refusal as refusal:
            known.pages[at] = refusal
    found = known.pages[at]
    if isinstance(found, Refusal):
        raise found
    return found


def _rewrite(graph: fx.Graph, call: fx.Node, pages: Pages, context: PassContext) -> None:
    """Put the paged form of one scorer in its place.

    Raises:
        Refusal: there is none; nothing in the graph has changed hands.
    """
    if call.kwargs.get("anchored"):
        raise Refusal("its candidates count from each row's start", 8)
    emit = Emitter(graph, call, context.emission)
    key = call.args[1]
    assert isinstance(key, fx.Node)
    sizes = _sizes(graph, key, pages, context)
    note = (
        f"its keys are read through {pages.table.name}, {pages.page} tokens a page, and are never "
        "gathered"
    )
    if op_name(call) == "sparse_mqa_logits":
        if pages.quant != "none":
            _needs(context, "paged_sparse_mqa_logits")
        table = lines_of_batch(emit, pages)
        new = _sparse(emit, call, pages, table)
        add_note(_selection_of(call), note, context.recorder)
        call.replace_all_uses_with(new)
        gone: list[fx.Node] = [call]
    elif pages.quant == "none":
        raise Refusal("dense scores of a cache of numbers have no paged form", 8)
    else:
        _needs(context, "paged_mqa_logits")
        table = lines_of_batch(emit, pages)
        add_note(_selection_of(call), note, context.recorder)
        gone = replace_dense(emit, call, pages, table, context)
    for old, size in sizes:
        old.replace_all_uses_with(size)
        gone.append(old)
    erase_unused(graph, gone)


def _sizes(
    graph: fx.Graph, key: fx.Node, pages: Pages, context: PassContext
) -> list[tuple[fx.Node, fx.Node]]:
    """What stands for the sizes that are read off the keys, which would keep them alive.

    Raises:
        Refusal: such a size is found nowhere else.
    """
    found = []
    for use in [u for u in key.users if op_name(u) == "sym_size"]:
        # The keys are read through the table, so that it stands above whatever asks for their size.
        emit = Emitter(graph, use.prev, context.emission)
        if use.args[1] == 1:
            line = emit(aten.sym_size.int, pages.table, value(pages.table).dim() - 1)
            size = emit(operator.mul, line, pages.page)
        else:
            size = emit(aten.sym_size.int, pages.lines or pages.table, 0)
        if use.args[1] not in (0, 1) or not same_size(value(size), value(use)):
            raise Refusal("a size of the keys is found on nothing else", 8)
        found.append((use, size))
    return found


def _sparse(emit: Emitter, call: fx.Node, pages: Pages, table: fx.Node) -> fx.Node:
    """Scores of candidate columns, read where they lie."""
    query, _, weights, blocks, end = call.args
    assert isinstance(query, fx.Node) and isinstance(blocks, fx.Node)
    given = dict(call.kwargs)
    size: Any = given["sparse_block"]
    if pages.page % size:
        raise Refusal(
            f"pages of {pages.page} tokens do not hold whole blocks of {size} positions", 8
        )
    _check_end(call)
    if pages.quant != "none":
        return _sparse_fused(emit, call, pages, table)
    cache = _flat(emit, pages.cache, pages.page, [1, -1, value(pages.cache).shape[-1]])
    kwargs = {k: v for k, v in given.items() if k not in ("row_start", "row_end", "key_scale")}
    if pages.scales is not None:
        kwargs["key_scale"] = _flat(emit, pages.scales, pages.page, [1, -1])
    shown = _from_start(emit, call)
    if shown is not None:
        mask = given.get("mask")
        kwargs["mask"] = shown if mask is None else emit(aten.logical_and.default, mask, shown)
    lying = _physical(emit, blocks, table, pages.page // size)
    return emit(
        torch.ops.dsa.sparse_mqa_logits.default, query, cache, weights, lying, end, **kwargs
    )


def _sparse_fused(emit: Emitter, call: fx.Node, pages: Pages, table: fx.Node) -> fx.Node:
    query, _, weights, blocks, end = call.args
    given = dict(call.kwargs)
    logits = emit(
        torch.ops.dsa.paged_sparse_mqa_logits.default,
        query,
        fused(emit, pages),
        weights,
        blocks,
        end,
        per_item(emit, table, query),  # type: ignore[arg-type]
        sparse_block=given["sparse_block"],
        quant=pages.quant,
        scale=given.get("scale", 1.0),
        row_end=given.get("row_end"),
    )
    shown = _from_start(emit, call)
    masks = [m for m in (given.get("mask"), shown) if m is not None]
    if given.get("bias") is not None:
        logits = emit(aten.add.Tensor, logits, given["bias"])
    for mask in masks:
        logits = emit(aten.where.ScalarOther, mask, logits, -torch.inf)
    return logits


def _check_end(call: fx.Node) -> None:
    """The valid columns must be those of the call's own bounds, which are not asked for again."""
    end = call.args[4]
    expand = end.args[0] if op_name(end) == "getitem" else None  # type: ignore[union-attr]
    if not isinstance(expand, fx.Node) or op_name(expand) != "candidate_expand":
        raise Refusal("its columns come from no expansion of candidates", 8)
    bounds = dict(zip(("row_start", "row_end"), expand.args[1:3], strict=False))
    for name in ("row_start", "row_end"):
        if bounds.get(name, expand.kwargs.get(name)) is not call.kwargs.get(name):
            raise Refusal("its columns were expanded within other bounds", 8)


def _from_start(emit: Emitter, call: fx.Node) -> fx.Node | None:
    """True at the columns that do not lie before the row's start; None where it has none."""
    start = call.kwargs.get("row_start")
    if start is None:
        return None
    end = call.args[4]
    expand: Any = end.args[0]  # type: ignore[union-attr]
    columns = emit(
        torch.ops.dsa.candidate_columns.default,
        call.args[3],
        start,
        num_positions=expand.kwargs["num_positions"],
        sparse_block=call.kwargs["sparse_block"],
    )
    return emit(aten.ge.Tensor, columns, emit(aten.unsqueeze.default, start, -1))


def _physical(emit: Emitter, blocks: fx.Node, table: fx.Node, ratio: int) -> fx.Node:
    """Blocks [B|1, S, N] named by where they lie in the cache, int32."""
    wide = emit(aten._to_copy.default, blocks, dtype=torch.int64)
    page = wide if ratio == 1 else emit(aten.floor_divide.default, wide, ratio)
    last = emit.size(table, 1)
    last = last - 1 if isinstance(last, int) else emit(operator.sub, last, 1)
    safe = emit(aten.clamp.default, page, 0, last)
    items = emit.size(table, 0)
    if isinstance(value(items), int) and value(items) == 1:
        items = emit.size(blocks, 0)
    rows, width = emit.size(blocks, 1), emit.size(blocks, 2)
    safe = emit(aten.expand.default, safe, [items, rows, width])
    lines = emit(aten.unsqueeze.default, table, 1)
    lines = emit(aten.expand.default, lines, [items, rows, emit.size(table, 1)])
    found = emit(aten.gather.default, lines, 2, safe)
    if ratio > 1:
        inner = emit(aten.remainder.Scalar, wide, ratio)
        found = emit(aten.add.Tensor, emit(aten.mul.Tensor, found, ratio), inner)
    return emit(aten._to_copy.default, found, dtype=torch.int32)


def _flat(emit: Emitter, cache: fx.Node, page: int, shape: list[Any]) -> fx.Node:
    """A cache as one run of tokens, which must need no copy.

    Raises:
        Refusal: its pages lie apart.
    """
    held = value(cache)
    sizes, strides = list(held.shape), list(held.stride())
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if str(stride) != str(expected):
            raise Refusal(f"the pages of {cache.name} lie apart: their rows are no single run", 8)
        expected = expected * size
    return emit(aten.view.default, cache, shape)


def _selection_of(call: fx.Node) -> fx.Node:
    """The op whose outputs stand for the model's selection: the call, or what ends its chain."""
    stack, seen = [call], {call}
    while stack:
        node = stack.pop()
        if op_name(node) == "topk_remap":
            return node
        onward = [u for u in node.users if u not in seen and op_name(u) in _CHAIN]
        seen.update(onward)
        stack.extend(onward)
    return call
