"""Lower canonical ops to one provider's ops."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import namespace, op_name

# The reference provider runs the canonical ops themselves: they are the oracle.
NAMESPACES = {"reference": "dsa", "cpu": "dsa_cpu"}


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Swap each ``dsa::`` op for the provider's op of the same name and schema.

    Raises:
        ValueError: the provider is not known, or lacks an op that the graph needs.
    """
    if context.provider not in NAMESPACES:
        known = ", ".join(sorted(NAMESPACES))
        raise ValueError(f"provider {context.provider!r} is not known; known are {known}")
    target = NAMESPACES[context.provider]
    library = getattr(torch.ops, target)
    calls = [n for n in graph_module.graph.nodes if namespace(n) == "dsa"]
    missing = sorted({op_name(n) for n in calls if not hasattr(library, op_name(n))})
    if missing:
        raise ValueError(f"provider {context.provider!r} lacks {', '.join(missing)}")
    for node in calls:
        node.target = getattr(library, op_name(node)).default
    return PassResult(graph_module, bool(calls) and target != "dsa")
