"""The process that the strict stand-in of DeepGEMM plays, and what its functions check alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .strict_operands import FP4, FP8, logical_dim, poison


@dataclass
class Schedule:
    """What a metadata tensor was made for."""

    rows: int
    blocks: int
    sparse_block: int
    dtype: torch.dtype
    unaligned: bool
    tokens: int | None
    page: int | None
    places: list[Tensor]
    """Token of each valid column of each row; logical tokens in the paged form."""
    table: Tensor | None


@dataclass
class StrictProcess:
    """One process: its state, and the checks that its functions share.

    ``calls`` names the functions that were called.
    """

    release: str = "2.8.2"
    capability: tuple[int, int] = (10, 0)
    max_rows: int = 2**20
    stream: str = "main"
    capturing: bool = False
    calls: list[str] = field(default_factory=list)
    workspaces: set[str] = field(default_factory=set)
    schedules: dict[int, Schedule] = field(default_factory=dict)
    compiled: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def newest(self) -> bool:
        return self.release == "2.8.2"

    def _sparse_call(self, name: str) -> None:
        self.calls.append(name)
        assert self.capability[0] == 10, "host assert: arch 10"

    def _compile(self, *kernel: Any) -> None:
        """Kernels are compiled for their constants when they are first called."""
        assert kernel in self.compiled or not self.capturing, f"{kernel} is compiled in a capture"
        self.compiled.add(kernel)

    def _workspace(self, rows: int) -> None:
        assert rows <= self.max_rows
        if self.stream not in self.workspaces:
            assert not self.capturing, "the workspace is made on first use, outside of a capture"
            self.workspaces.add(self.stream)

    def _record(self, schedule: Schedule) -> Tensor:
        key = len(self.schedules) + 1
        self.schedules[key] = schedule
        return torch.tensor([key], dtype=torch.int64).view(torch.uint8).repeat(4)

    def _schedule(self, metadata: Tensor) -> Schedule:
        assert metadata.dim() == 1 and metadata.dtype == torch.uint8 and metadata.is_contiguous()
        return self.schedules[int(metadata[:8].view(torch.int64))]

    def _check_bounds(self, rows: int, *bounds: Tensor) -> None:
        for bound in bounds:
            assert bound.shape == (rows,) and bound.dtype == torch.int32
            assert bound.is_contiguous() and bool((bound >= 0).all())

    def _check_indices(self, indices: Tensor, sparse_block: int, dtype: torch.dtype) -> None:
        assert indices.dim() == 2 and indices.shape[0] > 0
        assert indices.dtype == torch.int32 and indices.is_contiguous()
        blocks = indices.shape[1]
        assert blocks > 0 and blocks % 4 == 0 and blocks <= 4096
        assert sparse_block in (8, 16)
        assert dtype in (FP8, FP4)

    def _prefix(self, row: Tensor, count: int) -> Tensor:
        """The ids of a row that are read: unique, strictly ascending, not negative."""
        ids = row[:count].long()
        assert bool((ids >= 0).all()), f"block ids of the derived prefix: {ids.tolist()}"
        assert bool((ids[1:] > ids[:-1]).all()), f"prefix is not ascending: {ids.tolist()}"
        return ids

    def _check_queries(self, q: Tensor, q_sf: Tensor | None, weights: Tensor) -> None:
        """Checks shared by every form that takes UE8M0 scales; q [..., H, D]."""
        assert q_sf is not None and q_sf.shape == q.shape[:-1]
        assert q_sf.dtype == torch.int32 and q_sf.is_contiguous()
        assert q.dtype in (FP8, FP4) and q.is_contiguous()
        rows, heads = math.prod(q.shape[:-2]), q.shape[-2]
        assert weights.shape == (rows, heads) and weights.dtype == torch.bfloat16
        assert weights.stride(1) == 1 and weights.stride(0) * 2 % 16 == 0

    def _check_sparse_heads(self, q: Tensor) -> None:
        heads = q.shape[-2]
        assert 0 < heads <= 32 and heads % 4 == 0
        assert self.newest or heads == 32, "this release takes exactly 32 heads"
        assert logical_dim(q) == 128

    def _output(self, rows: int, columns: int) -> Tensor:
        stride = -(-columns // 512) * 512
        return poison((rows + rows % 2, stride), torch.bfloat16)[:rows, :columns]

    def _check_schedule(
        self, metadata: Tensor, rows: int, dtype: torch.dtype, blocks: int, sparse_block: int
    ) -> Schedule:
        schedule = self._schedule(metadata)
        assert blocks > 0 and blocks % 4 == 0 and blocks <= 4096 and sparse_block in (8, 16)
        given = (rows, blocks, sparse_block, dtype)
        made = (schedule.rows, schedule.blocks, schedule.sparse_block, schedule.dtype)
        assert given == made, f"metadata of {made} used for {given}"
        return schedule
