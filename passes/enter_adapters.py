"""Let opaque ops that have an adapter enter: their plain form stands in while the matcher looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.passes.adapter import Adapter
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import (
    HEAVY,
    HELD,
    ancestors,
    op_name,
    selection_root,
    value,
    where_in_model,
)
from dsa_compile.passes.prove_adapter import prove_adapter
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.sites import Site
from dsa_compile.passes.spell_adapters import Spelled, Speller

_NOTE = "dsa_adapter_note"


@dataclass(frozen=True)
class Entry:
    """A call that was taken out of the graph, and its plain form.

    Attributes:
        target, args, kwargs, meta, name: of the call; what it reads is held until it is settled.
        outputs: (name, meta) of the call (key None) or of its outputs by number.
        spelled: the plain form.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    name: str
    outputs: dict[int | None, tuple[str, dict[str, Any]]]
    spelled: Spelled


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Put the plain form of every proven adapted call in its place.

    ``leave_adapters`` must run after the matcher: it gives back what was not matched. A call that
    is not what its adapter declares is left alone and recorded as a kept site.
    """
    for call in list(graph_module.graph.nodes):
        adapter = _adapter_of(call, context)
        if adapter is not None:
            _enter(graph_module.graph, call, adapter, context)
    return PassResult(graph_module, bool(context.entered))


def notes_of(selection: fx.Node) -> tuple[str, ...]:
    """How the adapted ops that a selection ranks, or is masked by, were proven."""

    def stop(node: fx.Node) -> bool:
        if node is selection:
            return False
        return op_name(node) in HEAVY or selection_root(node) is not None

    found = sorted(n for n in ancestors([selection], stop) if _NOTE in n.meta)
    return tuple(dict.fromkeys(n.meta[_NOTE] for n in found))


def _adapter_of(call: fx.Node, context: PassContext) -> Adapter | None:
    target = call.target
    if not context.adapters or not isinstance(target, torch._ops.OpOverload):
        return None
    return context.adapters.get(f"{target._schema.name}.{target._overloadname}")


def _check_users(call: fx.Node, adapter: Adapter) -> None:
    """Refuse a call whose outputs are handed on as one tuple, or that the adapter has no name for.

    Raises:
        Refusal: says which.
    """
    if isinstance(value(call), torch.Tensor):
        return
    for use in call.users:
        if op_name(use) != "getitem" or use.args[1] not in range(len(adapter.outputs)):
            raise Refusal(f"{adapter.op} gives outputs that its adapter does not name", 5)


def _enter(graph: fx.Graph, call: fx.Node, adapter: Adapter, context: PassContext) -> None:
    count = len(context.emission.added)
    try:
        _check_users(call, adapter)
        spelled = Speller(Emitter(graph, call, context.emission), call, adapter).spell()
        note = prove_adapter(call, adapter, spelled, context.options)
    except Exception as error:  # noqa: BLE001 - a fault in here must cost a match, never a model
        context.emission.erase_since(count)
        text = str(error).splitlines()[0] if str(error) else "no message"
        refusal = (
            error
            if isinstance(error, Refusal)
            else Refusal(f"{adapter.op} cannot enter: {type(error).__name__}: {text}", 5)
        )
        site = Site(
            "single",
            "kept",
            where_in_model(call),
            reason=refusal.reason,
            counterexample=refusal.counterexample,
            progress=refusal.progress,
        )
        context.recorder.sites.append(site)
        return
    spelled.core.meta[_NOTE] = note
    outputs: dict[int | None, tuple[str, dict[str, Any]]] = {None: (call.name, dict(call.meta))}
    if None in spelled.outs:
        call.replace_all_uses_with(spelled.outs[None])
    else:
        outputs = {}
        for use in list(call.users):
            place: Any = use.args[1]
            outputs.setdefault(place, (use.name, dict(use.meta)))
            use.replace_all_uses_with(spelled.outs[place])
            graph.erase_node(use)
    for node in call.all_input_nodes:
        node.meta[HELD] = node.meta.get(HELD, 0) + 1
    context.entered.append(
        Entry(
            call.target,
            call.args,
            dict(call.kwargs),
            dict(call.meta),
            call.name,
            outputs,
            spelled,
        )
    )
    graph.erase_node(call)
