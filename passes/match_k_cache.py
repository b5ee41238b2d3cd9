"""Match key writes: norm, rotation, Hadamard, quantisation, and the write through a slot mapping.

Looked at is every cache of bytes that a matched scorer reads after the graph has written into it.
Proposed by structure, from the cache back to a projection and to the slots; accepted by behaviour;
then one ``dsa::indexer_k_quant_and_cache`` in its place, in functional form.

The cache must be an input or a buffer [pages, page, bytes of a token] (or what an earlier fused
write gave) in the layout of ``kernels.serving_schemas``. How the bytes get there does not matter:
``index_put`` at pages and tokens of views of the two parts of a page, at byte offsets of the
flattened cache, ``index_copy`` or ``scatter`` of rows, through casts of views to fp8 or fp32, into
a copy that has room for what is dropped. Slots of -1 are left out, or counted from the end of the
cache where the model's own indexing does so; that a model cannot take them is fine too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.kernels.providers import load
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.check_key_flow import check_flow
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_keys import FusedWrite, emit_keys, put_in_place
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.find_writes import (
    CacheWrite,
    FusedRead,
    LeftWrite,
    find_writes,
    note_readers,
)
from dsa_compile.passes.fit_keys import KeyForm
from dsa_compile.passes.graph_tools import erase_unused, is_size, is_tensor, signature
from dsa_compile.passes.prove_keys import KeyProver
from dsa_compile.passes.run_probe import memory
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import KeyTrace, later_roots, trace_keys

log = logging.getLogger("dsa_compile")

OP = "indexer_k_quant_and_cache"
_COPIES = 6
"""Caches of bytes that a probe holds at once, at the most."""


@dataclass(frozen=True)
class _Found:
    """Which proposal a write is: its number, that of its later root if any, and the form."""

    trace: int
    root: int | None
    form: KeyForm


@dataclass
class _Known:
    """What the writes of one graph share.

    Attributes:
        binder: remembers sizes.
        found: of equal stretches, or why nothing was.
        notes: on each written cache, and on the one that took its place.
    """

    binder: SizeBinder = field(default_factory=SizeBinder)
    found: dict[Hashable, _Found | Refusal] = field(default_factory=dict)
    notes: dict[fx.Node, str] = field(default_factory=dict)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Fuse the key writes that matched scorers read; needs ``match_paged_keys``.

    What was fused, or why a write is left as it is, becomes a note of the sites that read it.
    """
    graph = graph_module.graph
    known = _Known()
    old: list[fx.Node] = []
    for seen in find_writes(graph):
        written = seen.written
        if written not in known.notes and not isinstance(seen, FusedRead):
            made = _look_at(graph, seen, context, known)
            if isinstance(made, Refusal):
                known.notes[written] = f"its key write is left as it is: {_text(made)}"
            else:
                fused, form = made
                put_in_place(fused, written)
                known.notes[fused.cache] = f"its key write is one op: {form.describe()}"
                known.notes[written] = known.notes[fused.cache]
                old.append(written)
        if written in known.notes:
            note_readers(seen.call, known.notes[written], context.recorder)
    erase_unused(graph, old)
    return PassResult(graph_module, bool(old))


def _text(refusal: Refusal) -> str:
    more = f" ({refusal.counterexample})" if refusal.counterexample else ""
    return refusal.reason + more


def _look_at(
    graph: fx.Graph, seen: CacheWrite | LeftWrite, context: PassContext, known: _Known
) -> tuple[FusedWrite, KeyForm] | Refusal:
    count = len(context.emission.added)
    if isinstance(seen, LeftWrite):
        return Refusal(seen.reason, 3)
    nearest = Refusal(f"provider {context.provider!r} has no {OP}", 2)
    if not hasattr(getattr(torch.ops, load(context.provider)), OP):
        return nearest
    for quant in seen.quants:
        try:
            return _match(graph, seen, quant, context, known)
        except Refusal as refusal:
            nearest = refusal if refusal.progress > nearest.progress else nearest
        except Exception as error:  # noqa: BLE001 - a fault in here must cost a fusion, no model
            log.warning("a key write was left as it was: an unforeseen error", exc_info=error)
            first = (str(error).splitlines() or ["no message"])[0]
            nearest = Refusal(f"unforeseen {type(error).__name__} while matching: {first}", 9)
        context.emission.erase_since(count)
    return nearest


