"""Arguments of a call: bound by name, flattened to leaves, and named in messages."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from dsa_compile.errors import ConfigError, InputError

# Leaves that a capture takes as constants: a call must pass equal ones.
CONSTANTS = (
    bool,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


def split_examples(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments meant by ``example_inputs``.

    A tuple or list holds positional arguments, a mapping with names holds keyword arguments, the
    pair ``(tuple, dict)`` both, and a single tensor is the one positional argument.

    Raises:
        ConfigError: ``example_inputs`` is none of these.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        if not all(isinstance(name, str) for name in example_inputs):
            raise ConfigError("example_inputs: a mapping must have argument names as its keys")
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        if (
            len(example_inputs) == 2
            and isinstance(example_inputs[0], (tuple, list))
            and isinstance(example_inputs[1], dict)
        ):
            return tuple(example_inputs[0]), dict(example_inputs[1])
        return tuple(example_inputs), {}
    raise ConfigError(
        "example_inputs must be a tuple of positional arguments, a dict of keyword arguments, "
        f"the pair (tuple, dict), or one tensor, got {type(example_inputs).__name__}"
    )


def clone_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments, caches included; only the model's own tensors stay shared.

    Two arguments that share storage share it in the copy too.
    """
    import copy

    memo: dict[int, Any] = {id(model): model}
    memo |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    with torch.no_grad():
        copied_args, copied_kwargs = copy.deepcopy((tuple(args), dict(kwargs)), memo)
    return copied_args, copied_kwargs


@dataclass(frozen=True)
class CallSignature:
    """Binds calls of a module's ``forward`` to one canonical structure of arguments."""

    signature: inspect.Signature

    @classmethod
    def of(cls, model: nn.Module) -> CallSignature:
        return cls(inspect.signature(model.forward))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Values by parameter name, defaults filled in, the same for every spelling of a call.

        Raises:
            TypeError: the arguments do not fit the signature, as in a plain call.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def spread(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a call with these values."""
        bound = inspect.BoundArguments(self.signature, dict(arguments))
        return bound.args, bound.kwargs


def flatten(arguments: dict[str, Any]) -> tuple[list[str], list[Any], pytree.TreeSpec]:
    """Names, values and structure of the leaves of bound arguments."""
    paths, spec = pytree.tree_flatten_with_path(arguments)
    names = [_path_name(path) for path, _ in paths]
    return names, [value for _, value in paths], spec


def _path_name(path: pytree.KeyPath) -> str:
    top = path[0]
    assert isinstance(top, pytree.MappingKey)
    return f"{top.key}{pytree.keystr(path[1:])}"


def flatten_like(arguments: dict[str, Any], spec: pytree.TreeSpec) -> list[Any]:
    """Leaves of ``arguments`` in the order of ``spec``.

    Raises:
        InputError: the arguments are nested otherwise than in ``spec``.
    """
    try:
        return spec.flatten_up_to(arguments)
    except (ValueError, TypeError) as fault:
        raise InputError(f"the arguments are nested otherwise than in the capture: {fault}") from (
            fault
        )


@dataclass(frozen=True)
class Leaf:
    """What a capture fixed about one leaf of its arguments.

    Attributes:
        name: the leaf as written in a call, for instance ``x`` or ``cache[0]``.
        live: whether it is an input of the graph (a tensor, or a number kept symbolic).
        value: the constant, unless live.
        sizes: of a tensor, each dimension's fixed size or None where any size serves.
        dtype, device: of a tensor.
        contiguous: whether the captured tensor was contiguous.
    """

    name: str
    live: bool
    value: Any = None
    sizes: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    contiguous: bool = True

    def check(self, value: Any) -> None:
        """Raise InputError naming the argument where ``value`` is not what was captured."""
        if self.sizes is None:
            self._check_plain(value)
            return
        if not isinstance(value, torch.Tensor):
            raise InputError(f"argument {self.name}: a tensor was captured, got {value!r}")
        if value.dtype != self.dtype:
            raise InputError(
                f"argument {self.name}: captured with dtype {self.dtype}, got {value.dtype}"
            )
        if value.device != self.device:
            raise InputError(f"argument {self.name}: captured on {self.device}, got {value.device}")
        if value.dim() != len(self.sizes):
            raise InputError(
                f"argument {self.name}: captured with {len(self.sizes)} dimensions, "
                f"got shape {tuple(value.shape)}"
            )
        for axis, (fixed, size) in enumerate(zip(self.sizes, value.shape, strict=True)):
            if fixed is not None and size != fixed:
                raise InputError(
                    f"argument {self.name}: dimension {axis} was captured as {fixed} and could "
                    f"not be made dynamic, got {size}; optimise with examples of that size, or "
                    "without example_inputs"
                )
            if fixed is None and size < 2:
                raise InputError(
                    f"argument {self.name}: dimension {axis} is {size}, but sizes 0 and 1 need a "
                    "capture of their own; optimise with such an example, or without "
                    "example_inputs"
                )

    def _check_plain(self, value: Any) -> None:
        if self.live:
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(
                    f"argument {self.name}: a whole number was captured, got {value!r}"
                )
        elif isinstance(value, torch.Tensor):
            raise InputError(
                f"argument {self.name}: captured as the constant {self.value!r}, got a tensor of "
                f"shape {tuple(value.shape)}"
            )
        elif type(value) is not type(self.value) or value != self.value:
            raise InputError(
                f"argument {self.name}: captured as the constant {self.value!r}, got {value!r}; "
                "optimise again for another value, or without example_inputs"
            )
