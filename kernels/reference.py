"""Plain PyTorch meaning of the canonical ops: the oracle, and the ``reference`` provider.

``logit(t, s) = scale * key_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]) + bias[t, s]``,
the lightning indexer of DeepSeek-V3.2 and V4.1, computed in fp32 from the inputs' own values (in
fp64 when q, k or weights is fp64). A position is visible to a row when it lies in the row's range,
in its candidate blocks and under its mask. Every function works on any device, holds all scores at
once and prefers the obvious form to the fast one. Shapes and dtypes are those of ``schemas``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEG_INF = -math.inf


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype that scores are computed and returned in."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def fill_value(fill: float | None) -> float:
    """The value of a slot that found nothing: -inf unless given."""
    return NEG_INF if fill is None else fill


def row_range(
    row_start: Tensor | None, row_end: Tensor | None, positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Bounds [B|1, S|1] int64 of the half-open range of every row, clamped to [0, positions]."""
    if row_start is None:
        low = torch.zeros(1, 1, dtype=torch.int64, device=device)
    else:
        low = row_start.long().clamp(0, positions)
    if row_end is None:
        high = torch.full((1, 1), positions, dtype=torch.int64, device=device)
    else:
        high = row_end.long().clamp(0, positions)
    return low, high


def dense_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    scale: float,
    key_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """All scores [B, S, T], masked by nothing."""
    dtype = accumulator(q, k, weights)
    keys = k.to(dtype).expand(q.shape[0], -1, -1)
    product = torch.einsum("bshd,btd->bsht", q.to(dtype), keys).relu()
    scores = torch.einsum("bsht,bsh->bst", product, weights.to(dtype)) * scale
    if key_scale is not None:
        scores = scores * key_scale.to(dtype)[:, None, :]
    if bias is not None:
        scores = scores + bias.to(dtype)
    return scores


