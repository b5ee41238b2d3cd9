"""Score candidates only: ``indexer_select`` becomes expand, sparse logits, top-k, remap."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.axis_labels import Axes, LabelError, Labels
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.gather_columns import ColumnGatherer, Frame
from dsa_compile.passes.graph_tools import ancestors, erase_unused, is_tensor
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.run_probe import (
    Draw,
    ProbeError,
    draw_masks,
    evaluate,
    mask_leaves,
    memory,
    needed,
)
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.shrink_sizes import SLOW, Shrinker

_SELECT = "dsa.indexer_select.default"


def sparse_block(block_size: int) -> int:
    """Positions a sparse block: the largest of 16 and 8 that divides the candidate block, else it.

    The sparse kernels take blocks of 8 or 16 positions; a candidate block of another size is
    scored whole.
    """
    return next((n for n in (16, 8) if block_size % n == 0), block_size)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Rewrite every ``dsa::indexer_select`` that has candidate ids; needs ``match_indexers``."""
    graph = graph_module.graph
    calls = [
        n for n in graph.nodes if str(n.target) == _SELECT and n.kwargs.get("block_ids") is not None
    ]
    for call in calls:
        _expand(Emitter(graph, call, context.emission), call, context.binder)
    erase_unused(graph, calls)
    return PassResult(graph_module, bool(calls))


def _expand(emit: Emitter, call: fx.Node, binder: SizeBinder) -> None:
    given = dict(call.kwargs)
    query, key, weights = call.args
    assert isinstance(key, fx.Node)
    start, end = given.get("row_start"), given.get("row_end")
    block_size = given["block_size"]
    assert isinstance(block_size, int)
    size = sparse_block(block_size)
    anchored = bool(given.get("anchored", False))
    total = emit.size(key, 1)
    expanded = emit(
        torch.ops.dsa.candidate_expand.default,
        given["block_ids"],
        start,
        end,
        num_positions=total,
        block_size=block_size,
        sparse_block=size,
        anchored=anchored,
    )
    blocks, valid = emit(operator.getitem, expanded, 0), emit(operator.getitem, expanded, 1)
    extra: dict[str, object] = {}
    if given.get("mask") is not None or given.get("bias") is not None:
        columns = emit(
            torch.ops.dsa.candidate_columns.default,
            blocks,
            start,
            num_positions=total,
            sparse_block=size,
            anchored=anchored,
        )
        for name in ("mask", "bias"):
            if isinstance(given.get(name), fx.Node):
                extra[name] = _at_columns(emit, given[name], columns, binder)  # type: ignore[arg-type]
    logits = emit(
        torch.ops.dsa.sparse_mqa_logits.default,
        query,
        key,
        weights,
        blocks,
        valid,
        sparse_block=size,
        scale=given.get("scale", 1.0),
        key_scale=given.get("key_scale"),
        row_start=start,
        row_end=end,
        anchored=anchored,
        **extra,
    )
    picked = emit(
        torch.ops.dsa.topk.default,
        logits,
        valid,
        topk=given["topk"],
        sorted=given.get("sorted", True),
    )
    values, columns = emit(operator.getitem, picked, 0), emit(operator.getitem, picked, 1)
    mapped = emit(
        torch.ops.dsa.topk_remap.default,
        values,
        columns,
        blocks,
        start,
        num_positions=total,
        sparse_block=size,
        anchored=anchored,
        fill=given.get("fill", float("-inf")),
    )
    call.replace_all_uses_with(mapped)


def _at_columns(emit: Emitter, mask: fx.Node, columns: fx.Node, binder: SizeBinder) -> fx.Node:
    """A canonical mask at the candidate columns, re-evaluated there where its ops allow it."""
    cone = [n for n in [*ancestors([mask], mask_leaf), columns] if is_tensor(n)]
    bound = binder.bindings(cone, mask, count=1)
    if not bound:
        return _gathered(emit, mask, columns)
    labels = Labels(bound[0])
    axes: Axes = [labels.fresh(s) for s in bound[0].shape(mask)]
    labels.of[mask] = axes
    frame = Frame(labels, axes[0], axes[1], axes[2])
    gatherer = ColumnGatherer(Layout(labels, emit), frame, columns)
    try:
        found = gatherer.gather(mask, axes)
        if _agrees(mask, found, columns, bound[0]):
            return found
    except (LabelError, Refusal):
        pass
    return _gathered(emit, mask, columns)


def _agrees(mask: fx.Node, found: fx.Node, columns: fx.Node, binding: Binding) -> bool:
    """Whether the re-evaluated mask is the mask gathered at drawn columns."""
    leaves = [n for n in mask_leaves([mask]) if n is not columns]
    given = [*leaves, columns]
    if memory(needed([mask, found], given), binding) > SLOW:
        try:
            binding = _smaller(mask, found, given, binding)
        except ProbeError:
            return False
    total = binding.shape(mask)[-1]
    draw = Draw(torch.Generator().manual_seed(5), total)
    shape = binding.shape(columns)
    for limit in (total, 2, 0):
        draw.positions = limit
        at = torch.randint(0, total, shape, generator=draw.generator)
        env = draw_masks(leaves, draw, binding, special={columns: at})
        try:
            values = evaluate(needed([mask, found], env), env, binding)
        except ProbeError:
            continue
        whole = values[mask].broadcast_to((*shape[:2], total)).gather(-1, at)
        got = values[found].broadcast_to(shape)
        return bool(
            torch.equal(whole, got) if whole.dtype == torch.bool else torch.allclose(whole, got)
        )
    return False


def _smaller(mask: fx.Node, found: fx.Node, given: list[fx.Node], binding: Binding) -> Binding:
    """Smaller sizes for both forms of a mask that stand for the captured ones.

    Raises:
        ProbeError: there are none.
    """
    follower = AxisFollower(Labels(binding))
    follower.cover([mask], given)
    batch, rows, positions = follower.labels.axes(mask)
    return Shrinker(follower, (positions, rows, batch), [mask, found], given, SLOW).members(1)[0]


def _gathered(emit: Emitter, mask: fx.Node, columns: fx.Node) -> fx.Node:
    lead = [emit.size(columns, d) for d in (0, 1)]
    whole = emit(torch.ops.aten.expand.default, mask, [*lead, emit.size(mask, 2)])
    return emit(torch.ops.aten.gather.default, whole, -1, columns)
