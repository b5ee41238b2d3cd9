"""The meaning of the canonical ops once more, in Python loops over float64 numbers.

Nothing here is shared with the package: a mistake would have to be made twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

NEG_INF = -math.inf


@dataclass(frozen=True)
class Case:
    """Arguments of a selection; ``kwargs`` are those that every scoring op takes."""

    q: Tensor
    k: Tensor
    weights: Tensor
    kwargs: dict[str, object] = field(default_factory=dict)
    block_ids: Tensor | None = None
    block_size: int = 0
    anchored: bool = False

    @property
    def positions(self) -> int:
        return self.k.shape[1]

    def get(self, name: str) -> Tensor | None:
        value = self.kwargs.get(name)
        assert value is None or isinstance(value, Tensor)
        return value

    def rows(self) -> list[tuple[int, int]]:
        return [(b, s) for b in range(self.q.shape[0]) for s in range(self.q.shape[1])]


def at(tensor: Tensor, b: int, s: int) -> Tensor:
    """Entry (b, s) of a tensor [B|1, S|1, ...]."""
    return tensor[min(b, tensor.shape[0] - 1), min(s, tensor.shape[1] - 1)]


def bounds(case: Case, b: int, s: int) -> tuple[int, int]:
    n = case.positions
    start, end = case.get("row_start"), case.get("row_end")
    low = 0 if start is None else int(at(start, b, s))
    high = n if end is None else int(at(end, b, s))
    return min(max(low, 0), n), min(max(high, 0), n)


def scores(case: Case, b: int, s: int) -> list[float]:
    q, w = case.q[b, s].double(), case.weights[b, s].double()
    k = case.k[min(b, case.k.shape[0] - 1)].double()
    row = (torch.relu(q @ k.T) * w[:, None]).sum(0) * case.kwargs.get("scale", 1.0)
    key_scale, bias = case.get("key_scale"), case.get("bias")
    if key_scale is not None:
        row = row * key_scale[min(b, key_scale.shape[0] - 1)].double()
    if bias is not None:
        row = row + at(bias, b, s).double()
    return row.tolist()


def visible(case: Case, b: int, s: int, blocks: bool = True) -> list[int]:
    low, high = bounds(case, b, s)
    mask = case.get("mask")
    seen = [p for p in range(low, high) if mask is None or bool(at(mask, b, s)[p])]
    if case.block_ids is None or not blocks:
        return seen
    ids = set(at(case.block_ids, b, s).tolist())
    origin = low if case.anchored else 0
    return [p for p in seen if (p - origin) // case.block_size in ids]


def _best(items: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Descending with NaN first, ties by place."""
    return sorted(items, key=lambda x: (not math.isnan(x[0]), -x[0] if x[0] == x[0] else 0, x[1]))


def select_row(
    case: Case, b: int, s: int, topk: int, fill: float = NEG_INF
) -> tuple[list[float], list[int]]:
    row = scores(case, b, s)
    found = _best([(row[p], p) for p in visible(case, b, s) if row[p] != NEG_INF])
    hidden = sorted(set(range(case.positions)) - {p for _, p in found}, reverse=True)
    found = found[:topk]
    empty = topk - len(found)
    return [v for v, _ in found] + [fill] * empty, [p for _, p in found] + hidden[:empty]


def block_max_row(
    case: Case, b: int, s: int, block_size: int, fill: float = NEG_INF
) -> list[float]:
    row, seen = scores(case, b, s), set(visible(case, b, s))
    out = []
    for first in range(0, case.positions, block_size):
        inside = [row[p] if p in seen else fill for p in range(first, first + block_size)]
        out.append(_best([(v, 0) for v in inside])[0][0])
    return out


def publish_row(
    maxima: list[float], high: int, num_blocks: int, block_size: int, pin: float | None
) -> tuple[list[float], list[int]]:
    if pin is not None and high > 0:
        maxima = list(maxima)
        maxima[(high - 1) // block_size] = pin
    best = _best([(v, i) for i, v in enumerate(maxima)])[:num_blocks]
    return [v for v, _ in best], [i for _, i in best]


def expand_row(
    ids: list[int], low: int, high: int, n: int, block_size: int, sparse_block: int, anchored: bool
) -> tuple[list[int], int]:
    """Ascending blocks padded with the last one, and the number of valid columns."""
    ratio = block_size // sparse_block
    origin = low if anchored else 0
    kept = set()
    for block in ids:
        for part in range(ratio):
            first = origin + (block * ratio + part) * sparse_block
            if block >= 0 and first < high and first + sparse_block > low and low < high:
                kept.add(block * ratio + part)
    blocks = sorted(kept)
    width = len(ids) * ratio
    if not blocks:
        return [0] * width, 0
    last = high - (origin + blocks[-1] * sparse_block)
    end = (len(blocks) - 1) * sparse_block + min(max(last, 1), sparse_block)
    blocks = [x + origin // sparse_block for x in blocks]
    return blocks + [blocks[-1]] * (width - len(blocks)), end


def column_position(block: int, low: int, column: int, sparse_block: int, anchored: bool) -> int:
    return block * sparse_block + (low % sparse_block if anchored else 0) + column % sparse_block
