"""Whole indexers on Triton kernels: scores of a tile of rows, their selection, block maxima."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .triton_columns import candidate_columns
from .triton_dense import score_rows, tile_maxima
from .triton_expand import candidate_expand
from .triton_flags import BlockFlags
from .triton_groups import group_maxima
from .triton_maxima import block_maxima
from .triton_sparse import sparse_mqa_logits
from .triton_split import groups_before
from .triton_tools import result
from .triton_topk import Mapping, select_rows, topk_positions
from .validate import Size

SCORE_BYTES = 512 << 20
"""What the scores of one tile of rows may take, at least one row; their maxima a quarter more."""

Observer = Callable[[Tensor, slice, slice], None]


def _tiles(batch: Size, rows: Size, positions: Size, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and rows whose scores fit the budget; one of all where sizes are symbolic."""
    if not all(isinstance(size, int) for size in (batch, rows, positions)):
        yield slice(None), slice(None)
        return
    fit = max(1, budget // (4 * max(positions, 1)))
    if batch * rows <= fit:
        yield slice(None), slice(None)
        return
    # Equal tiles, so that one buffer serves all of them.
    count = -(-rows // fit)
    step = -(-rows // count)
    for item in range(batch):
        for first in range(0, rows, step):
            yield slice(item, item + 1), slice(first, min(first + step, rows))


def _part(tensor: Tensor | None, items: slice, rows: slice, last: bool = True) -> Tensor | None:
    """The rows of an argument [B|1, S|1, ...] that belong to a tile."""
    if tensor is None or (items == slice(None) and rows == slice(None)):
        return tensor
    if tensor.shape[0] != 1:
        tensor = tensor[items]
    return tensor[:, rows] if last and tensor.shape[1] != 1 else tensor


def select_densely(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: Size,
    scale: float,
    key_scale: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    fill: float | None,
    sorted: bool,
    out: tuple[Tensor, Tensor] | None,
    budget: int,
    observe: Observer | None = None,
    flags: BlockFlags | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense selection; ``observe(scores, items, rows)`` sees the scores of every tile."""
    batch, rows, positions = q.shape[0], q.shape[1], k.shape[1]
    given = (None, None) if out is None else out
    values = result(given[0], "indexer_select", q, (batch, rows, topk), torch.float32)
    indices = result(given[1], "indexer_select", q, (batch, rows, topk), torch.int64)
    room: Tensor | None = None
    fine_room: Tensor | None = None
    padded = (positions + 15) // 16 * 16
    for items, some in _tiles(batch, rows, positions, budget):
        own_q = q[items, some]
        shape = (own_q.shape[0], own_q.shape[1], padded)
        if room is None:
            room = q.new_empty(shape, dtype=torch.float32)
        scores = room if items == slice(None) else room[:, : shape[1]]
        count = shape[0] * shape[1]
        groups = groups_before(count, positions, topk, q.device.index)
        # Where there are flags, keeping maxima costs more than the read that it saves.
        kept = None if groups is None or flags is not None else tile_maxima(own_q, k)
        fine = maxima = None
        if kept is not None:
            if fine_room is None:
                fine_room = q.new_empty((count, kept.whole), dtype=torch.float32)
            fine = fine_room[:count, : kept.whole]
        start, end = _part(row_start, items, some), _part(row_end, items, some)
        if own_q.shape[0] != 0 and own_q.shape[1] != 0 and positions != 0:
            score_rows(
                own_q,
                k if k.shape[0] == 1 else k[items],
                weights[items, some],
                scores,
                scale=scale,
                key_scale=_part(key_scale, items, some, last=False),
                row_start=start,
                row_end=end,
                mask=_part(mask, items, some),
                bias=_part(bias, items, some),
                flags=flags and BlockFlags(flags.words[items, some], flags.size),
                maxima=fine,
            )
        if groups is not None and fine is not None:
            fine = fine.unflatten(0, shape[:2])
            maxima = group_maxima(fine, groups, start, end, positions=positions, kept=kept)
        select_rows(
            "indexer_select",
            scores[..., :positions],
            topk=topk,
            ends=end,
            starts=start,
            sorted=sorted,
            mapping=Mapping(positions, fill=fill),
            maxima=maxima,
            out=(values[items, some], indices[items, some]),
        )
        if observe is not None:
            observe(scores, items, some)
    return values, indices


def _select_candidates(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    block_ids: Tensor,
    block_size: int,
    anchored: bool,
    topk: Size,
    scale: float,
    key_scale: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    fill: float | None,
    sorted: bool,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    sparse_block = next((n for n in (16, 8) if block_size % n == 0), block_size)
    shared: dict[str, Any] = {
        "num_positions": k.shape[1],
        "sparse_block": sparse_block,
        "anchored": anchored,
    }
    blocks, end = candidate_expand(block_ids, row_start, row_end, block_size=block_size, **shared)
    if mask is not None or bias is not None:
        columns = candidate_columns(blocks, row_start, **shared)
        columns = columns.expand(q.shape[0], q.shape[1], -1)
        wide = (q.shape[0], q.shape[1], k.shape[1])
        if k.shape[1] != 0:
            mask = None if mask is None else mask.expand(wide).gather(-1, columns)
            bias = None if bias is None else bias.expand(wide).gather(-1, columns)
    logits = sparse_mqa_logits(
        q,
        k,
        weights,
        blocks,
        end,
        sparse_block=sparse_block,
        scale=scale,
        key_scale=key_scale,
        row_start=row_start,
        row_end=row_end,
        mask=mask,
        bias=bias,
        anchored=anchored,
    )
    return topk_positions(
        logits, end, blocks, row_start, topk=topk, fill=fill, sorted=sorted, out=out, **shared
    )


def indexer_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_ids: Tensor | None = None,
    block_size: int = 0,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    budget: int = SCORE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Best positions of every row; see ``dsa::indexer_select``.

    Args:
        q, k, weights, key_scale, bias: as ``sparse_mqa_logits`` of this provider takes them.
        topk: at most 4,096.
        out: (values fp32, indices int64) to write into.
        budget: bytes that the scores of one tile of rows may take; used when sizes are known.
    """
    rest = (topk, scale, key_scale, row_start, row_end, mask, bias)
    if block_ids is None:
        return select_densely(q, k, weights, *rest, fill, sorted, out, budget)
    return _select_candidates(
        q, k, weights, block_ids, block_size, anchored, *rest, fill, sorted, out
    )


def indexer_block_max(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
    block_size: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
    pin: float | None = None,
    budget: int = SCORE_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Selection and block maxima [B, S, ceil(T / block_size)] fp32; see ``dsa::indexer_block_max``.

    Args:
        pin: value to give to the block of position row_end - 1.
    """
    batch, rows, positions = q.shape[0], q.shape[1], k.shape[1]
    shape = (batch, rows, (positions + block_size - 1) // block_size)
    maxima = result(None if out is None else out[2], "indexer_block_max", q, shape, torch.float32)

    def observe(scores: Tensor, items: slice, some: slice) -> None:
        mine = maxima[items, some]
        if isinstance(mine.numel(), int) and mine.numel() == 0:
            return
        block_maxima(
            scores,
            mine,
            positions=positions,
            block_size=block_size,
            row_start=_part(row_start, items, some),
            row_end=_part(row_end, items, some),
            mask=_part(mask, items, some),
            fill=fill,
            pin=pin,
        )

    rest = (topk, scale, key_scale, row_start, row_end, mask, bias, fill, sorted)
    picked = None if out is None else out[:2]
    values, indices = select_densely(q, k, weights, *rest, picked, budget, observe)
    return values, indices, maxima


def indexer_publish(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
    num_blocks: Size,
    block_size: int,
    pin_newest: bool = True,
    pin_value: float | None = None,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    budget: int = SCORE_BYTES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Selection of a source layer and its best blocks; see ``dsa::indexer_publish``."""
    pin = float("inf") if pin_value is None else pin_value
    values, indices, maxima = indexer_block_max(
        q,
        k,
        weights,
        topk=topk,
        block_size=block_size,
        scale=scale,
        key_scale=key_scale,
        row_start=row_start,
        row_end=row_end,
        mask=mask,
        bias=bias,
        fill=fill,
        sorted=sorted,
        out=None if out is None else (*out[:2], None),
        pin=pin if pin_newest else None,
        budget=budget,
    )
    block_values, block_indices = select_rows(
        "indexer_publish",
        maxima,
        topk=num_blocks,
        ends=None,
        mapping=Mapping(maxima.shape[2]),
        keep_all=True,
        out=None if out is None else out[2:],
    )
    return values, indices, block_values, block_indices
