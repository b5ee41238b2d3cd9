"""How the CPU kernels cut their work: a byte budget, chunks of rows, tiles that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu_threads import inside_pool, share_of_threads, workers

DEFAULT_WORKING_SET = 64 << 20
_TILE_SCORES = 1 << 19
_TILE_HEAD_ROWS = 512
_MIN_STRIP, _MAX_STRIP = 512, 4096
_GATHER_BYTES = 5 << 18
_MIN_GATHER = 64

_working_set = DEFAULT_WORKING_SET


def working_set() -> int:
    """Bytes that one CPU kernel may hold beyond its inputs and results."""
    return _working_set


@contextmanager
def limit_working_set(size: int) -> Iterator[None]:
    """Lowers or raises :func:`working_set` inside a ``with`` block, for the whole process.

    A chunk never gets smaller than one row of one key strip, so a tiny budget costs time, never
    correctness.

    Args:
        size: Bytes, at least 1.

    Raises:
        ValueError: ``size`` is not positive.
    """
    global _working_set
    if size < 1:
        raise ValueError(f"size must be at least 1 byte, got {size}")
    before, _working_set = _working_set, size
    try:
        yield
    finally:
        _working_set = before


@dataclass(frozen=True)
class Part:
    """Rows [s0, s1) of the batch items [b0, b1)."""

    b0: int
    b1: int
    s0: int
    s1: int

    @property
    def batch(self) -> int:
        return self.b1 - self.b0

    @property
    def rows(self) -> int:
        return self.s1 - self.s0

    def of(self, tensor: Tensor) -> Tensor:
        """The part's slice of a [B, S, ...] tensor."""
        return tensor[self.b0 : self.b1, self.s0 : self.s1]


def parts(within: Part, rows: int) -> Iterator[Part]:
    """Cuts ``within`` into parts of at most ``rows`` rows: whole batch items, or pieces of one."""
    if within.rows == 0:
        return
    items = max(1, rows // within.rows)
    step = max(1, min(rows, within.rows))
    for b in range(within.b0, within.b1, items):
        for s in range(within.s0, within.s1, step):
            yield Part(b, min(b + items, within.b1), s, min(s + step, within.s1))


def share_of_memory() -> int:
    """Bytes that one of the sharing threads may hold."""
    return max(1, _working_set // workers())


def rows_within(budget: int, bytes_per_row: int, tile: int = 1) -> int:
    """Rows that fit the budget, one at least; whole tiles if one fits.

    Parts of whole tiles make the same products as one large part, so that the budget does not
    change a single bit of the scores.
    """
    rows = max(1, budget // max(1, bytes_per_row))
    return rows if rows < tile else rows // tile * tile


def pieces(whole: Part, budget: int, bytes_per_row: int, tile: int = 1) -> list[Part]:
    """Cuts rows so that each piece fits the budget and every thread gets two or more."""
    count = whole.batch * whole.rows
    rows = rows_within(budget, bytes_per_row, tile)
    if workers() > 1 and not inside_pool():
        fair = -(-count // (2 * workers()))
        rows = min(rows, -(-fair // tile) * tile)
    return list(parts(whole, rows))


def dense_tile(heads: int, rows: int) -> tuple[int, int]:
    """(rows, key positions) of one dense tile: each core's share stays near it."""
    cores, heads = share_of_threads(), max(1, heads)
    tile_rows = max(1, min(rows, _TILE_HEAD_ROWS * cores // heads))
    strip = _TILE_SCORES * cores // (tile_rows * heads)
    return tile_rows, max(_MIN_STRIP, min(strip, _MAX_STRIP * cores))


def smallest_strip() -> int:
    """Key positions below which a strip costs more calls than it saves memory."""
    return _MIN_STRIP


def gather_tile(heads: int, dim: int, itemsize: int) -> int:
    """Columns of one gathered tile, keys and products together."""
    size = _GATHER_BYTES * share_of_threads()
    return max(_MIN_GATHER, size // (itemsize * max(1, heads + dim)))


def scratch(like: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    """A flat buffer on the device of ``like``."""
    return torch.empty(elements, dtype=dtype, device=like.device)
