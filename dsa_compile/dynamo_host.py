"""Capture through Dynamo: any Python, compiled at the first call, graph by graph."""

from __future__ import annotations

import inspect
import re
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from dsa_compile.errors import DsaError, SlowPathWarning

# Takes a functional ATen graph and gives what runs in its place.
Compile = Callable[[fx.GraphModule], Callable[..., Any]]


class DynamoHost:
    """Runs a module through torch.compile, handing each functional ATen graph to ``compile``.

    Graphs are in the inference form: mutated inputs and buffers come out as leading outputs and
    PyTorch copies them back. Python floats stay constants. No global option stays changed.

    Args:
        model: the module whose ``forward`` runs.
        compile: called once a graph; what it returns is called with the graph's flat inputs.
        dynamic: as for torch.compile.
    """

    def __init__(self, model: nn.Module, compile: Compile, dynamic: bool | None = True) -> None:
        self.model = model
        self.notes: list[str] = []
        self._compile = compile
        self._entered = 0
        self._warned = False
        # Compiled code is kept per code object; a fresh one keeps the graphs and recompilations
        # of two optimised models of one class apart.
        entry = _fresh_entry(type(model).__name__)
        self._run = torch.compile(entry, backend=self._backend, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            DsaError: as raised by ``compile``.
        """
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import BackendCompilerFailed

        self._entered = 0
        try:
            with dynamo.patch(specialize_float=True):
                result = self._run(self.model.forward, args, kwargs)
        except BackendCompilerFailed as failed:
            inner = getattr(failed, "inner_exception", None)
            if isinstance(inner, DsaError):
                raise inner from inner.__cause__
            raise
        if not self._entered and not self._warned:
            self._warned = True
            text = "a call ran as the unoptimised model: Dynamo gave no graph for it"
            self.notes.append(text)
            warnings.warn(text, SlowPathWarning, stacklevel=3)
        return result

    def _backend(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        origins = _origins(graph_module, self.model)

        def forward_only(functional: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            placeholders = functional.graph.find_nodes(op="placeholder")
            if len(placeholders) == len(origins):
                for node, origin in zip(placeholders, origins, strict=True):
                    node.meta["dsa_origin"] = origin
            return self._boxed(self._compile(functional))

        def with_gradients(functional: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.notes.append("a part of the model turns gradients on; it runs as it is")
            return self._boxed(functional)

        compiler = aot_autograd(fw_compiler=with_gradients, inference_compiler=forward_only)
        return compiler(graph_module, example_inputs)

    def _boxed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def boxed(inputs: list[Any]) -> Any:
            self._entered += 1
            arguments = tuple(inputs)
            inputs.clear()
            return run(*arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _fresh_entry(name: str) -> Callable[..., Any]:
    def entry(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = entry.__code__.replace(co_name=f"{name}_forward")
    return types.FunctionType(code, entry.__globals__, code.co_name, None, None)


def _origins(graph_module: fx.GraphModule, model: nn.Module) -> list[tuple[str, str]]:
    """Kind and source of each input of a Dynamo graph, in order."""
    buffers = {name for name, _ in model.named_buffers()}
    origins = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = getattr(source, "name", node.name)
        name = _plain_name(name() if inspect.ismethod(name) else str(name))
        value = node.meta.get("example_value")
        if isinstance(value, nn.Parameter):
            kind = "parameter"
        elif name in buffers:
            kind = "buffer"
        elif (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
            kind = "constant"
        else:
            kind = "input"
        origins.append((kind, name))
    return origins


def _plain_name(source: str) -> str:
    """A Dynamo source in the user's terms: ``layers.0.weight``, ``args[0]``."""
    name = source.replace("L['forward'].__self__.", "")
    name = re.sub(r"_(?:modules|parameters|buffers)\['([^']*)'\]", r"\1", name)
    return re.sub(r"^L\['(args|kwargs)'\]", r"\1", name)
