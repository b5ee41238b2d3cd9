"""Scores of candidate columns on the CPU: key blocks gathered, or read off dense scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cpu_dense import Problem, dense_into
from .cpu_plan import Part, dense_tile, gather_tile, parts, rows_within, scratch, working_set
from .reference import NEG_INF

_GATHER_COST = 10.0
_ROW_LOOP_WIDTH = 1024


def dense_crossover(heads: int, head_dim: int) -> float:
    """How many positions of a dense product cost as much as one gathered candidate column.

    A column costs ``2 * heads * head_dim`` operations either way; the gather adds moving its
    ``head_dim`` values, as much as scoring them with about ten more heads. Rows that see at most
    this multiple of their valid columns are scored densely. The head dim cancels out.
    """
    return 1.0 + _GATHER_COST / max(1, heads)


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
class KeyRuns:
    """Keys as overlapping runs of ``sparse_block`` positions, so that one index moves one block.

    Run ``base[b] + s`` starts at position s of batch item b. No run passes the end of the keys: a
    block that would is read from its shifted run, and its columns are put right afterwards.
    """

    keys: Tensor
    base: Tensor
    factors: Tensor | None
    factor_base: Tensor | None


def _runs(rows: Tensor, sparse_block: int) -> Tensor:
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
        if count * positions * dim * dtype.itemsize <= working_set() // 2:
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
        factors = _runs(flat.view(-1, 1), sparse_block)
        factor_base = item * flat.shape[1]
    return KeyRuns(_runs(rows, sparse_block), item * pitch, factors, factor_base)


@dataclass(frozen=True)
class _Rows:
    """One part of the rows, flattened to R, with the place of every block."""

    part: Part
    low: Tensor
    high: Tensor
    end: Tensor
    starts: Tensor
    safe: Tensor

    @staticmethod
    def of(problem: Problem, candidates: Candidates, part: Part) -> _Rows:
        positions, size = problem.k.shape[1], candidates.sparse_block
        low = part.of(problem.low).reshape(-1, 1)
        high = part.of(problem.high).reshape(-1, 1)
        end = part.of(candidates.end).reshape(-1).long().clamp(0, candidates.width)
        blocks = part.of(candidates.blocks).reshape(low.shape[0], -1).long()
        # Junk ids must not overflow; one block past either end is hidden all the same.
        starts = blocks.clamp(-1, positions // size + 1) * size
        if candidates.anchored:
            starts += low % size
        return _Rows(part, low, high, end, starts, starts.clamp(0, max(positions - size, 0)))

    def in_order(self, size: int) -> bool:
        """Whether the valid columns of every row are the positions themselves."""
        column = torch.arange(self.starts.shape[1]) * size
        return bool(((self.starts == column) | (column >= self.end[:, None])).all())


class _Tile:
    """Buffers of one gathered tile: keys as stored, keys as multiplied, products."""

    def __init__(self, like: Tensor, keys: Tensor, blocks: int, size: int, heads: int) -> None:
        self.keys, self.size, self.heads = keys, size, heads
        self.dim = keys.shape[1] // size
        self.taken = torch.empty(blocks, keys.shape[1], dtype=keys.dtype)
        same = keys.dtype == like.dtype
        self.wide = self.taken if same else torch.empty_like(self.taken, dtype=like.dtype)
        self.products = torch.empty(blocks * size, heads, dtype=like.dtype)

    def take(self, index: Tensor) -> Tensor:
        """The key blocks at ``index`` as [blocks * size, D] of the dtype of the products."""
        count = index.shape[0]
        taken, wide = self.taken[:count], self.wide[:count]
        torch.index_select(self.keys, 0, index, out=taken)
        if wide.dtype != taken.dtype:
            wide.copy_(taken)
        return wide.view(count * self.size, self.dim)

    def score_row(self, out: Tensor, index: Tensor, q: Tensor, weights: Tensor, step: int) -> None:
        """One row, ``step`` blocks at a time: index [n], q [D, H], weights [H], out [W]."""
        for i in range(0, index.shape[0], step):
            keys = self.take(index[i : i + step])
            columns = keys.shape[0]
            products = self.products[:columns]
            torch.mm(keys, q, out=products)
            first = i * self.size
            torch.mv(products.relu_(), weights, out=out[first : first + columns])

    def score_rows(self, out: Tensor, index: Tensor, q: Tensor, weights: Tensor) -> None:
        """Several narrow rows at once: index [r, n], q [r, D, H], weights [r, H, 1]."""
        count, columns = index.shape[0], index.shape[1] * self.size
        keys = self.take(index.reshape(-1)).view(count, columns, self.dim)
        products = self.products[: count * columns].view(count, columns, self.heads)
        torch.bmm(keys, q, out=products)
        out[:, :columns] = torch.bmm(products.relu_(), weights)[..., 0]


def _gather_into(
    out: Tensor, problem: Problem, candidates: Candidates, runs: KeyRuns, rows: _Rows
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
    tile = _Tile(out, runs.keys, row_step * block_step, size, heads)
    if row_step == 1:
        for r, last in enumerate(needed.tolist()):
            tile.score_row(out[r], index[r, :last], q[r], weights[r, :, 0], block_step)
    else:
        for r in range(0, count, row_step):
            some = slice(r, r + row_step)
            last = int(needed[some].max())
            tile.score_rows(out[some], index[some, :last], q[some], weights[some])
    if problem.scale != 1.0:
        out.mul_(problem.scale)
    if runs.factors is not None and runs.factor_base is not None:
        place = (rows.safe + runs.factor_base[item, None]).view(-1)
        out.mul_(runs.factors.index_select(0, place).view(count, width))


def _read_off(out: Tensor, problem: Problem, candidates: Candidates, rows: _Rows) -> None:
    """Dense scores of ``rows``, then the candidate columns of them to ``out`` [R, W]."""
    size, part = candidates.sparse_block, rows.part
    positions = max(problem.k.shape[1], size)
    dense = scratch(out, out.shape[0] * positions, problem.dtype)
    shape = (part.batch, part.rows, positions)
    stop = int(rows.high.max())
    dense_into(dense.view(shape)[..., :stop], problem, part, 0, stop, columns=True)
    place = rows.safe + torch.arange(out.shape[0])[:, None] * positions
    runs = _runs(dense.view(-1, 1), size)
    torch.index_select(runs, 0, place.view(-1), out=out.view(-1, size))


def _finish(
    out: Tensor, problem: Problem, candidates: Candidates, rows: _Rows, *, moved: bool
) -> None:
    """Applies bias, mask, range and ``end`` to the scores of ``rows``.

    Args:
        moved: A block that would pass the end of the keys was read further left: put it right.
    """
    size, part = candidates.sparse_block, rows.part
    count, width = out.shape
    inner = torch.arange(size)
    first = torch.arange(rows.starts.shape[1]) * size
    rough = (rows.starts < rows.low) | (rows.starts + size > rows.high)
    rough &= first < rows.end[:, None]
    row, block = rough.nonzero(as_tuple=True)
    start = rows.starts[row, block][:, None]
    blocks = out.view(count, -1, size)
    if moved and row.shape[0]:
        source = inner + start - rows.safe[row, block][:, None]
        blocks[row, block] = blocks[row, block].gather(-1, source.clamp_(0, size - 1))
    if problem.bias is not None:
        out.view(part.batch, part.rows, width).add_(part.of(problem.bias).to(out.dtype))
    if problem.mask is not None:
        out.view(part.batch, part.rows, width).masked_fill_(~part.of(problem.mask), NEG_INF)
    if row.shape[0]:
        place = start + inner
        hidden = (place < rows.low[row]) | (place >= rows.high[row])
        blocks[row, block] = blocks[row, block].masked_fill(hidden, NEG_INF)
    if width <= _ROW_LOOP_WIDTH:
        out.masked_fill_(torch.arange(width) >= rows.end[:, None], NEG_INF)
    else:
        for line, end in zip(out, rows.end.tolist(), strict=True):
            line[end:] = NEG_INF


def sparse_logits(problem: Problem, candidates: Candidates) -> Tensor:
    """Scores [B, S, W] of the candidate columns, -inf where hidden and from ``end`` on.

    Mask and bias of the problem are laid out by column.
    """
    batch, count, heads, dim = problem.q.shape
    positions, width, size = problem.k.shape[1], candidates.width, candidates.sparse_block
    out = torch.empty(batch, count, width, dtype=problem.dtype)
    if out.numel() == 0:
        return out
    if positions == 0:
        return out.fill_(NEG_INF)
    runs: KeyRuns | None = None
    columns = int(candidates.end.sum())
    itemsize = problem.dtype.itemsize
    budget = working_set() // 4
    row_bytes = max(positions, size) * itemsize + 24 * candidates.blocks.shape[2]
    row_bytes += heads * dim * itemsize
    limit = dense_crossover(heads, dim)
    tile, _ = dense_tile(heads, batch * count)
    for part in parts(problem.whole, rows_within(budget, row_bytes, tile)):
        rows = _Rows.of(problem, candidates, part)
        target = part.of(out).view(-1, width)
        valid = int(rows.end.sum())
        seen = int((rows.high - rows.low).clamp_(min=0).sum())
        if valid == 0:
            target.fill_(NEG_INF)
            continue
        moved = True
        if seen > limit * valid:
            runs = runs or key_runs(problem, size, columns)
            _gather_into(target, problem, candidates, runs, rows)
        elif rows.in_order(size):
            moved = False
            stop = min(int(rows.end.max()), positions)
            high = torch.minimum(problem.high, candidates.end.clamp(min=0))
            dense_into(part.of(out)[..., :stop], problem, part, 0, stop, high=high, columns=True)
        else:
            _read_off(target, problem, candidates, rows)
        _finish(target, problem, candidates, rows, moved=moved)
    return out
