"""Dense selections over fused pages: paged scores, then what the model reads off them."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.expand_candidates import sparse_block
from dsa_compile.passes.graph_tools import aten, op_name, value
from dsa_compile.passes.page_operands import fused, per_item
from dsa_compile.passes.prove_pages import Pages


def replace_dense(
    emit: Emitter, call: fx.Node, pages: Pages, table: fx.Node, context: PassContext
) -> list[fx.Node]:
    """Replace a dense selection, and what a source publishes beside it.

    The scores [B, S, T] of all positions exist between the ops, as in the model, but never those
    of single heads, and the keys are read where they lie.

    Returns:
        Nodes that nothing reads any more.
    """
    given = dict(call.kwargs)
    query, key, weights = call.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    total = _positions(emit, key, pages)
    lead = [emit.size(query, 0), emit.size(query, 1)]
    end = given.get("row_end")
    device = value(query).device
    if end is None:
        end = emit(aten.full.default, [1, 1], total, dtype=torch.int64, device=device)
    high = emit(aten.clamp.default, end, 0, total)
    logits = _logits(emit, call, pages, table, high, total)
    outs = list(_selection(emit, given, logits, high, total, lead, device))
    if op_name(call) != "indexer_select":
        outs += _published(emit, call, logits, high, total)
    gone = [call]
    names: dict[str, str] = {}
    for use in list(call.users):
        place: Any = use.args[1]
        use.replace_all_uses_with(outs[place])
        names[use.name] = outs[place].name
        gone.append(use)
    pairs = context.recorder.pairs
    for at, pair in enumerate(pairs):
        if pair.new_indices in names:
            pairs[at] = replace(pair, new_indices=names[pair.new_indices])
    return gone


def _positions(emit: Emitter, key: fx.Node, pages: Pages) -> fx.Node | int:
    """Number of positions, read off the block table where it is no constant."""
    total = value(key).shape[1]
    if isinstance(total, int):
        return total
    line = emit.size(pages.table, value(pages.table).dim() - 1)
    room = line * pages.page if isinstance(line, int) else emit(operator.mul, line, pages.page)
    same = str(value(room)) == str(total)
    return room if same else emit.size(key, 1)


def _logits(
    emit: Emitter, call: fx.Node, pages: Pages, table: fx.Node, high: fx.Node, total: Any
) -> fx.Node:
    given = dict(call.kwargs)
    query, _, weights = call.args
    assert isinstance(query, fx.Node)
    logits = emit(
        torch.ops.dsa.paged_mqa_logits.default,
        query,
        fused(emit, pages),
        weights,
        high,
        per_item(emit, table, query),
        num_positions=total,
        quant=pages.quant,
        scale=given.get("scale", 1.0),
    )
    if given.get("bias") is not None:
        logits = emit(aten.add.Tensor, logits, given["bias"])
    masks = [given["mask"]] if given.get("mask") is not None else []
    if given.get("row_start") is not None:
        position = emit(aten.arange.default, total, device=value(query).device)
        start = emit(aten.unsqueeze.default, given["row_start"], -1)
        masks.append(emit(aten.ge.Tensor, position, start))
    for mask in masks:
        logits = emit(aten.where.ScalarOther, mask, logits, -torch.inf)
    return logits


def _selection(
    emit: Emitter,
    given: dict[str, Any],
    logits: fx.Node,
    high: fx.Node,
    total: Any,
    lead: list[Any],
    device: torch.device,
) -> tuple[fx.Node, fx.Node]:
    """Values and positions; the columns are the positions themselves."""
    size = sparse_block(8)
    whole = total + size - 1 if isinstance(total, int) else emit(operator.add, total, size - 1)
    count = whole // size if isinstance(whole, int) else emit(operator.floordiv, whole, size)
    blocks = emit(aten.arange.default, count, dtype=torch.int32, device=device)
    blocks = emit(aten.expand.default, blocks, [*lead, count])
    valid = emit(aten._to_copy.default, high, dtype=torch.int32)
    valid = emit(aten.expand.default, valid, lead)
    picked = emit(
        torch.ops.dsa.topk.default,
        logits,
        valid,
        topk=given["topk"],
        sorted=given.get("sorted", True),
    )
    mapped = emit(
        torch.ops.dsa.topk_remap.default,
        emit(operator.getitem, picked, 0),
        emit(operator.getitem, picked, 1),
        blocks,
        None,
        num_positions=total,
        sparse_block=size,
        fill=given.get("fill", float("-inf")),
    )
    return emit(operator.getitem, mapped, 0), emit(operator.getitem, mapped, 1)


def _published(
    emit: Emitter, call: fx.Node, logits: fx.Node, high: fx.Node, total: Any
) -> list[fx.Node]:
    """Block maxima, or the best blocks of them; see ``kernels.reference``."""
    given = dict(call.kwargs)
    size: Any = given["block_size"]
    fill: Any = given.get("fill", float("-inf"))
    if fill != float("-inf"):
        hidden = emit(aten.eq.Scalar, logits, -torch.inf)
        logits = emit(aten.masked_fill.Scalar, logits, hidden, fill)
    held = value(logits)
    lead = [emit.size(logits, 0), emit.size(logits, 1)]
    if isinstance(total, int):
        count: Any = -(-total // size)
        tail: Any = count * size - total
    else:
        count = emit(operator.floordiv, emit(operator.add, total, size - 1), size)
        tail = emit(operator.sub, emit(operator.mul, count, size), total)
    if value(tail) != 0:
        rest = emit(aten.full.default, [*lead, tail], fill, dtype=held.dtype, device=held.device)
        logits = emit(aten.cat.default, [logits, rest], -1)
    parts = emit(aten.view.default, logits, [*lead, count, size])
    maxima = emit(aten.amax.default, parts, [-1])
    if op_name(call) == "indexer_block_max":
        return [maxima]
    if given.get("pin_newest", True):
        above = emit(aten.sub.Tensor, high, 1)
        newest = emit(aten.floor_divide.default, above, size)
        newest = emit(aten.unsqueeze.default, newest, -1)
        block = emit(aten.arange.default, count, device=held.device)
        here = emit(aten.eq.Tensor, block, newest)
        pin = given.get("pin_value")
        pin = float("inf") if pin is None else pin
        maxima = emit(aten.masked_fill.Scalar, maxima, here, pin)
    best = emit(aten.topk.default, maxima, given["num_blocks"])
    return [emit(operator.getitem, best, 0), emit(operator.getitem, best, 1)]
