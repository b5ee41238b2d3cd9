"""A module's state, put back after a run that must leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

_CONTAINERS = (list, dict, set)
PLAIN = (bool, int, float, complex, str, bytes, set, frozenset)


class ModelState:
    """Snapshot of every attribute and tensor that a forward pass could change.

    Tensors (buffers, and tensors kept as plain attributes) are put back in place, so their
    identity survives; containers get their former items back. Parameters are taken as constant.

    Args:
        model: the module.
        tensors: also copy the contents of buffers and tensor attributes.
    """

    def __init__(self, model: nn.Module, tensors: bool = True) -> None:
        self._attributes: list[tuple[str, Any, Any]] = []
        self._items: list[tuple[str, Any, Any]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            slots = [vars(module), module._buffers]
            self._attributes += [(prefix, slot, dict(slot)) for slot in slots]
            values = [v for slot in slots for v in slot.values()]
            for name, value in vars(module).items():
                if type(value) in _CONTAINERS:
                    self._items.append((prefix + name, value, copy.copy(value)))
            if tensors:
                inner = [v for c in values if type(c) in (list, dict) for v in _members(c)]
                self._keep_tensors([*values, *inner])

    def _keep_tensors(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._contents.append((value, value.detach().clone(), _version(value)))

    def changed_attributes(self) -> list[str]:
        """Names of the attributes that now hold another value, or other items."""
        names = [
            prefix + name
            for prefix, now, before in self._attributes
            for name in {**now, **before}
            if name not in now or name not in before or not _alike(now[name], before[name])
        ]
        items = [n for n, now, before in self._items if not _alike(now, before)]
        return sorted({*names, *items})

    def restore(self) -> None:
        """Put everything back."""
        # What did not change is not touched: compiled code may guard on it.
        for _, container, before in (*self._attributes, *self._items):
            if not _same(container, before):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(
                    before
                )
        with torch.no_grad():
            for tensor, before, version in self._contents:
                if version < 0 or _version(tensor) != version:
                    tensor.copy_(before)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run a block and put the state back, whatever happens in it."""
        try:
            yield
        finally:
            self.restore()


def _same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return now == before
    if isinstance(now, list):
        return all(a is b for a, b in zip(now, before, strict=True))
    return list(now) == list(before) and all(now[key] is before[key] for key in before)


def _alike(now: Any, before: Any) -> bool:
    """Whether two values are one object, or plain data and containers that are equal.

    Tracing takes containers apart and builds them anew, tuples and the like too.
    """
    if now is before:
        return True
    now_leaves, now_spec = pytree.tree_flatten(now)
    leaves, spec = pytree.tree_flatten(before)
    return now_spec == spec and all(
        a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)
        for a, b in zip(now_leaves, leaves, strict=True)
    )


def _members(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _version(tensor: torch.Tensor) -> int:
    """Counts in-place updates; -1 where PyTorch does not count them."""
    return -1 if tensor.is_inference() else tensor._version
