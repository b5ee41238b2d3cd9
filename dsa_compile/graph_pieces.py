"""A marked graph as a list of pieces: what a CUDA graph may hold, and what runs between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dsa_compile.errors import CaptureError
from dsa_compile.passes.graph_tools import is_size, op_name, value
from dsa_compile.passes.insert_graph_breaks import MARK, op_label
from dsa_compile.passes.recognise_ops import attribute


@dataclass(frozen=True)
class Piece:
    """A part of a graph.

    Attributes:
        run: called with the values of ``inputs``, gives the value of ``output``, or a tuple.
        inputs: nodes of the program whose values it takes.
        output: node of the program that it gives.
        ops: number of calls in it.
        reason: why it may not be captured; None where it may.
    """

    run: Callable[..., Any]
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    ops: int
    reason: str | None


@dataclass(frozen=True)
class Program:
    """Pieces in order, between the inputs and the outputs of a graph.

    Attributes:
        placeholders: nodes of the inputs.
        pieces: in the order in which they run.
        unpack: node -> (node of a piece, index) of each value that is one of several of a piece.
        outputs: nodes, or plain values, of the results.
        tensors: node -> tensor of the module that it reads.
    """

    placeholders: tuple[fx.Node, ...]
    pieces: tuple[Piece, ...]
    unpack: dict[fx.Node, tuple[fx.Node, int]]
    outputs: tuple[Any, ...]
    tensors: dict[fx.Node, Any]


def split_at_marks(graph_module: fx.GraphModule) -> Program:
    """Split a functional graph before and after each call that carries a mark.

    Args:
        graph_module: with marks of ``insert_graph_breaks``; left unchanged.

    Raises:
        CaptureError: an op of the graph writes into its inputs: a capture would repeat that; or
            there is no op.
    """
    from torch.fx.passes.split_module import split_module

    parts = _parts(graph_module.graph)
    if not parts:
        raise CaptureError("the graph calls nothing that could be captured")
    top = split_module(
        graph_module,
        None,  # type: ignore[arg-type]
        lambda node: parts[node],
        keep_original_order=True,
        keep_original_node_name=True,
    )
    pieces, unpack, tensors = [], {}, {}
    outputs: tuple[Any, ...] = ()
    for node in top.graph.nodes:
        if node.op == "call_module":
            part = top.get_submodule(str(node.target))
            calls = [n for n in part.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
            reasons = [n.meta[MARK] for n in calls if MARK in n.meta]
            pieces.append(
                Piece(part, tuple(node.args), node, len(calls), reasons[0] if reasons else None)
            )
        elif node.op == "call_function":
            unpack[node] = (node.args[0], node.args[1])
        elif node.op == "get_attr":
            tensors[node] = attribute(node)
        elif node.op == "output":
            outputs = _listed(node.args[0])
    placeholders = tuple(top.graph.find_nodes(op="placeholder"))
    return Program(placeholders, tuple(pieces), unpack, outputs, tensors)


def _parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number of the piece of each call: one for each marked call, one for each stretch between."""
    parts: dict[fx.Node, int] = {}
    current, open_part = -1, False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise CaptureError(
                f"{op_label(node)} writes into its inputs; a graph that is captured must be "
                "functional: let the caller carry the writes out"
            )
        source = node.args[0] if op_name(node) == "getitem" else None
        if isinstance(source, fx.Node) and MARK in source.meta:
            # One of several results belongs to the call that gave them.
            parts[node] = parts[source]
            continue
        if MARK in node.meta:
            current, open_part = current + 1, False
        elif not open_part:
            current, open_part = current + 1, True
        parts[node] = current
    return parts


def _listed(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a graph's batch are.

    Attributes:
        inputs: position among the inputs -> dim that holds the rows, of tensors.
        counts: positions among the inputs of the number of rows itself.
        outputs: per output the dim that holds the rows, None where none does.
        least: smallest number of rows that the graph serves.
    """

    inputs: dict[int, int]
    counts: frozenset[int]
    outputs: tuple[int | None, ...]
    least: int


def find_rows(graph_module: fx.GraphModule, rows: Mapping[int, int] | None) -> Rows:
    """Find the dims that hold the rows of a batch, by their symbolic size.

    Args:
        graph_module: its nodes carry ``meta["val"]``.
        rows: position of an input -> its dim that holds the rows, of each whose size is a symbol
            of its own; None where only one size is symbolic.

    Raises:
        CaptureError: the rows cannot be told; says which sizes are symbolic.
    """
    inputs = graph_module.graph.find_nodes(op="placeholder")
    symbols: dict[Any, list[str]] = {}
    for at, node in enumerate(inputs):
        held = value(node)
        if isinstance(held, torch.Tensor):
            for dim, size in enumerate(held.shape):
                if isinstance(size, torch.SymInt):
                    symbols.setdefault(size.node.expr, []).append(f"dim {dim} of input {at}")
    if rows is not None:
        chosen = {_size_at(inputs, position, dim) for position, dim in rows.items()}
    else:
        chosen = set(symbols)
    alone = rows is not None or len(chosen) == 1
    if not chosen or not alone or not all(symbol.is_Symbol for symbol in chosen):
        known = "; ".join(f"{s}: {', '.join(where)}" for s, where in symbols.items()) or "none"
        raise CaptureError(
            "a symbolic size must hold the rows; name it with rows={position: dim}. Symbolic "
            f"sizes of this graph: {known}"
        )
    found: dict[int, int] = {}
    for position, node in enumerate(inputs):
        dims = _dims_of(value(node), chosen, f"input {position}")
        if len(dims) > 1:
            raise CaptureError(f"input {position} has rows in more than one dim")
        if dims:
            found[position] = dims[0]
    counts = {i for i, n in enumerate(inputs) if is_size(n) and value(n).node.expr in chosen}
    (end,) = graph_module.graph.find_nodes(op="output")
    outputs = []
    for number, result in enumerate(_listed(end.args[0])):
        dims = _dims_of(value(result), chosen, f"output {number}")
        outputs.append(dims[0] if dims else None)
    shape_env = next(
        s.node.shape_env
        for n in inputs
        if isinstance(value(n), torch.Tensor)
        for s in value(n).shape
        if isinstance(s, torch.SymInt)
    )
    least = max(int(shape_env.bound_sympy(symbol).lower) for symbol in chosen)
    return Rows(found, frozenset(counts), tuple(outputs), max(1, least))


def _size_at(inputs: Sequence[fx.Node], position: int, dim: int) -> Any:
    held = value(inputs[position]) if 0 <= position < len(inputs) else None
    if not isinstance(held, torch.Tensor) or not -held.dim() <= dim < held.dim():
        raise CaptureError(f"rows: the graph has no tensor with a dim {dim} as input {position}")
    size = held.shape[dim]
    if not isinstance(size, torch.SymInt):
        raise CaptureError(f"dim {dim} of input {position} is always {size}: its rows cannot vary")
    return size.node.expr


def _dims_of(held: Any, symbols: set[Any], name: str) -> list[int]:
    if not isinstance(held, torch.Tensor):
        return []
    found: list[int] = []
    for dim, size in enumerate(held.shape):
        if not isinstance(size, torch.SymInt):
            continue
        expr = size.node.expr
        if expr in symbols:
            found.append(dim)
        elif symbols & expr.free_symbols:
            raise CaptureError(f"dim {dim} of {name} is {expr}: rows must have a dim of their own")
    return found
