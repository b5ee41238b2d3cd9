"""Exact top-k on the CPU whose ties fall to the lower column, and the filling of empty slots."""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_plan import Part, pieces, rows_within, share_of_memory
from .cpu_threads import for_each
from .reference import NEG_INF, accumulator

_GROUP = 8
_GROUPED_WIDTH = 3 * _GROUP
_RANKING = 500  # what ranking one score costs, in operations of a product


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Equality under the order of a top-k, where all NaNs are one value above +inf."""
    return (a == b) | (a.isnan() & b.isnan())


def _lowest_of_tie(scores: Tensor, values: Tensor, order: Tensor) -> Tensor:
    """Replaces the columns that share the last kept value by the lowest columns that have it."""
    cut = values[:, -1:]
    tied = _equal(values, cut)
    need = tied.sum(-1, keepdim=True)
    equal = _equal(scores, cut)
    keep = equal & (equal.cumsum(-1, dtype=torch.int32) <= need)
    # Row-major on both sides: the n-th tied slot of a row gets its n-th lowest tied column.
    return order.masked_scatter(tied, keep.nonzero()[:, 1])


def _order_ties(values: Tensor, order: Tensor) -> Tensor:
    """Sorts the columns of equal values upwards; values are descending already."""
    order, by_column = order.sort(dim=-1)
    shuffled = values.gather(-1, by_column)
    return order.gather(-1, shuffled.sort(dim=-1, descending=True, stable=True).indices)


def _settle_ties(scores: Tensor, best: Tensor, order: Tensor, found: Tensor) -> None:
    """Makes ties fall to the lower column, in place in ``order`` [R, k].

    Args:
        best: [R, k] values descending, or [R, k + 1] where the rows are that long.
        found: [R, k], slots whose column matters.
    """
    kept, width = order.shape[1], scores.shape[1]
    tied = _equal(best[:, 1:], best[:, :-1])
    if best.shape[1] > kept:
        rows = (tied[:, -1] & found[:, -1]).nonzero()[:, 0]
        step = rows_within(share_of_memory() // 4, width * 16)
        for some in rows.split(step):
            order[some] = _lowest_of_tie(scores[some], best[some, :kept], order[some])
    rows = (tied[:, : kept - 1] & found[:, 1:]).any(-1).nonzero()[:, 0]
    if rows.shape[0]:
        order[rows] = _order_ties(best[rows, :kept], order[rows])


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best values of every row, descending, and one choice of their columns.

    The best values of a row lie in the groups of columns with the best maxima: as many groups as
    values wanted are enough. Of equal maxima at the cut any will do, since every group taken
    brings one value that is no worse.
    """
    rows, width = scores.shape
    if width < _GROUPED_WIDTH * count:
        return torch.topk(scores, count, dim=-1)
    groups = width // _GROUP
    maxima = scores[:, : groups * _GROUP].view(rows, _GROUP, groups).amax(1)
    column = torch.topk(maxima, count, dim=-1, sorted=False).indices
    column = (column[:, None] + torch.arange(_GROUP)[:, None] * groups).flatten(1)
    if groups * _GROUP < width:
        tail = torch.arange(groups * _GROUP, width).expand(rows, -1)
        column = torch.cat((column, tail), dim=1)
    values, order = torch.topk(scores.gather(1, column), count, dim=-1)
    return values, column.gather(1, order)


def ranked(scores: Tensor, topk: int, *, keep_all: bool = False) -> tuple[Tensor, Tensor]:
    """Best columns of [R, W] scores: descending, NaN first, ties by column, -1 for -inf.

    Args:
        keep_all: -inf is a score like any other and keeps its column.

    Returns:
        values [R, min(topk, W)] and columns int64 of the same shape.
    """
    width = scores.shape[-1]
    kept = min(topk, width)
    if kept == 0 or scores.shape[0] == 0:
        shape = (scores.shape[0], kept)
        return scores.new_empty(shape), torch.empty(shape, dtype=torch.int64)
    # One more than asked for shows whether the cut falls inside a tie.
    more = min(kept + 1, width)
    step = rows_within(share_of_memory() // 4, 16 * _GROUP * more)
    best = [_best(some, more) for some in scores.split(step)]
    values, order = (torch.cat(x) if len(best) > 1 else x[0] for x in zip(*best, strict=True))
    order = order[:, :kept].contiguous()
    kept_values = values[:, :kept].contiguous()
    found = torch.ones_like(order, dtype=torch.bool) if keep_all else kept_values != NEG_INF
    if not bool((values[:, :-1] > values[:, 1:]).all()):
        _settle_ties(scores, values, order, found)
    return kept_values, order.masked_fill_(~found, -1)


def best_columns(logits: Tensor, end: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Values [B, S, topk] and columns int32 of the best logits below ``end`` [B, S]."""
    batch, count, width = logits.shape
    dtype = accumulator(logits)
    values = torch.full((batch, count, topk), NEG_INF, dtype=dtype)
    columns = torch.full((batch, count, topk), -1, dtype=torch.int32)
    kept = min(topk, width)
    row_bytes = 24 * kept + (0 if logits.dtype == dtype else width * dtype.itemsize)

    def rank(part: Part) -> None:
        scores = part.of(logits).to(dtype).flatten(0, 1)
        stop = part.of(end).reshape(-1, 1)
        found, order = ranked(scores, topk)
        # Columns past the end are -inf when they come from the scorer: look before masking.
        beyond = (order >= stop).any(-1).nonzero()[:, 0]
        for rows in beyond.split(rows_within(share_of_memory() // 4, 8 * width)):
            hidden = torch.arange(width) >= stop[rows]
            found[rows], order[rows] = ranked(scores[rows].masked_fill_(hidden, NEG_INF), topk)
        part.of(values)[..., :kept] = found.view(part.batch, part.rows, kept)
        part.of(columns)[..., :kept] = order.view(part.batch, part.rows, kept)

    whole = Part(0, batch, 0, count)
    for_each(
        pieces(whole, share_of_memory() // 2, row_bytes),
        lambda: rank,
        _RANKING * logits.numel(),
    )
    return values, columns


def fill_empty(values: Tensor, indices: Tensor, positions: int, fill: float) -> None:
    """Gives slots of index -1 the value ``fill`` and hidden positions, largest first, in place.

    A row with m empty slots of k sees k - m positions only, so the last k positions of the context
    hold m hidden ones at least: nothing else is looked at.

    Args:
        values: [R, k]; indices: [R, k] int64 with k <= positions.
    """
    topk = indices.shape[-1]
    empty = indices < 0
    rows = empty.any(-1).nonzero()[:, 0]
    if rows.shape[0] == 0:
        return
    values.masked_fill_(empty, fill)
    some, empty = indices[rows], empty[rows]
    backwards = positions - 1 - some
    outside = empty | (backwards >= topk)
    hidden = torch.ones(some.shape[0], topk + 1, dtype=torch.bool)
    hidden.scatter_(-1, backwards.masked_fill(outside, topk), False)
    count = hidden[:, :topk].cumsum(-1)
    turn = empty.cumsum(-1)
    place = torch.searchsorted(count, turn)
    indices[rows] = torch.where(empty, positions - 1 - place, some)
