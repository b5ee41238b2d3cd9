"""The functional ATen graphs of a model, exactly as the passes receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from dsa_compile import export_host
from dsa_compile.call_inputs import clone_inputs
from dsa_compile.dynamo_host import DynamoHost
from dsa_compile.state import ModelState


def export_graph(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = True,
) -> fx.GraphModule:
    """The graph that torch.export gives for these inputs.

    A flat functional graph: tensor inputs and symbolic numbers are placeholders, the model's
    tensors are ``get_attr`` nodes holding the very parameters, new contents of updated buffers
    and inputs are the first outputs. Nodes carry ``meta["val"]`` and ``stack_trace``; inputs
    carry ``meta["dsa_origin"]``, the pair of kind (``"parameter"``, ``"buffer"``,
    ``"constant"``, ``"input"``) and name.

    Raises:
        CaptureError: the model cannot be exported for these inputs.
    """
    return export_host.capture(model, args, kwargs or {}, dynamic).graph_module


def dynamo_graphs(
    model: nn.Module, *args: Any, dynamic: bool | None = True, **kwargs: Any
) -> list[fx.GraphModule]:
    """The graphs that compiling this call through Dynamo gives, in the order of compilation.

    As for ``export_graph``, but parameters and buffers are placeholders too. The model runs
    unchanged on copies of the inputs, and its state is put back.
    """
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule) -> fx.GraphModule:
        graphs.append(graph_module)
        return graph_module

    host = DynamoHost(model, keep, dynamic)
    copied_args, copied_kwargs = clone_inputs(args, kwargs, model)
    with torch.no_grad(), ModelState(model).kept():
        host(*copied_args, **copied_kwargs)
    return graphs
