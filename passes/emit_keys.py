"""Put ``dsa::indexer_k_quant_and_cache`` in the place of a model's own key write.

The write stays functional: PyTorch's ``auto_functionalized_v2`` of the op gives the new cache, as
the capture of a model that calls the op by hand does. Inductor turns it into a write in place
where nothing reads the old cache any more and the input is to get the new one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.find_writes import same_layout
from dsa_compile.passes.fit_keys import KeyForm
from dsa_compile.passes.graph_tools import FUNCTIONALIZED, aten, is_view, same_size, value
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import KeyTrace

WRITE = torch.ops.dsa.indexer_k_quant_and_cache.default
_DEFAULTS = {a.name: a.default_value for a in WRITE._schema.arguments if a.has_default_value()}


@dataclass(frozen=True)
class FusedWrite:
    """The functional call, the new cache, and what takes the place of the model's written bytes."""

    op: fx.Node
    cache: fx.Node
    written: fx.Node


def emit_keys(emit: Emitter, trace: KeyTrace, form: KeyForm) -> FusedWrite:
    """Emit the op and its result behind the model's write.

    Raises:
        Refusal: a size is found on nothing that stays.
        ValueError: the op does not take the cache; the text says why.
    """
    slots = _slots(emit, trace, form)
    sizes: list[Any] = [1, emit.size(slots, 0)]
    if form.rows is not None:
        carrier, *dims = form.rows
        sizes = [_argument(emit, trace, value(trace.carriers[carrier]).shape[d]) for d in dims]
    options: dict[str, Any] = {"norm": form.norm, "quant": form.quant, "hadamard": form.hadamard}
    if form.norm != "none":
        options["eps"] = form.eps
        for name, at in (("norm_weight", form.weight), ("norm_bias", form.bias)):
            options[name] = None if at is None else trace.vectors[at]
    if form.angles is not None:
        for name, angles in zip(("cos", "sin"), form.angles, strict=True):
            side = trace.sides[angles.side]
            line = angles.arrange(emit, side, sizes, value(side).shape[-1])
            width = value(line).shape[-1]
            line = emit(aten.expand.default, line, [*sizes, width])
            options[name] = emit(aten.reshape.default, line, [-1, width])
        options |= {"rope": form.rope, "rope_start": form.start}
    if form.quant == "fp8":
        options |= {"pow2_scale": form.pow2, "floor": form.floor}
    cache = trace.write.cache
    key = _keys(emit, trace)
    given = {k: v for k, v in options.items() if v != _DEFAULTS[k]}
    op = emit(
        FUNCTIONALIZED,
        WRITE,
        k=key,
        slots=slots,
        **given,
        _cache_base_index=0,
        _all_bases=[cache],
    )
    new = emit(operator.getitem, op, 1)
    written = new
    if not same_layout(new, trace.write.written):
        shape = [_argument(emit, trace, n) for n in value(trace.write.written).shape]
        written = emit(aten.reshape.default, new, shape)
    return FusedWrite(op, new, written)


def put_in_place(fused: FusedWrite, written: fx.Node) -> None:
    """Let everything read the fused op's cache; views that are the cache again are passed by."""
    stack = [written]
    while stack:
        node = stack.pop()
        stack += [u for u in node.users if is_view(u)]
        if node is not written and same_layout(node, fused.cache):
            node.replace_all_uses_with(fused.cache)
    made = {fused.op, fused.cache, fused.written}
    written.replace_all_uses_with(fused.written, lambda user: user not in made)


def _keys(emit: Emitter, trace: KeyTrace) -> fx.Node:
    root = trace.root
    return root if value(root).dim() == 2 else emit(aten.reshape.default, root, [-1, trace.dim])


def _slots(emit: Emitter, trace: KeyTrace, form: KeyForm) -> fx.Node:
    slots = trace.slots
    if value(slots).dim() != 1:
        slots = emit(aten.reshape.default, slots, [-1])
    if form.negative == "wrap":
        pages, page = emit.size(trace.write.cache, 0), value(trace.write.cache).shape[1]
        total: Any = pages * page if isinstance(pages, int) else emit(operator.mul, pages, page)
        below = emit(aten.lt.Scalar, slots, 0)
        from_end = emit(aten.add.Tensor, slots, total)
        slots = emit(aten.where.self, below, from_end, slots)
    return slots


def _argument(emit: Emitter, trace: KeyTrace, extent: Any) -> fx.Node | int:
    """A recorded size as an argument, read off what stays in the graph."""
    if isinstance(extent, int):
        return extent
    for node in (trace.root, trace.slots, trace.write.cache, *trace.leaves):
        for at, other in enumerate(value(node).shape):
            if same_size(extent, other):
                return emit.size(node, at)
    raise Refusal("a size of its keys cannot be read off any tensor", 5)