def _match(
    graph: fx.Graph, write: CacheWrite, quant: str, context: PassContext, known: _Known
) -> tuple[FusedWrite, KeyForm]:
    traces = trace_keys(write, quant, known.binder)
    key = (quant, tuple(_signature(trace) for trace in traces))
    if key not in known.found:
        try:
            known.found[key] = _search(graph, traces, context, known)
        except Refusal as refusal:
            known.found[key] = refusal
    found = known.found[key]
    if isinstance(found, Refusal):
        raise found
    trace = traces[found.trace]
    if found.root is not None:
        trace = list(later_roots(trace, known.binder))[found.root]
    return _emitted(graph, trace, found.form, context), found.form


def _signature(trace: KeyTrace) -> Hashable:
    leaves = set(trace.leaves)
    ends = (trace.root, trace.slots, trace.write.cache, trace.write.written)
    marks = tuple(trace.part.index(n) for n in ends)
    rows: Any = signature(trace.part, lambda n: n in leaves)
    # What a leaf holds is drawn, so that its name tells nothing.
    return marks, tuple(row[:3] if row[0] == "leaf" else row for row in rows)


def _search(graph: fx.Graph, traces: list[KeyTrace], context: PassContext, known: _Known) -> _Found:
    """The first proposal that is proven.

    Raises:
        Refusal: none is; the one that got furthest, earlier ones first.
    """
    nearest = Refusal("its write was not understood", 0)
    understood = []
    for number, trace in enumerate(traces):
        try:
            return _Found(number, None, _proven(graph, trace, context, known))
        except Refusal as refusal:
            nearest = refusal if refusal.progress > nearest.progress else nearest
            if refusal.progress == 9:
                understood.append(number)
    # The slots are those of the keys; a stage that no op has may come before the known ones.
    for number in understood:
        for at, later in enumerate(later_roots(traces[number], known.binder)):
            with contextlib.suppress(Refusal):
                return _Found(number, at, _proven(graph, later, context, known))
    if nearest.progress < 8:
        what = "no tensor of as many integers as there are keys holds their slots"
        raise Refusal(what, nearest.progress, _text(nearest))
    raise nearest


def _proven(graph: fx.Graph, trace: KeyTrace, context: PassContext, known: _Known) -> KeyForm:
    """The form of a stretch, proven under all kinds of draws; nothing stays in the graph."""
    options = context.options
    provers = [
        KeyProver(trace, binding, options.seed + 3) for binding in _bindings(trace, context, known)
    ]
    form = provers[0].fit()
    count = len(context.emission.added)
    try:
        fused = _emitted(graph, trace, form, context)
        for prover in provers:
            prover.check(fused, form, options.draws)
    finally:
        context.emission.erase_since(count)
    check_flow(trace, form)
    return form


def _emitted(graph: fx.Graph, trace: KeyTrace, form: KeyForm, context: PassContext) -> FusedWrite:
    emit = Emitter(graph, trace.write.written, context.emission)
    try:
        return emit_keys(emit, trace, form)
    except (TypeError, ValueError) as error:
        raise Refusal(f"the op does not take it: {str(error).splitlines()[0]}", 9) from error


def _bindings(trace: KeyTrace, context: PassContext, known: _Known) -> list[Binding]:
    cache = trace.write.cache
    nodes = [n for n in trace.part if is_tensor(n) or is_size(n)]
    found = known.binder.bindings(nodes, cache, count=4)
    if not found:
        raise Refusal("no small sizes satisfy the guards around its key write", 5)
    fitting = [b for b in found if 0 < _product(b, trace.slots) <= _places(b, cache)]
    if not fitting:
        raise Refusal("no small sizes hold fewer keys than its cache has places", 5)
    size = memory(nodes, fitting[0]) + _COPIES * _product(fitting[0], cache)
    if size > context.options.probe_memory_bytes:
        raise Refusal(
            f"its static sizes need {size / 2**30:.1f} GiB to probe its key write, more than the "
            f"budget of {context.options.probe_memory_bytes / 2**30:.1f} GiB",
            5,
        )
    return fitting[:2]


def _product(binding: Binding, node: fx.Node) -> int:
    total = 1
    for extent in binding.shape(node):
        total *= extent
    return total


def _places(binding: Binding, cache: fx.Node) -> int:
    pages, page = binding.shape(cache)[:2]
    return pages * page
