"""Lower canonical ops to one provider's ops."""

from __future__ import annotations

import torch
import torch.fx as fx

from dsa_compile.kernels.providers import load, serving_provider
from dsa_compile.kernels.serving_schemas import SERVING_SCHEMAS
from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.graph_tools import FUNCTIONALIZED, called_op, namespace


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Swap each ``dsa::`` op for the provider's op of the same name and schema.

    Ops around the scores that the provider leaves to another one become that one's. All that goes
    for ops that write to a cache too, which a functional graph calls through PyTorch's functional
    form.

    Raises:
        ValueError: the provider is not known, or lacks an op that the graph needs.
        ImportError: a package that the provider needs is missing.
    """
    calls = [n for n in graph_module.graph.nodes if _is_ours(n)]
    target = load(context.provider)
    libraries = {name: getattr(torch.ops, target) for name in map(_name, calls)}
    around = [name for name in libraries if name in SERVING_SCHEMAS]
    if around and not all(hasattr(libraries[name], name) for name in around):
        other = getattr(torch.ops, load(serving_provider(context.provider)))
        libraries |= {name: other for name in around if not hasattr(libraries[name], name)}
    missing = sorted(name for name, library in libraries.items() if not hasattr(library, name))
    if missing:
        raise ValueError(f"provider {context.provider!r} lacks {', '.join(missing)}")
    for node in calls:
        served = getattr(libraries[_name(node)], _name(node)).default
        if node.target is called_op(node):
            node.target = served
        else:
            node.args = (served, *node.args[1:])
    return PassResult(graph_module, bool(calls) and target != "dsa")


def _is_ours(node: fx.Node) -> bool:
    if node.target is FUNCTIONALIZED:
        return getattr(called_op(node), "namespace", "") == "dsa"
    return namespace(node) == "dsa"


def _name(node: fx.Node) -> str:
    return str(called_op(node).__name__.partition(".")[0])
