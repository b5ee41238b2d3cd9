"""What a program calls outside PyTorch, and the same program with our CPU ops written in ATen."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from dsa_compile.errors import PackageError
from dsa_compile.kernels.aten import Aten
from dsa_compile.passes.graph_tools import called_op

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# Namespaces whose ops come with PyTorch.
_BUILT_IN = frozenset(
    {"aten", "prims", "prim", "higher_order", "inductor", "quantized", "rngprims"}
)
# Both have the meaning that ATen's form has; the GPU providers' ops do not become ATen.
_PORTABLE = ("dsa", "dsa_cpu")
_LIBRARIES = {
    "dsa": "dsa_compile.kernels",
    "dsa_cpu": "dsa_compile.kernels",
    "dsa_deep": "dsa_compile.kernels.deep",
    "dsa_triton": "dsa_compile.kernels.triton",
}


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


def foreign_ops(program: ExportedProgram) -> tuple[str, ...]:
    """Full names of the ops that a program calls and PyTorch does not bring."""
    found = set()
    for graph in _graphs(program.graph_module):
        for node in graph.nodes:
            called = called_op(node) if node.op == "call_function" else None
            if isinstance(called, torch._ops.OpOverload) and called.namespace not in _BUILT_IN:
                found.add(called.name())
    return tuple(sorted(found))


def library_of(op: str) -> str | None:
    """The module of dsa_compile that registers an op, None for an op of others."""
    return _LIBRARIES.get(op.partition("::")[0])


def make_portable(program: ExportedProgram) -> ExportedProgram:
    """The program with every ``dsa::`` and ``dsa_cpu::`` op that ATen can express written so.

    Raises:
        PackageError: the rewritten program cannot be traced.
    """
    called = {name.partition(".")[0] for name in foreign_ops(program)}
    values = (n.meta.get("val") for n in program.graph_module.graph.nodes if n.op == "placeholder")
    functions = Aten(tuple(_sizes(values))).table()
    rules = {}
    for name in called:
        namespace, _, op = name.partition("::")
        if namespace in _PORTABLE and op in functions:
            rules[getattr(getattr(torch.ops, namespace), op).default] = functions[op]
    if not rules:
        return program
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # torch's own deprecations, raised while it copies its tree specifications.
            warnings.filterwarnings("ignore", category=FutureWarning)
            return program.run_decompositions(rules)
    except Exception as fault:  # noqa: BLE001 - tracing raises many kinds
        text = (str(fault).strip().splitlines() or [""])[0]
        raise PackageError(
            f"the ops could not be written in ATen: {type(fault).__name__}: {text}; pass "
            "portable=False to keep them"
        ) from fault


# What no argument means, by schema: AOTInductor cannot hand infinite numbers to an op.
_IMPLIED = {"fill": -math.inf, "pin_value": math.inf}


def without_infinities(program: ExportedProgram) -> ExportedProgram:
    """The program without infinite arguments of our ops that are their defaults by schema."""
    source = program.graph_module
    graph = copy.deepcopy(source.graph)
    changed = False
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.namespace not in _LIBRARIES:
            continue
        kept = {k: v for k, v in node.kwargs.items() if k not in _IMPLIED or v != _IMPLIED[k]}
        changed |= len(kept) < len(node.kwargs)
        node.kwargs = kept
    if not changed:
        return program
    done = fx.GraphModule(source, graph)
    done.meta.update(source.meta)
    return program._update(done, program.graph_signature)


def _sizes(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                yield size


def input_table(program: ExportedProgram) -> Iterator[Mapping[str, Any]]:
    """Name, dtype, dimensions and strides of each tensor among a program's inputs."""
    from torch.export.graph_signature import InputKind

    placeholders = program.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind == InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield {
                "name": node.name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": [_size(s) for s in value.shape],
                "stride": [_size(s) for s in value.stride()],
            }


def _size(size: Any) -> int | str:
    fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return str(size) if fixed is None else int(fixed)


def argument_names(program: ExportedProgram) -> tuple[str, ...]:
    """Names of the arguments that a program is called with, in order."""
    signature = program.module_call_graph[0].signature
    names = None if signature is None else signature.forward_arg_names
    return tuple(names or ())


def conditions_of(program: ExportedProgram) -> tuple[str, ...]:
    """What is taken for granted about arguments in a program and in everything compiled from it."""
    current = program._update(program.graph_module, program.graph_signature)
    return tuple(dict.fromkeys((*_constants(program), *current._guards_code)))


def _constants(program: ExportedProgram) -> Iterator[str]:
    """The plain values among the arguments, which the graph holds as they were in the example."""
    from torch.export.graph_signature import InputKind

    names, given = argument_names(program), program.example_inputs
    if given is None or len(names) != sum(map(len, given)):
        return
    arguments = dict(zip(names, given[0], strict=False)) | dict(given[1])
    leaves = pytree.tree_flatten_with_path(arguments)[0]
    specs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    if len(leaves) != len(specs):
        return
    for (path, _), spec in zip(leaves, specs, strict=True):
        value = getattr(spec.arg, "value", None)
        if isinstance(value, (bool, int, float, str)) and value == value:
            yield f"L{pytree.keystr(path)} == {value!r}"
