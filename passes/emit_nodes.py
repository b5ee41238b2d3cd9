"""Add nodes to a graph, each with its example value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import aten, is_size, value


class Emission:
    """What the emitters of one run share: the nodes they added, and example values.

    An op on fake tensors of symbolic sizes takes about a millisecond, and layers repeat: equal ops
    on equal arguments share one example value, which therefore says nothing about storage.
    """

    def __init__(self) -> None:
        self.added: list[fx.Node] = []
        self._known: dict[Hashable, Any] = {}
        self._tokens: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._modes: dict[fx.Graph, Any] = {}

    def erase_since(self, count: int) -> None:
        """Take all nodes but the first ``count`` out of their graphs again."""
        for node in reversed(self.added[count:]):
            node.graph.erase_node(node)
        del self.added[count:]

    def example(self, graph: fx.Graph, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``target`` gives for the example values of its arguments."""
        if target is operator.getitem:
            return value(args[0])[args[1]]
        plain_args, plain_kwargs = fx.map_arg((args, kwargs), value)
        key = (target, self._token(plain_args), self._token(plain_kwargs))
        if key not in self._known:
            mode = self._mode(graph)
            if mode is None:
                self._known[key] = target(*plain_args, **plain_kwargs)
            else:
                with mode, torch.no_grad():
                    self._known[key] = target(*plain_args, **plain_kwargs)
        return self._known[key]

    def _mode(self, graph: fx.Graph) -> Any:
        if graph not in self._modes:
            held = (value(n) for n in graph.nodes)
            fakes = (v.fake_mode for v in held if hasattr(v, "fake_mode"))
            self._modes[graph] = next(fakes, None)
        return self._modes[graph]

    def _token(self, held: Any) -> Hashable:
        """A key that arguments share when an op on them gives equal shapes, strides and dtypes."""
        if isinstance(held, torch.Tensor):
            # Sizes of fake tensors are slow to read; holding a tensor keeps its identity its own.
            if id(held) not in self._tokens:
                sizes = tuple(self._token(s) for s in (*held.shape, *held.stride()))
                self._tokens[id(held)] = held, ("tensor", held.dtype, held.device, sizes)
            return self._tokens[id(held)][1]
        if isinstance(held, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ("size", held.node.expr)
        if isinstance(held, (list, tuple)):
            return tuple(self._token(h) for h in held)
        if isinstance(held, dict):
            return tuple((k, self._token(v)) for k, v in held.items())
        # 2, 2.0 and True are equal keys, and different arguments.
        return (type(held).__name__, repr(held))


class Emitter:
    """Adds call nodes after a place in a graph.

    Every emitted node carries ``meta["val"]``, so that later passes see shapes and dtypes.

    Args:
        graph: changed in place.
        after: the first node is added after it, each further one after the one before.
        emission: of the run.
    """

    def __init__(self, graph: fx.Graph, after: fx.Node, emission: Emission) -> None:
        self.graph, self.after, self.emission = graph, after, emission
        self.trace = after.meta.get("stack_trace", "")
        self._sizes: dict[Any, Any] = {}

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_after(self.after):
            node = self.graph.call_function(target, args, kwargs)
        self.after = node
        self.emission.added.append(node)
        node.meta["val"] = self.emission.example(self.graph, target, args, kwargs)
        node.meta["stack_trace"] = self.trace
        return node

    def size(self, node: fx.Node, dim: int) -> fx.Node | int:
        """The size of a dim as an argument: an int where static, else a ``sym_size`` node."""
        extent = value(node).shape[dim]
        if isinstance(extent, int):
            return extent
        expr = extent.node.expr
        if expr not in self._sizes:
            # One node a size, so that what is computed from it is equal for all layers.
            same = (n for n in self.graph.nodes if is_size(n) and value(n).node.expr == expr)
            first = next(same, None)
            usable = first is not None and (first < self.after or first is self.after)
            self._sizes[expr] = first if usable else self(aten.sym_size.int, node, dim)
        return self._sizes[expr]
