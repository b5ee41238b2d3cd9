"""Share one expansion among all consumers of the same published ids, by dataflow alone."""

from __future__ import annotations

import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import op_name
from dsa_compile.passes.normalize_graph import merge_repeats


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Merge equal pure calls; needs ``expand_candidates``.

    Expansion is a pure op on the ids, so that common-subexpression elimination shares it exactly
    when the ids (and row bounds) are the same tensors, and never otherwise.
    """
    before = len(graph_module.graph.nodes)
    merged = merge_repeats(graph_module)
    merged.graph.eliminate_dead_code()
    return PassResult(merged, len(merged.graph.nodes) != before)


def expansions(graph_module: fx.GraphModule) -> int:
    """Number of candidate expansions that a graph runs."""
    return sum(op_name(n) == "candidate_expand" for n in graph_module.graph.nodes)
