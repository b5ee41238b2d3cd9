"""Capture through torch.export: example inputs to one functional ATen graph, and its calls."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from dsa_compile.call_inputs import CONSTANTS, CallSignature, Leaf, flatten
from dsa_compile.errors import CaptureError
from dsa_compile.state import ModelState
from dsa_compile.unlift import Lifted, unlift

_LEAVES = re.compile(r"L\['leaves'\]\[(\d+)\]")


@dataclass(frozen=True)
class ExportedGraph:
    """A captured model: a flat functional graph and how calls map onto it.

    Attributes:
        graph_module: tensors and symbolic numbers in, ``(mutated values..., outputs...)`` out.
        signature: binds calls.
        leaves: what was captured of each leaf of the arguments, in the order of ``in_spec``.
        live: positions of the leaves that torch.export took as inputs.
        in_spec, out_spec: structure of the bound arguments and of the result.
        lifted: parameters, buffers, mutations and outputs of the graph.
        guards: conditions on the live leaves ``L['leaves']``, as Python expressions.
        notes: what could not be kept dynamic, in words.
    """

    graph_module: fx.GraphModule
    signature: CallSignature
    leaves: tuple[Leaf, ...]
    live: tuple[int, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    lifted: Lifted
    guards: tuple[str, ...]
    notes: tuple[str, ...]


class _Flat(nn.Module):
    """The model as a function of its live leaves alone; the rest are constants."""

    def __init__(
        self,
        model: nn.Module,
        rebuild: Callable[[Sequence[Any]], Any],
        record: Callable[[pytree.TreeSpec], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._rebuild = rebuild
        self._record = record

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = self._rebuild(leaves)
        outputs, spec = pytree.tree_flatten(self.model.forward(*args, **kwargs))
        self._record(spec)
        return tuple(outputs)


def _is_live(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and type(value) is int)


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: bool | None = True
) -> ExportedGraph:
    """Capture ``model`` for these arguments, with every size dynamic that the model allows.

    Raises:
        CaptureError: torch.export cannot trace the model, an argument is of a type that it does
            not understand (for instance a cache object), or forward changes Python attributes.
    """
    signature = CallSignature.of(model)
    names, values, in_spec = flatten(signature.bind(args, kwargs))
    for name, value in zip(names, values, strict=True):
        if not _is_live(value) and not isinstance(value, CONSTANTS):
            raise CaptureError(
                f"argument {name}: torch.export does not understand {type(value).__name__}; "
                "leave example_inputs away, so that the model is compiled at its first call"
            )
    live = [_is_live(v) for v in values]
    inputs = tuple(v for v, is_live in zip(values, live, strict=True) if is_live)

    def rebuild(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(leaves)
        full = [next(given) if is_live else v for v, is_live in zip(values, live, strict=True)]
        return signature.spread(pytree.tree_unflatten(full, in_spec))

    # Kept outside the module, whose attributes torch.export puts back after tracing.
    out_specs: list[pytree.TreeSpec] = []
    flat = _Flat(model, rebuild, out_specs.append)
    flat.training = False
    state = ModelState(model, tensors=False)
    with state.kept():
        program, notes, kept_dynamic = _export(flat, inputs, dynamic)
        if changed := state.changed_attributes():
            raise CaptureError(
                f"the model's forward changes its attribute {changed[0]}, which a capture does not "
                "repeat; make it a buffer that is updated in place, or leave example_inputs away"
            )
    lifted = unlift(program, model, prefix="model.")
    live_names = [name for name, is_live in zip(names, live, strict=True) if is_live]
    guards = tuple(program._guards_code)
    leaves = _describe(names, values, live, lifted.inputs)
    if kept_dynamic:
        notes += _static_notes(live_names, inputs, lifted.inputs, guards)
    return ExportedGraph(
        lifted.graph_module,
        signature,
        leaves,
        tuple(i for i, is_live in enumerate(live) if is_live),
        in_spec,
        out_specs[-1],
        lifted,
        guards,
        notes,
    )


def _dims(value: Any, numbers: bool) -> Any:
    from torch.export import Dim

    if isinstance(value, torch.Tensor):
        return {axis: Dim.AUTO for axis, size in enumerate(value.shape) if size > 1}
    return Dim.AUTO if numbers else None


def _export(
    flat: nn.Module, inputs: tuple[Any, ...], dynamic: bool | None
) -> tuple[Any, tuple[str, ...], bool]:
    """The decomposed program, notes on what was given up to get it, and if it has dynamic sizes."""
    attempts: list[tuple[str, Any]] = [("", None)]
    if dynamic is not False:
        keep_numbers = (tuple(_dims(v, True) for v in inputs),)
        sizes_only = (tuple(_dims(v, False) for v in inputs),)
        attempts = [
            ("", keep_numbers),
            ("numbers among the arguments are captured as constants", sizes_only),
            ("no size could be kept dynamic", None),
        ]
    notes: tuple[str, ...] = ()
    if dynamic is False:
        notes = ("all sizes are captured as they are, since dynamic=False",)
    fault: Exception | None = None
    for loss, shapes in attempts:
        if fault is not None:
            notes = (f"{loss}: {_first_line(fault)}",)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # torch's own deprecations, raised while it copies its tree specifications.
                warnings.filterwarnings("ignore", category=FutureWarning)
                # torch.export marks the dynamic tensors themselves: each attempt takes new ones.
                fresh = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in inputs)
                program = torch.export.export(flat, fresh, dynamic_shapes=shapes, strict=False)
                program = program.run_decompositions(composite_decompositions())
                return program, notes, shapes is not None
        except Exception as error:
            fault = error
    raise CaptureError(f"torch.export could not capture the model: {_first_line(fault)}") from fault


def _first_line(fault: Exception | None) -> str:
    text = str(fault).strip()
    return f"{type(fault).__name__}: {text.splitlines()[0] if text else ''}"


def composite_decompositions() -> dict[Any, Any]:
    """Decompositions of composite ops alone, as compilation under Dynamo takes them apart.

    Products, linear layers and in-place forms come out as the matcher knows them; softmax,
    normalisations and attention stay single calls where PyTorch has a kernel for them.
    """
    table: Any = torch.export.default_decompositions()
    table = table.materialize() if hasattr(table, "materialize") else dict(table)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return {op: rule for op, rule in table.items() if op.has_kernel_for_dispatch_key(composite)}


def _describe(
    names: list[str], values: list[Any], live: list[bool], captured: Sequence[Any]
) -> tuple[Leaf, ...]:
    leaves = []
    meta = iter(captured)
    for name, value, is_live in zip(names, values, live, strict=True):
        val = next(meta) if is_live else value
        if isinstance(value, torch.Tensor):
            sizes = tuple(s if isinstance(s, int) else None for s in val.shape)
            contiguous = value.is_contiguous()
            leaf = Leaf(name, True, None, sizes, value.dtype, value.device, contiguous)
        elif is_live and isinstance(val, torch.SymInt):
            leaf = Leaf(name, True)
        else:
            leaf = Leaf(name, False, value)
        leaves.append(leaf)
    return tuple(leaves)


def _static_notes(
    names: list[str], inputs: Sequence[Any], captured: Sequence[Any], guards: Sequence[str]
) -> tuple[str, ...]:
    notes = []
    for position, (name, value, val) in enumerate(zip(names, inputs, captured, strict=True)):
        if not isinstance(value, torch.Tensor):
            if not isinstance(val, torch.SymInt):
                notes.append(f"could not make the number {name} dynamic: it stays {value}")
            continue
        for axis, size in enumerate(val.shape):
            if not isinstance(size, int):
                continue
            why: str | None
            if size < 2:
                why = "sizes 0 and 1 are always captured as they are"
            else:
                why = _why(f"L['leaves'][{position}].size()[{axis}]", size, guards)
                why = why and f"the model needs {readable(why, names)}"
            why = why or "the model's own arithmetic fixes it"
            notes.append(f"could not make dimension {axis} of {name} dynamic: {why}")
    return tuple(notes)


def _why(source: str, size: int, guards: Sequence[str]) -> str | None:
    """The most telling equality that a dimension takes part in: one with another size, if any."""
    equal = [g for g in guards if source in g and "==" in g and " or " not in g]
    plain = {f"{source} == {size}", f"{size} == {source}"}
    return min(equal, key=lambda g: (g in plain, len(g)), default=None)


def readable(guard: str, names: Sequence[str]) -> str:
    """A guard in the terms of the arguments' names."""
    text = _LEAVES.sub(lambda m: names[int(m.group(1))], guard)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".shape[\1]", text)
