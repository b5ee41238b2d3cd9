"""Give opaque calls back where the matcher put nothing in place of their plain form."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.enter_adapters import Entry
from dsa_compile.passes.graph_tools import HELD, erase_unused


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Put the opaque calls back for whose plain form the matcher found nothing better.

    Needs ``match_indexers`` after ``enter_adapters``. No plain form is left in the graph.
    """
    # Later calls first: what one of them reads may be all that needs an earlier one.
    for entry in reversed(context.entered):
        _leave(graph_module.graph, entry)
    _rename(context)
    changed = bool(context.entered)
    context.entered.clear()
    return PassResult(graph_module, changed)


def _leave(graph: fx.Graph, entry: Entry) -> None:
    spelled, alive = entry.spelled, set(graph.nodes)
    if spelled.core in alive and spelled.core.users:
        with graph.inserting_before(spelled.core):
            call = graph.create_node(
                "call_function", entry.target, entry.args, entry.kwargs, entry.name
            )
            call.meta = dict(entry.meta)
            for place, (name, meta) in entry.outputs.items():
                old = call
                if place is not None:
                    args = (call, place)
                    old = graph.create_node("call_function", operator.getitem, args, {}, name)
                    old.meta = dict(meta)
                spelled.outs[place].replace_all_uses_with(old)
    read: dict[fx.Node, None] = {}
    fx.map_arg((entry.args, entry.kwargs), lambda n: read.setdefault(n))
    for node in read:
        node.meta[HELD] -= 1
        if not node.meta[HELD]:
            del node.meta[HELD]
    erase_unused(graph, [n for n in (*spelled.outs.values(), spelled.core) if n in alive])
    alive = set(graph.nodes)
    erase_unused(graph, [n for n in read if n in alive])


def _rename(context: PassContext) -> None:
    """Name what the original graph has: sites are compared by what its own ops gave."""
    names: dict[str, str] = {}
    for entry in context.entered:
        for place, (name, _) in entry.outputs.items():
            names[entry.spelled.outs[place].name] = name
        names |= entry.spelled.names(entry.outputs)
    pairs = context.recorder.pairs
    for at, pair in enumerate(pairs):
        scores, indices = _followed(pair.scores, names), _followed(pair.indices, names)
        if (scores, indices) != (pair.scores, pair.indices):
            pairs[at] = replace(pair, scores=scores, indices=indices)


def _followed(name: str, names: dict[str, str]) -> str:
    while name in names:
        name = names[name]
    return name
