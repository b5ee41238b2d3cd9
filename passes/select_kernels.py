"""Lower canonical ops to one provider's ops."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.kernels.providers import load
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import namespace, op_name


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Swap each ``dsa::`` op for the provider's op of the same name and schema.

    Raises:
        ValueError: the provider is not known, or lacks an op that the graph needs.
        ImportError: a package that the provider needs is missing.
    """
    calls = [n for n in graph_module.graph.nodes if namespace(n) == "dsa"]
    target = load(context.provider)
    library = getattr(torch.ops, target)
    missing = sorted({op_name(n) for n in calls if not hasattr(library, op_name(n))})
    if missing:
        raise ValueError(f"provider {context.provider!r} lacks {', '.join(missing)}")
    for node in calls:
        node.target = getattr(library, op_name(node)).default
    return PassResult(graph_module, bool(calls) and target != "dsa")
