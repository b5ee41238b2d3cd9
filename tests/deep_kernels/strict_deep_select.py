"""A DeepSelect that runs on the CPU, asserts every line of its contract and selects by reference.

Order among unsorted slots and among ties is drawn at random, what is left unwritten holds poison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NAN_MARK = 0x3F3F3F3F
JUNK = 0x5EADBEEF


class KernelTrap(RuntimeError):
    """The kernel aborted, which takes the process's CUDA context with it."""


def _aligned(rows: int, columns: int, dtype: torch.dtype, step: int) -> Tensor:
    step //= dtype.itemsize
    fill = JUNK if not dtype.is_floating_point else 1e30
    return torch.full((rows, -(-columns // step) * step), fill, dtype=dtype)[:, :columns]


@dataclass
class StrictDeepSelect:
    """One DeepSelect process on SM100. ``calls`` holds (rows, columns, dtype) of each call."""

    input_stride: int = 1024
    output_stride: int = 32
    calls: list[tuple[int, int, torch.dtype]] = field(default_factory=list)

    def get_stride_requirement(self) -> tuple[int, int]:
        return self.input_stride, self.output_stride

    def topk(
        self,
        input: Tensor,
        topk: int,
        sorted: bool = False,
        begin: Tensor | None = None,
        end: Tensor | None = None,
        indices_type: torch.dtype = torch.int64,
        sorted_index: bool = False,
        hint: Tensor | None = None,
        output_idx: Tensor | None = None,
        output_idx_offset: Tensor | None = None,
        idx_oob_fill_value: int = 2147483647,
        value_oob_fill_value: float = float("-inf"),
        return_value: bool = True,
        abort_when_nan_found: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        assert input.dim() == 2 and input.dtype in (torch.bfloat16, torch.float32)
        rows, columns = input.shape
        self.calls.append((rows, columns, input.dtype))
        assert rows > 0 and 0 < columns < 2**23 and 0 < topk <= 4096
        assert input.stride(1) == 1
        assert input.stride(0) * input.dtype.itemsize % self.input_stride == 0
        assert input.data_ptr() % 16 == 0
        assert begin is None and hint is None and output_idx_offset is None
        assert indices_type in (torch.int32, torch.int64)
        assert not (sorted and input.dtype == torch.bfloat16)
        assert not (sorted and (sorted_index or not return_value))
        if end is None:
            end = torch.full((rows,), columns, dtype=torch.int32)
        assert end.shape == (rows,) and end.dtype == torch.int32 and end.is_contiguous()
        assert bool((end >= 0).all()) and bool((end <= columns).all())
        if output_idx is None:
            output_idx = _aligned(rows, topk, indices_type, self.output_stride)
        assert output_idx.shape == (rows, topk) and output_idx.dtype == indices_type
        assert output_idx.stride(1) == 1
        assert output_idx.stride(0) * indices_type.itemsize % self.output_stride == 0
        values = _aligned(rows, topk, input.dtype, self.output_stride) if return_value else None
        for row in range(rows):
            length = int(end[row])
            scores = input[row, :length].float()
            if length <= topk:
                found = torch.arange(length)
            elif bool(scores.isnan().any()):
                if abort_when_nan_found:
                    raise KernelTrap("NaN found")
                output_idx[row, 0] = NAN_MARK
                continue
            else:
                mixed = torch.randperm(length)
                order = scores[mixed].argsort(descending=True)
                found = mixed[order[:topk]]
                found = found[torch.randperm(topk)]
            if sorted_index:
                found = found.sort().values
            if sorted:
                found = found[scores[found].argsort(descending=True)]
            output_idx[row] = idx_oob_fill_value
            output_idx[row, : len(found)] = found.to(indices_type)
            if values is not None:
                values[row] = value_oob_fill_value
                values[row, : len(found)] = input[row, found]
        return values, output_idx

    def module(self) -> ModuleType:
        """The package."""
        package: Any = ModuleType("deep_select")
        package.__version__ = "1.0.0"
        package.topk = self.topk
        package.get_stride_requirement = self.get_stride_requirement
        return package
