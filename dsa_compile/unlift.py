"""An exported program as a plain graph module that holds the model's own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dsa_compile.errors import CaptureError, InputError


@dataclass(frozen=True)
class Binding:
    """A tensor of the model and the graph module's attribute that holds it."""

    attribute: str
    owner: nn.Module
    leaf: str
    name: str
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    def fetch(self) -> torch.Tensor:
        """The model's tensor of today.

        Raises:
            InputError: it has another dtype, device or shape than when it was captured.
        """
        tensor = getattr(self.owner, self.leaf)
        if (tensor.dtype, tensor.device, tensor.shape) != (self.dtype, self.device, self.shape):
            raise InputError(
                f"{self.name} was captured as {self.dtype} {tuple(self.shape)} on {self.device} "
                f"and is now {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; optimise "
                "the model again"
            )
        return tensor


@dataclass(frozen=True)
class Lifted:
    """A flat graph and what its inputs and outputs stand for.

    Attributes:
        graph_module: live user inputs in, mutated values then outputs out.
        inputs: ``meta["val"]`` of every user input, constants included.
        kept: positions among the user inputs that are placeholders of the graph.
        bindings: the model's tensors that the graph reads.
        buffer_writes: ``(output position, binding)`` of each buffer that a call updates.
        input_writes: ``(output position, user input position)`` of each updated input.
        outputs: per output of the model ``("graph", position)``, ``("input", position)`` or
            ``("constant", value)``.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Any, ...]
    kept: tuple[int, ...]
    bindings: tuple[Binding, ...]
    buffer_writes: tuple[tuple[int, Binding], ...]
    input_writes: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[str, Any], ...]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return None
    return (owner, leaf) if isinstance(getattr(owner, leaf, None), torch.Tensor) else None


def unlift(program: Any, model: nn.Module, prefix: str) -> Lifted:
    """Turn an exported program into a flat graph module over the model's own tensors.

    Args:
        program: a decomposed ``torch.export.ExportedProgram``; taken apart.
        model: the module that it was captured from.
        prefix: what the program's names of the model's tensors begin with.

    Raises:
        CaptureError: the graph has outputs that cannot be carried out here.
    """
    from torch.export.graph_signature import InputKind

    graph: fx.Graph = program.graph_module.graph
    root = nn.Module()
    bindings: dict[str, Binding] = {}
    user: list[fx.Node] = []
    first = next(n for n in graph.nodes if n.op != "placeholder")
    placeholders = graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            node.meta["dsa_origin"] = ("input", node.name)
            user.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            kind = spec.kind.name.lower().removesuffix("_tensor")
            _bind(root, graph, first, node, spec.target, kind, program, model, prefix, bindings)
        else:
            raise CaptureError(f"input {node.name} of kind {spec.kind.name} is not supported")
    for node in user:
        node.meta["val"] = settled(node.meta.get("val"))
    inputs = tuple(node.meta["val"] for node in user)
    kept = []
    for position, node in enumerate(user):
        if isinstance(node.meta["val"], (torch.Tensor, torch.SymInt)):
            kept.append(position)
        else:
            graph.erase_node(node)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        # Calls are checked against the capture before the graph runs.
        graph.erase_node(node)
    writes = _plan_outputs(graph, program.graph_signature, bindings, user)
    module = fx.GraphModule(root, graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    module.meta.update(program.graph_module.meta)
    return Lifted(module, inputs, tuple(kept), tuple(bindings.values()), *writes)


def _number(size: Any) -> Any:
    fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if fixed is None else fixed


def settled(value: Any) -> Any:
    """``value`` with plain numbers for the sizes that tracing found to be fixed."""
    if isinstance(value, torch.SymInt):
        return _number(value)
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = [_number(s) for s in value.shape], [_number(s) for s in value.stride()]
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _bind(
    root: nn.Module,
    graph: fx.Graph,
    first: fx.Node,
    node: fx.Node,
    target: str,
    kind: str,
    program: Any,
    model: nn.Module,
    prefix: str,
    bindings: dict[str, Binding],
) -> None:
    tensor = program.state_dict.get(target)
    if tensor is None:
        tensor = program.constants[target]
    name = target.removeprefix(prefix)
    attribute = name.replace(".", "_")
    while hasattr(root, attribute):
        attribute += "_"
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(attribute, tensor)
    else:
        root.register_buffer(attribute, tensor)
    if (place := _owner(model, name)) is not None:
        bindings[target] = Binding(
            attribute, *place, f"{kind} {name}", tensor.dtype, tensor.device, tensor.shape
        )
    with graph.inserting_before(first):
        read = graph.create_node("get_attr", attribute)
    read.meta.update(node.meta)
    read.meta["dsa_origin"] = (kind, name)
    node.replace_all_uses_with(read)
    graph.erase_node(node)


def _plan_outputs(
    graph: fx.Graph, signature: Any, bindings: dict[str, Binding], user: list[fx.Node]
) -> tuple[
    tuple[tuple[int, Binding], ...], tuple[tuple[int, int], ...], tuple[tuple[str, Any], ...]
]:
    from torch.export.graph_signature import ConstantArgument, OutputKind

    (end,) = graph.find_nodes(op="output")
    position_of = {node.name: i for i, node in enumerate(user)}
    results: list[fx.Node] = []
    buffer_writes, input_writes = [], []
    outputs: list[tuple[str, Any]] = []
    written: dict[fx.Node, int] = {}
    for value, spec in zip(end.args[0], signature.output_specs, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            if isinstance(spec.arg, ConstantArgument) or not isinstance(value, fx.Node):
                outputs.append(("constant", value))
            elif value in written:
                # The model returned the very argument that it updated.
                outputs.append(("input", written[value]))
            else:
                outputs.append(("graph", len(results)))
                results.append(value)
        elif spec.kind == OutputKind.BUFFER_MUTATION and spec.target in bindings:
            buffer_writes.append((len(results), bindings[spec.target]))
            results.append(value)
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            written[value] = position_of[spec.target]
            input_writes.append((len(results), position_of[spec.target]))
            results.append(value)
        else:
            raise CaptureError(
                f"the model's effect of kind {spec.kind.name} on {spec.target} is not supported"
            )
    end.args = (tuple(results),)
    return tuple(buffer_writes), tuple(input_writes), tuple(outputs)
