"""Turn a top-k and the remap of its columns into one op, for providers that have it."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import erase_unused, namespace, op_name

_FUSED = "topk_positions"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace ``topk_remap(*topk(logits, end), blocks, row_start)`` by ``topk_positions``.

    Needs ``select_kernels``. A provider without the fused op keeps the two.
    """
    graph = graph_module.graph
    remaps = [n for n in graph.nodes if op_name(n) == "topk_remap"]
    changed = [n for n in remaps if _fuse(graph, n)]
    erase_unused(graph, changed)
    return PassResult(graph_module, bool(changed))


def _fuse(graph: fx.Graph, remap: fx.Node) -> bool:
    library = getattr(torch.ops, namespace(remap))
    values, columns, *mapping = remap.args
    picked = {op_name(n) == "getitem" and n.args[0] for n in (values, columns)}  # type: ignore[union-attr]
    topk = picked.pop() if len(picked) == 1 else None
    if not hasattr(library, _FUSED) or not isinstance(topk, fx.Node) or op_name(topk) != "topk":
        return False
    if values.args[1] != 0 or columns.args[1] != 1:  # type: ignore[union-attr]
        return False
    with graph.inserting_before(remap):
        fused = graph.call_function(
            getattr(library, _FUSED).default,
            (*topk.args, *mapping),
            {**topk.kwargs, **remap.kwargs},
        )
    fused.meta = dict(remap.meta)
    remap.replace_all_uses_with(fused)
    return True