def in_blocks(
    block_ids: Tensor, low: Tensor, positions: int, block_size: int, anchored: bool
) -> Tensor:
    """Bool [B, S, T]: positions that lie in a candidate block of the row."""
    origin = low if anchored else torch.zeros_like(low)
    offset = torch.arange(positions, device=block_ids.device) - origin[..., None]
    blocks = -(-positions // block_size)
    ids = block_ids.long()
    ids = torch.where((ids < 0) | (ids >= blocks), blocks, ids)
    shape = torch.broadcast_shapes(ids.shape[:2], offset.shape[:2])
    flags = torch.zeros(*shape, blocks + 1, dtype=torch.bool, device=ids.device)
    flags.scatter_(-1, ids.expand(*shape, -1), True)
    flags[..., blocks] = False
    block = torch.div(offset, block_size, rounding_mode="floor")
    return flags.gather(-1, block.clamp(min=0).expand(*shape, -1)) & (block >= 0)


def visible_positions(
    shape: torch.Size,
    low: Tensor,
    high: Tensor,
    mask: Tensor | None,
    block_ids: Tensor | None = None,
    block_size: int = 0,
    anchored: bool = False,
) -> Tensor:
    """Bool [B, S, T]: range, mask and candidate blocks of every row together."""
    position = torch.arange(shape[-1], device=low.device)
    visible = (position >= low[..., None]) & (position < high[..., None])
    if mask is not None:
        visible = visible & mask
    if block_ids is not None:
        visible = visible & in_blocks(block_ids, low, shape[-1], block_size, anchored)
    return visible.expand(shape)


def rank(scores: Tensor, visible: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Best visible scores of every row: descending, NaN first, ties by position, -1 where none.

    A score of -inf counts as hidden, since nothing after the selection could tell them apart.
    """
    found = visible & (scores != NEG_INF)
    ranked = torch.where(found, scores, NEG_INF)
    values, order = ranked.sort(dim=-1, descending=True, stable=True)
    order = torch.where(found.gather(-1, order), order, -1)
    return values[..., :topk].contiguous(), order[..., :topk].contiguous()


def fill_empty(
    values: Tensor, indices: Tensor, positions: int, fill: float
) -> tuple[Tensor, Tensor]:
    """Gives slots of index -1 the value ``fill`` and hidden positions, largest first.

    A row with an empty slot has selected all that it sees, so every position it did not select is
    hidden from it.
    """
    selected = torch.zeros(
        *indices.shape[:2], positions + 1, dtype=torch.bool, device=values.device
    )
    selected.scatter_(-1, torch.where(indices < 0, positions, indices), True)
    position = torch.arange(positions, device=values.device).expand(*indices.shape[:2], -1)
    hidden = torch.where(selected[..., :positions], -1, position)
    hidden = hidden.sort(dim=-1, descending=True).values
    empty = indices < 0
    turn = (empty.cumsum(-1) - 1).clamp(min=0)
    return values.masked_fill(empty, fill), torch.where(empty, hidden.gather(-1, turn), indices)


def indexer_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
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
) -> tuple[Tensor, Tensor]:
    """The best ``topk`` visible positions of every row.

    Returns:
        values [B, S, topk] and indices [B, S, topk] int64.
    """
    scores = dense_scores(q, k, weights, scale, key_scale, bias)
    low, high = row_range(row_start, row_end, k.shape[1], q.device)
    visible = visible_positions(scores.shape, low, high, mask, block_ids, block_size, anchored)
    values, indices = rank(scores, visible, topk)
    return fill_empty(values, indices, k.shape[1], fill_value(fill))


def indexer_block_max(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    block_size: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Selection of a source layer, and the best visible score of every block.

    Returns:
        values and indices as :func:`indexer_select`, and block_max [B, S, ceil(T / block_size)]:
        the largest score, NaN if a visible one is NaN; positions that are hidden, or missing from
        the last block, count as ``fill``, as in a model that takes maxima of masked scores.
    """
    positions = k.shape[1]
    scores = dense_scores(q, k, weights, scale, key_scale, bias)
    low, high = row_range(row_start, row_end, positions, q.device)
    visible = visible_positions(scores.shape, low, high, mask)
    values, indices = fill_empty(*rank(scores, visible, topk), positions, fill_value(fill))
    blocks = -(-positions // block_size)
    tail = (0, blocks * block_size - positions)
    hidden = fill_value(fill)
    shown = torch.nn.functional.pad(torch.where(visible, scores, hidden), tail, value=hidden)
    if blocks == 0:
        return values, indices, scores.new_empty(*scores.shape[:2], 0)
    return values, indices, shown.unflatten(-1, (blocks, block_size)).amax(-1)


def pin_newest_block(
    block_max: Tensor, high: Tensor, block_size: int, pin_value: float | None
) -> Tensor:
    """Block scores with the block of position row_end - 1 set to ``pin_value`` (None: +inf)."""
    newest = torch.div(high - 1, block_size, rounding_mode="floor")[..., None]
    block = torch.arange(block_max.shape[-1], device=block_max.device)
    pin = math.inf if pin_value is None else pin_value
    return block_max.masked_fill(block == newest, pin)


def indexer_publish(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    num_blocks: int,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Selection of a source layer, and its best blocks.

    With ``pin_newest`` the block of position row_end - 1 scores ``pin_value``, inside the budget of
    ``num_blocks``; a row whose end is 0 has none.

    Returns:
        values and indices as :func:`indexer_select`, block_values [B, S, num_blocks] descending
        and block_indices [B, S, num_blocks] int64.
    """
    values, indices, block_max = indexer_block_max(
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
    )
    if pin_newest:
        _, high = row_range(row_start, row_end, k.shape[1], q.device)
        block_max = pin_newest_block(block_max, high, block_size, pin_value)
    best, order = block_max.sort(dim=-1, descending=True, stable=True)
    block_values = best[..., :num_blocks].contiguous()
    return values, indices, block_values, order[..., :num_blocks].contiguous()
