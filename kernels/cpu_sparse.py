"""Scores of candidate columns on the CPU: key blocks gathered, or read off dense scores."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_dense import Problem, dense_into
from .cpu_gather import Candidates, Rows, block_runs, gather_into, key_runs
from .cpu_plan import Part, dense_tile, pieces, scratch, share_of_memory
from .cpu_threads import for_each
from .reference import NEG_INF

_GATHERED_PRODUCT, _GATHERED_HEADS = 1.15, 12.0
_ROW_LOOP_WIDTH = 1024


def dense_crossover(heads: int, head_dim: int) -> float:
    """How many positions of a dense product cost as much as one gathered candidate column.

    A column takes ``2 * heads * head_dim`` operations either way. Gathered keys belong to one row,
    so that their product runs a little slower than one that many rows share, and moving their
    ``head_dim`` values costs as much as scoring them with about twelve more heads (measured on
    x86 cores with AVX2; the head dim cancels out). Rows that see at most this multiple of their
    valid columns are scored densely.
    """
    return _GATHERED_PRODUCT + _GATHERED_HEADS / max(1, heads)


def _read_off(out: Tensor, problem: Problem, candidates: Candidates, rows: Rows) -> None:
    """Dense scores of ``rows``, then the candidate columns of them to ``out`` [R, W]."""
    size, part = candidates.sparse_block, rows.part
    positions = max(problem.k.shape[1], size)
    dense = scratch(out, out.shape[0] * positions, problem.dtype)
    shape = (part.batch, part.rows, positions)
    stop = int(rows.high.max())
    dense_into(dense.view(shape)[..., :stop], problem, part, 0, stop, columns=True)
    place = rows.safe + torch.arange(out.shape[0])[:, None] * positions
    runs = block_runs(dense.view(-1, 1), size)
    torch.index_select(runs, 0, place.view(-1), out=out.view(-1, size))


def _finish(
    out: Tensor, problem: Problem, candidates: Candidates, rows: Rows, *, moved: bool
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
    limit = dense_crossover(heads, dim)
    row_bytes = (max(positions, size) + heads * dim) * problem.dtype.itemsize
    row_bytes += 24 * candidates.blocks.shape[2]
    tile, _ = dense_tile(heads, batch * count)
    valid = candidates.end.long().clamp(0, width)
    seen = (problem.high - problem.low).clamp_(min=0)
    tasks: list[tuple[Part, str]] = []
    for part in pieces(problem.whole, share_of_memory() // 4, row_bytes, tile):
        columns, context = int(part.of(valid).sum()), int(part.of(seen).sum())
        gathered = context > limit * columns
        tasks.append((part, "none" if columns == 0 else "gather" if gathered else "dense"))
    total = int(valid.sum())
    runs = key_runs(problem, size, total) if any(how == "gather" for _, how in tasks) else None

    def run(task: tuple[Part, str]) -> None:
        part, how = task
        target = part.of(out).view(-1, width)
        if how == "none":
            target.fill_(NEG_INF)
            return
        rows = Rows.of(problem, candidates, part)
        in_order = how == "dense" and rows.in_order(size)
        if how == "gather" and runs is not None:
            gather_into(target, problem, candidates, runs, rows)
        elif in_order:
            stop = min(int(rows.end.max()), positions)
            high = torch.minimum(problem.high, valid)
            dense_into(part.of(out)[..., :stop], problem, part, 0, stop, high=high, columns=True)
        else:
            _read_off(target, problem, candidates, rows)
        _finish(target, problem, candidates, rows, moved=not in_order)

    for_each(tasks, lambda: run, 2 * heads * dim * total)
    return out
