"""The inputs that a captured graph reads: buffers for rows, fixed memory for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dsa_compile.errors import InputError
from dsa_compile.graph_pieces import Rows
from dsa_compile.passes.recognise_ops import attribute


class RowBuffers:
    """Checks the inputs of calls, and copies their rows into buffers of a bucket's size.

    Args:
        graph_module: whose inputs they are; the tensors that it holds must stay the same too.
        rows: where the rows are.
    """

    def __init__(self, graph_module: fx.GraphModule, rows: Rows) -> None:
        self.rows = rows
        self._module = graph_module
        self._count = len(graph_module.graph.find_nodes(op="placeholder"))
        self._held = {
            str(n.target): attribute(n) for n in graph_module.graph.find_nodes(op="get_attr")
        }

    def count(self, inputs: Sequence[Any], largest: int) -> int:
        """Number of rows of a call.

        Raises:
            InputError: the inputs disagree on it, or it is not served.
        """
        if len(inputs) != self._count:
            raise InputError(f"{self._count} inputs are needed, got {len(inputs)}")
        counts = {i: inputs[i].shape[dim] for i, dim in self.rows.inputs.items()}
        counts |= {i: inputs[i] for i in self.rows.counts}
        if len(set(counts.values())) != 1:
            raise InputError(f"inputs disagree on the number of rows: {counts}")
        count = int(next(iter(counts.values())))
        if not self.rows.least <= count <= largest:
            raise InputError(
                f"{count} rows: the graph serves {self.rows.least} and more, the largest bucket "
                f"{largest}"
            )
        return count

    def check(self, inputs: Sequence[Any], fixed: Sequence[Any]) -> None:
        """Compare a call with what was captured.

        Raises:
            InputError: names the input, or the tensor of the module, that differs.
        """
        for position, (given, held) in enumerate(zip(inputs, fixed, strict=True)):
            if position in self.rows.counts:
                continue
            if not isinstance(given, torch.Tensor):
                if given != held:
                    raise InputError(
                        f"input {position} was captured as {held!r} and is now {given!r}"
                    )
            elif position in self.rows.inputs:
                if given.dtype != held.dtype or _others(given, held, self.rows.inputs[position]):
                    raise InputError(
                        f"input {position} was captured as {held.dtype} {tuple(held.shape)} and is "
                        f"now {given.dtype} {tuple(given.shape)}"
                    )
            elif not _same_memory(given, held):
                raise InputError(
                    f"input {position} lies elsewhere than when it was captured; a CUDA graph "
                    "reads fixed memory: copy the new contents into the first tensor"
                )
        for name, tensor in self._held.items():
            owner, _, leaf = name.rpartition(".")
            if getattr(self._module.get_submodule(owner), leaf) is not tensor:
                raise InputError(f"{name} was replaced after the capture; update it in place")

    def fixed(self, inputs: Sequence[Any], count: int, bucket: int) -> list[Any]:
        """Inputs of a bucket: buffers for those with rows, filled; the others as they are."""
        fixed: list[Any] = []
        for position, given in enumerate(inputs):
            if position in self.rows.counts:
                fixed.append(bucket)
            elif position in self.rows.inputs:
                shape = list(given.shape)
                shape[self.rows.inputs[position]] = bucket
                fixed.append(given.new_empty(shape))
            else:
                fixed.append(given)
        self.fill(fixed, inputs, count)
        return fixed

    def fill(self, fixed: list[Any], inputs: Sequence[Any], count: int, pad: int = -1) -> None:
        """Copy the rows, and pad with copies of row ``pad`` of them."""
        for position, dim in self.rows.inputs.items():
            buffer, given = fixed[position], inputs[position].narrow(dim, 0, count)
            buffer.narrow(dim, 0, count).copy_(given)
            rest = buffer.shape[dim] - count
            if rest:
                buffer.narrow(dim, count, rest).copy_(given.narrow(dim, pad % count, 1))


def _others(given: torch.Tensor, held: torch.Tensor, dim: int) -> bool:
    """Whether a size other than that of the rows differs."""
    if given.dim() != held.dim():
        return True
    return any(
        a != b for i, (a, b) in enumerate(zip(given.shape, held.shape, strict=True)) if i != dim
    )


def _same_memory(given: torch.Tensor, held: torch.Tensor) -> bool:
    return (
        given.data_ptr() == held.data_ptr()
        and given.shape == held.shape
        and given.stride() == held.stride()
        and given.dtype == held.dtype
    )
