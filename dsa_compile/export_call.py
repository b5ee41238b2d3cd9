"""Calls of an exported graph: checked against the capture, run, effects carried out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from dsa_compile.call_inputs import flatten_like
from dsa_compile.errors import InputError
from dsa_compile.export_host import ExportedGraph, readable

_FIRST_LEAF = re.compile(r"L\['leaves'\]\[(\d+)\]")


class ExportedCall:
    """Runs a captured graph, or its rewritten form, as the model it came from.

    Args:
        exported: the capture.
        run: called with the graph's inputs; gives the graph's outputs.
        modules: the graph modules behind ``run``; they follow the model's tensors.
    """

    def __init__(
        self,
        exported: ExportedGraph,
        run: Callable[..., Any],
        modules: tuple[fx.GraphModule, ...],
    ) -> None:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        self.exported = exported
        self._run = run
        self._modules = modules
        self._live = exported.live
        self._scope = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch}
        self._guards: list[tuple[str, CodeType]] = [
            (guard, compile(guard, "<guard>", "eval")) for guard in exported.guards
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            InputError: names the argument that the capture does not serve.
            TypeError: the arguments do not fit the model's signature.
        """
        exported, lifted = self.exported, self.exported.lifted
        leaves = flatten_like(exported.signature.bind(args, kwargs), exported.in_spec)
        for leaf, value in zip(exported.leaves, leaves, strict=True):
            leaf.check(value)
        inputs = [leaves[position] for position in self._live]
        self._check_guards(inputs)
        self._follow_model()
        written = {position for _, position in lifted.input_writes}
        outputs = self._run(*(self._input(inputs, i, i in written) for i in lifted.kept))
        for index, binding in lifted.buffer_writes:
            binding.fetch().copy_(outputs[index])
        for index, position in lifted.input_writes:
            inputs[position].copy_(outputs[index])
        found = {"graph": outputs, "input": inputs}
        results = [
            what if kind == "constant" else found[kind][what] for kind, what in lifted.outputs
        ]
        return pytree.tree_unflatten(results, exported.out_spec)

    def _input(self, inputs: list[Any], position: int, written: bool) -> Any:
        value = inputs[position]
        leaf = self.exported.leaves[self._live[position]]
        if not isinstance(value, torch.Tensor) or written or not leaf.contiguous:
            return value
        # The graph's views were traced for contiguous memory.
        return value.contiguous()

    def _check_guards(self, inputs: list[Any]) -> None:
        scope = {**self._scope, "L": {"leaves": inputs}}
        for guard, code in self._guards:
            if eval(code, scope):
                continue
            names = [self.exported.leaves[position].name for position in self._live]
            match = _FIRST_LEAF.search(guard)
            position = int(match.group(1)) if match else 0
            value = inputs[position]
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise InputError(
                f"argument {names[position]}: the capture holds only where "
                f"{readable(guard, names)}, got {got}; optimise with such an example, or without "
                "example_inputs"
            )

    def _follow_model(self) -> None:
        """Let the graphs read the model's tensors of today, should some have been replaced."""
        for binding in self.exported.lifted.bindings:
            tensor = binding.fetch()
            for module in self._modules:
                if getattr(module, binding.attribute, tensor) is not tensor:
                    setattr(module, binding.attribute, tensor)
