"""Selections on the CPU in one pass over the scores: all positions, or the candidate blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cpu_candidates import columns, expand, positions_of
from .cpu_dense import Problem, dense_into
from .cpu_gather import Candidates
from .cpu_plan import Part, dense_tile, pieces, scratch, share_of_memory, smallest_strip
from .cpu_sparse import sparse_logits
from .cpu_threads import for_each
from .cpu_topk import fill_empty, ranked
from .reference import NEG_INF, in_blocks

Observer = Callable[[Part, Problem, int, Tensor], None]
"""Called with part, its problem, the first position and the scores [b, s, n] of every strip."""


def _padded(values: Tensor, indices: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    missing = (0, topk - indices.shape[-1])
    if missing[1] == 0:
        return values, indices
    return pad(values, missing, value=NEG_INF), pad(indices, missing, value=-1)


def _merge(
    best: tuple[Tensor, Tensor] | None, more: tuple[Tensor, Tensor], topk: int
) -> tuple[Tensor, Tensor]:
    """The best of two lists; ``best`` holds lower positions, so it wins ties by coming first."""
    if best is None:
        return more
    values = torch.cat((best[0], more[0]), dim=-1)
    indices = torch.cat((best[1], more[1]), dim=-1)
    values, order = ranked(values, topk)
    return values, indices.gather(-1, order.clamp(min=0)).masked_fill_(order < 0, -1)


def _strip(problem: Problem, multiple: int) -> int:
    """Positions whose scores of one row are held at a time."""
    fit = max(share_of_memory() // 2 // problem.dtype.itemsize, smallest_strip())
    return max(multiple, fit // multiple * multiple)


def select_dense(
    problem: Problem,
    topk: int,
    fill: float,
    *,
    block_size: int = 1,
    visible: Callable[[Part], Tensor] | None = None,
    visible_bytes: int = 0,
    observe: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """Values and positions [B, S, topk] over all positions.

    Args:
        block_size: Strips seen by ``observe`` start at multiples of it.
        visible: Makes one more mask [b, s, T] for a part, at ``visible_bytes`` a row.
        observe: Sees every score once, before the selection.
    """
    batch, count, heads, dim = problem.q.shape
    positions, itemsize = problem.k.shape[1], problem.dtype.itemsize
    values = torch.empty(batch, count, topk, dtype=problem.dtype)
    indices = torch.empty(batch, count, topk, dtype=torch.int64)
    strip = _strip(problem, block_size)
    row_bytes = min(strip, positions) * itemsize + heads * dim * itemsize + 32 * topk
    tile, _ = dense_tile(heads, batch * count)

    def run(part: Part) -> None:
        some = problem.restrict(part)
        if visible is not None:
            extra = visible(part)
            some = replace(some, mask=extra if some.mask is None else extra & some.mask)
        lines = part.batch * part.rows
        start = int(some.low.min()) // block_size * block_size
        stop = int(some.high.max())
        buffer = scratch(values, lines * max(0, min(strip, stop - start)), problem.dtype)
        best: tuple[Tensor, Tensor] | None = None
        for c0 in range(start, stop, strip):
            width = min(c0 + strip, stop) - c0
            flat = buffer[: lines * width].view(lines, width)
            scores = flat.view(part.batch, part.rows, width)
            dense_into(scores, some, some.whole, c0, c0 + width)
            if observe is not None:
                observe(part, some, c0, scores)
            found, place = ranked(flat, topk)
            place = torch.where(place < 0, place, place + c0)
            best = _merge(best, (found, place), topk)
        if best is None:
            best = values.new_empty(lines, 0), indices.new_empty(lines, 0)
        found, place = _padded(*best, topk)
        fill_empty(found, place, positions, fill)
        part.of(values).copy_(found.view(part.batch, part.rows, topk))
        part.of(indices).copy_(place.view(part.batch, part.rows, topk))

    seen = int((problem.high - problem.low).clamp_(min=0).sum())
    budget = share_of_memory() // 2
    for_each(
        pieces(problem.whole, budget, row_bytes + visible_bytes, tile),
        lambda: run,
        2 * heads * dim * seen,
    )
    return values, indices


def select_dense_in_blocks(
    problem: Problem,
    topk: int,
    fill: float,
    block_ids: Tensor,
    block_size: int,
    anchored: bool,
) -> tuple[Tensor, Tensor]:
    """As :func:`select_dense` for candidates that may well be the whole context."""
    positions = problem.k.shape[1]

    def visible(part: Part) -> Tensor:
        ids = part.of(block_ids)
        return in_blocks(ids, part.of(problem.low), positions, block_size, anchored)

    return select_dense(problem, topk, fill, visible=visible, visible_bytes=40 * positions)


def select_candidates(
    problem: Problem,
    topk: int,
    fill: float,
    block_ids: Tensor,
    block_size: int,
    anchored: bool,
) -> tuple[Tensor, Tensor]:
    """Values and positions [B, S, topk] over the candidate blocks, scoring only their columns."""
    batch, count = problem.q.shape[:2]
    positions = problem.k.shape[1]
    block_ids = block_ids.expand(batch, count, -1)
    width = block_ids.shape[2] * block_size
    if width >= 2 * positions:
        return select_dense_in_blocks(problem, topk, fill, block_ids, block_size, anchored)
    values = torch.empty(batch, count, topk, dtype=problem.dtype)
    indices = torch.empty(batch, count, topk, dtype=torch.int64)
    gathered = problem.mask is not None or problem.bias is not None
    row_bytes = width * (problem.dtype.itemsize + (20 if gathered else 0)) + 32 * topk

    def run(part: Part) -> None:
        some = problem.restrict(part)
        blocks, end = expand(
            part.of(block_ids),
            some.low,
            some.high,
            num_positions=positions,
            block_size=block_size,
            sparse_block=block_size,
            anchored=anchored,
        )
        if gathered:
            place = columns(
                blocks,
                some.low,
                num_positions=positions,
                sparse_block=block_size,
                anchored=anchored,
            )
            some = replace(
                some,
                mask=None if some.mask is None else some.mask.gather(-1, place),
                bias=None if some.bias is None else some.bias.gather(-1, place),
            )
        logits = sparse_logits(some, Candidates(blocks, end, block_size, anchored))
        found, column = _padded(*ranked(logits.flatten(0, 1), topk), topk)
        place = positions_of(
            column.view(part.batch, part.rows, topk),
            blocks,
            some.low,
            num_positions=positions,
            sparse_block=block_size,
            anchored=anchored,
        ).flatten(0, 1)
        fill_empty(found, place, positions, fill)
        part.of(values).copy_(found.view(part.batch, part.rows, topk))
        part.of(indices).copy_(place.view(part.batch, part.rows, topk))

    heads, dim = problem.q.shape[2:]
    for_each(
        pieces(problem.whole, share_of_memory() // 2, row_bytes),
        lambda: run,
        2 * heads * dim * batch * count * min(width, positions),
    )
    return values, indices


def block_maxima(problem: Problem, block_size: int, fill: float) -> tuple[Tensor, Observer]:
    """Best score of every block [B, S, blocks], filled while a selection runs.

    Positions that are hidden or missing count as ``fill``.
    """
    batch, count = problem.q.shape[:2]
    blocks = -(-problem.k.shape[1] // block_size)
    maxima = torch.full((batch, count, blocks), fill, dtype=problem.dtype)

    def per_block(tensor: Tensor, missing: float | bool) -> Tensor:
        tail = -tensor.shape[-1] % block_size
        whole = pad(tensor, (0, tail), value=missing) if tail else tensor
        return whole.unflatten(-1, (-1, block_size))

    def observe(part: Part, some: Problem, first: int, scores: Tensor) -> None:
        best = per_block(scores, NEG_INF).amax(-1)
        target = part.of(maxima)[..., first // block_size :][..., : best.shape[-1]]
        if fill == NEG_INF:
            target.copy_(best)
            return
        position = torch.arange(first, first + scores.shape[-1])
        shown = (position >= some.low[..., None]) & (position < some.high[..., None])
        if some.mask is not None:
            shown &= some.mask[..., first : first + scores.shape[-1]]
        whole = per_block(shown, False).all(-1)
        target.copy_(torch.where(whole, best, best.clamp(min=fill)))

    return maxima, observe
