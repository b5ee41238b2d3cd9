"""Match indexers: propose by structure, accept by behaviour, replace by ``dsa::indexer_select``.

Every selection of the graph is looked at and gets a :class:`Site`; nothing is replaced that a
probe has not shown to be equal.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch.fx as fx

import dsa_compile.kernels  # noqa: F401 - registers the canonical ops
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.enter_adapters import notes_of
from dsa_compile.passes.graph_tools import erase_unused, op_name, where_in_model
from dsa_compile.passes.match_site import Looked, Shared, SiteMatcher
from dsa_compile.passes.read_selection import constant_k, ranked_scores, read_selection, selections
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.sites import Site, SitePair

log = logging.getLogger("dsa_compile")


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace every proven indexer of a functional ATen graph.

    Args:
        graph_module: changed in place.
        context: its recorder receives one :class:`Site` a selection and one pair a replacement.
    """
    graph = graph_module.graph
    found = selections(graph)
    scores = {s for n in found if isinstance(s := n.args[0], fx.Node)}
    shared = Shared(scores, context.binder)
    ranked = [n for n in found if ranked_scores(n, scores) is None]
    results: list[tuple[Site, SitePair | None]] = []
    # Later sites first: a consumer is proven on its source's own selection, before its removal.
    for node in reversed(ranked):
        results.append(_look_at(graph, node, shared, context))
    for site, pair in reversed(results):
        if pair is not None:
            context.recorder.pairs.append(replace(pair, site=len(context.recorder.sites)))
        context.recorder.sites.append(site)
    changed = any(pair is not None for _, pair in results)
    erase_unused(graph, graph.nodes)
    return PassResult(graph_module, changed)


def _look_at(
    graph: fx.Graph, node: fx.Node, shared: Shared, context: PassContext
) -> tuple[Site, SitePair | None]:
    """Match one selection; a refusal leaves the graph as it was and becomes the site's reason."""
    looked = Looked(notes=notes_of(node) if context.entered else ())
    where = where_in_model(node)
    count = len(context.emission.added)
    try:
        selection = read_selection(node)
        site, pair = SiteMatcher(graph, selection, shared, context, looked).match()
        return replace(site, where=where), pair
    except Exception as error:  # noqa: BLE001 - a fault in here must cost a match, never a model
        context.emission.erase_since(count)
        refusal = error if isinstance(error, Refusal) else _unforeseen(error)
        k = constant_k(node.args[1]) if op_name(node) == "topk" else None  # type: ignore[arg-type]
        site = Site(
            looked.kind,
            "kept",
            where,
            looked.heads,
            looked.head_dim,
            looked.block_size,
            k,
            reason=refusal.reason,
            counterexample=refusal.counterexample,
            progress=refusal.progress,
        )
        return site, None


def _unforeseen(error: Exception) -> Refusal:
    """A refusal for an error that no rule foresaw, naming it for a bug report."""
    log.warning("a site was kept because of an unforeseen error", exc_info=error)
    text = str(error).splitlines()[0] if str(error) else "no message"
    return Refusal(f"unforeseen {type(error).__name__} while matching: {text}", 2)
