"""A marked graph as a list of pieces: what a CUDA graph may hold, and what runs between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from dsa_compile.errors import CaptureError, ConfigError, InputError
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
            it gives a number, or sizes, that the host reads: a capture would keep the first; or
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
        if _is_read_by_host(node):
            raise CaptureError(
                f"{op_label(node)} gives a number or a size that depends on data, which a CUDA "
                "graph would keep from its capture; keep such ops out of the graph"
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


def _is_read_by_host(node: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(
        free_unbacked_symbols(part)
        for part in pytree.tree_leaves(value(node))
        if isinstance(part, kinds)
    )


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
        ConfigError: ``rows`` is something else.
        CaptureError: the rows cannot be told; says which sizes are symbolic.
    """
    if rows is not None and not _is_mapping_of_numbers(rows):
        raise ConfigError(f"rows must map positions of inputs to dims, got {rows!r}")
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


def check_inputs(placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
    """Compare a call with the inputs that a graph was captured with, but for its symbolic sizes.

    Raises:
        InputError: their number differs; or names the input whose kind does.
    """
    if len(inputs) != len(placeholders):
        raise InputError(f"{len(placeholders)} inputs are needed, got {len(inputs)}")
    for position, (node, given) in enumerate(zip(placeholders, inputs, strict=True)):
        held = value(node)
        if isinstance(held, torch.Tensor) and not _is_of_kind(given, held):
            raise InputError(
                f"input {position} must be {_kind(held)}, as the graph was made for, got "
                f"{_kind(given) if isinstance(given, torch.Tensor) else repr(given)}"
            )


def _is_of_kind(given: Any, held: torch.Tensor) -> bool:
    if not isinstance(given, torch.Tensor) or given.dim() != held.dim():
        return False
    sizes = zip(given.shape, held.shape, strict=True)
    fits = all(isinstance(size, torch.SymInt) or got == size for got, size in sizes)
    return fits and given.dtype == held.dtype and given.device == held.device


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} ({', '.join(map(str, tensor.shape))}) on {tensor.device}"


def _is_mapping_of_numbers(rows: object) -> bool:
    return isinstance(rows, Mapping) and all(
        isinstance(number, int) for pair in rows.items() for number in pair
    )


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
