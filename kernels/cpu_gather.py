"""Candidate columns on the CPU: where they are, and their scores from gathered key blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cpu_dense import Problem
from .cpu_plan import Part, gather_tile, share_of_memory
from .cpu_threads import for_each

_PRODUCTS = 1 << 20


@dataclass(frozen=True)
class Candidates:
    """Columns of every row: sparse blocks [B, S, N] and how many leading columns are valid."""

    blocks: Tensor
    end: Tensor
    sparse_block: int
    anchored: bool

    @property
    def width(self) -> int:
        return self.blocks.shape[2] * self.sparse_block


@dataclass(frozen=True)
class Rows:
    """One part of the rows, flattened to R, with the place of every block."""

    part: Part
    low: Tensor
    high: Tensor
    end: Tensor
    starts: Tensor
    safe: Tensor

    @staticmethod
    def of(problem: Problem, candidates: Candidates, part: Part) -> Rows:
        positions, size = problem.k.shape[1], candidates.sparse_block
        low = part.of(problem.low).reshape(-1, 1)
        high = part.of(problem.high).reshape(-1, 1)
        end = part.of(candidates.end).reshape(-1).long().clamp(0, candidates.width)
        blocks = part.of(candidates.blocks).reshape(low.shape[0], -1).long()
        # Junk ids must not overflow; one block past either end is hidden all the same.
        starts = blocks.clamp(-1, positions // size + 1) * size
        if candidates.anchored:
            starts += low % size
        return Rows(part, low, high, end, starts, starts.clamp(0, max(positions - size, 0)))

    def in_order(self, size: int) -> bool:
        """Whether the valid columns of every row are the positions themselves."""
        column = torch.arange(self.starts.shape[1]) * size
        return bool(((self.starts == column) | (column >= self.end[:, None])).all())


@dataclass(frozen=True)
class KeyRuns:
    """Keys as overlapping runs of ``sparse_block`` positions, so that one index moves one block.

    Run ``base[b] + s`` starts at position s of batch item b. No run passes the end of the keys: a
    block that would is read from its shifted run, and its columns are put right afterwards.
    """

    keys: Tensor
    base: Tensor
    factors: Tensor | None
    factor_base: Tensor | None


def block_runs(rows: Tensor, sparse_block: int) -> Tensor:
    """Contiguous [n, d] rows as overlapping runs [n - sparse_block + 1, sparse_block * d]."""
    count, dim = rows.shape
    return rows.as_strided((count - sparse_block + 1, sparse_block * dim), (dim, 1))


def key_runs(problem: Problem, sparse_block: int, columns: int) -> KeyRuns:
    """Views the keys for gathering; copies them only where their layout or dtype pays for it.

    Args:
        columns: How many columns will be gathered in all. When that is more than there are keys,
            low precision keys are converted once and not at every use.
    """
    keys, dtype = problem.k, problem.dtype
    count, positions, dim = keys.shape
    if keys.dtype != dtype and columns >= count * positions:
        if count * positions * dim * dtype.itemsize <= share_of_memory() // 2:
            keys = keys.to(dtype)
    missing = max(0, sparse_block - positions)
    if missing:
        keys = pad(keys, (0, 0, 0, missing))
    if keys.stride(2) != 1 or keys.stride(1) != dim or keys.stride(0) % dim:
        keys = keys.contiguous()
    pitch = keys.stride(0) // dim if count > 1 else 0
    rows = keys.as_strided(((count - 1) * pitch + keys.shape[1], dim), (dim, 1))
    item = torch.arange(problem.q.shape[0])
    factors = factor_base = None
    if problem.key_scale is not None:
        flat = pad(problem.key_scale.to(dtype), (0, missing)).contiguous()
        factors = block_runs(flat.view(-1, 1), sparse_block)
        factor_base = item * flat.shape[1]
    return KeyRuns(block_runs(rows, sparse_block), item * pitch, factors, factor_base)


class _Tile:
    """Buffers of gathered tiles: keys as stored, keys as multiplied, products."""

    def __init__(self, like: Tensor, keys: Tensor, blocks: int, size: int, heads: int) -> None:
        self.keys, self.size, self.heads, self.blocks = keys, size, heads, blocks
        self.dim = keys.shape[1] // size
        # Few heads make small products: those of several tiles are then summed in one call.
        self.tiles = max(1, _PRODUCTS // max(1, blocks * size * heads))
        self.taken = torch.empty(blocks, keys.shape[1], dtype=keys.dtype)
        same = keys.dtype == like.dtype
        self.wide = self.taken if same else torch.empty_like(self.taken, dtype=like.dtype)
        rows = min(self.tiles * blocks * size, like.shape[-1])
        self.products = torch.empty(max(rows, blocks * size), heads, dtype=like.dtype)

    def take(self, index: Tensor) -> Tensor:
        """The key blocks at ``index`` as [blocks * size, D] of the dtype of the products."""
        count = index.shape[0]
        taken, wide = self.taken[:count], self.wide[:count]
        torch.index_select(self.keys, 0, index, out=taken)
        if wide.dtype != taken.dtype:
            wide.copy_(taken)
        return wide.view(count * self.size, self.dim)

    def score_row(self, out: Tensor, index: Tensor, q: Tensor, weights: Tensor) -> None:
        """One row, a tile at a time: index [n], q [D, H], weights [H], out [W]."""
        many = self.tiles * self.blocks
        for first in range(0, index.shape[0], many):
            columns = 0
            for some in index[first : first + many].split(self.blocks):
                keys = self.take(some)
                torch.mm(keys, q, out=self.products[columns : columns + keys.shape[0]])
                columns += keys.shape[0]
            products = self.products[:columns].relu_()
            place = first * self.size
            torch.mv(products, weights, out=out[place : place + columns])

    def score_rows(self, out: Tensor, index: Tensor, q: Tensor, weights: Tensor) -> None:
        """Several narrow rows at once: index [r, n], q [r, D, H], weights [r, H, 1]."""
        count, columns = index.shape[0], index.shape[1] * self.size
        keys = self.take(index.reshape(-1)).view(count, columns, self.dim)
        products = self.products[: count * columns].view(count, columns, self.heads)
        torch.bmm(keys, q, out=products)
        out[:, :columns] = torch.bmm(products.relu_(), weights)[..., 0]


def gather_into(
    out: Tensor, problem: Problem, candidates: Candidates, runs: KeyRuns, rows: Rows
) -> None:
    """Scores of the valid columns of ``rows`` to ``out`` [R, W]; the others stay undefined."""
    dtype, size = problem.dtype, candidates.sparse_block
    heads, dim = problem.q.shape[2:]
    count, width = out.shape
    # [D, H] a row: a tall product with few columns is the form that BLAS packs least for.
    q = rows.part.of(problem.q).to(dtype).reshape(count, heads, dim).transpose(1, 2).contiguous()
    weights = rows.part.of(problem.weights).to(dtype).reshape(count, heads, 1)
    item = torch.arange(rows.part.b0, rows.part.b1).repeat_interleave(rows.part.rows)
    index = rows.safe + runs.base[item, None]
    needed = (rows.end + size - 1) // size
    columns = max(size, gather_tile(heads, dim, dtype.itemsize))
    row_step = max(1, min(count, columns // width))
    block_step = max(1, min(columns // (row_step * size), candidates.blocks.shape[2]))
    last = needed.tolist()

    def worker() -> Callable[[int], None]:
        tile = _Tile(out, runs.keys, row_step * block_step, size, heads)

        def score(r: int) -> None:
            if row_step == 1:
                tile.score_row(out[r], index[r, : last[r]], q[r], weights[r, :, 0])
                return
            some = slice(r, r + row_step)
            tile.score_rows(out[some], index[some, : max(last[some])], q[some], weights[some])

        return score

    for_each(range(0, count, row_step), worker, 2 * heads * dim * size * sum(last))
    if problem.scale != 1.0:
        out.mul_(problem.scale)
    if runs.factors is not None and runs.factor_base is not None:
        place = (rows.safe + runs.factor_base[item, None]).view(-1)
        out.mul_(runs.factors.index_select(0, place).view(count, width))
