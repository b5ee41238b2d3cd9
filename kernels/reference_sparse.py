"""Plain PyTorch meaning of the sparse chain: expand, score the columns, select, map back.

A *column* is a place in a row's compact candidate list, a *position* a place on the key axis; the
two are never mixed: columns are int32, positions int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import NEG_INF, accumulator, fill_empty, fill_value, rank, row_range


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: int,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Candidate ids as unique ascending sparse blocks that reach into the row's range.

    Returns:
        blocks [B, S, C * block_size / sparse_block] int32, the last one repeated as padding (0 if
        there is none), and end [B, S] int32. Only the last block can be partial, so the valid
        columns are those below ``end``; the first block may begin below the row's start, whose
        columns ``sparse_mqa_logits`` hides.
    """
    low, high = row_range(row_start, row_end, num_positions, block_ids.device)
    shape = torch.broadcast_shapes(block_ids.shape[:2], low.shape, high.shape)
    low, high = low.expand(shape)[..., None], high.expand(shape)[..., None]
    ratio = block_size // sparse_block
    origin = low if anchored else torch.zeros_like(low)
    total = -(-num_positions // sparse_block)
    ids = block_ids.long().expand(*shape, -1)
    ids = torch.where((ids < 0) | (ids > num_positions // block_size), -1, ids)
    sub = ids[..., None] * ratio + torch.arange(ratio, device=ids.device)
    sub = torch.where(ids[..., None] < 0, -1, sub).flatten(-2)
    start = origin + sub * sparse_block
    keep = (sub >= 0) & (start < high) & (start + sparse_block > low) & (low < high)
    sub = torch.where(keep, sub, total).sort(dim=-1).values
    repeat = torch.zeros_like(sub, dtype=torch.bool)
    repeat[..., 1:] = sub[..., 1:] == sub[..., :-1]
    sub = torch.where(repeat, total, sub).sort(dim=-1).values
    valid = sub < total
    count = valid.sum(-1, keepdim=True)
    width = sub.shape[-1]
    if width == 0:
        return sub.to(torch.int32), torch.zeros(shape, dtype=torch.int32, device=ids.device)
    last = sub.gather(-1, (count - 1).clamp(min=0))
    tail = (high - origin - last * sparse_block).clamp(1, sparse_block)
    end = torch.where(count > 0, (count - 1) * sparse_block + tail, 0).squeeze(-1)
    blocks = torch.where(valid, sub, last) + torch.div(origin, sparse_block, rounding_mode="floor")
    return torch.where(count > 0, blocks, 0).to(torch.int32), end.to(torch.int32)


def raw_columns(
    blocks: Tensor, low: Tensor, positions: int, sparse_block: int, anchored: bool
) -> Tensor:
    """Positions [B, S, W] of all columns, out of range where the block is."""
    shape = torch.broadcast_shapes(blocks.shape[:2], low.shape)
    inner = torch.arange(sparse_block, device=blocks.device)
    shift = low % sparse_block if anchored else torch.zeros_like(low)
    # Junk must not overflow: one block past either end is hidden all the same.
    ids = blocks.long().clamp(-1, positions // sparse_block + 1)
    start = ids * sparse_block + shift[..., None]
    return (start[..., None] + inner).flatten(-2).expand(*shape, -1)


def candidate_columns(
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
) -> Tensor:
    """Position of every column [B, S, W] int64, clamped into [0, num_positions - 1].

    Column c is position ``blocks[c // sparse_block] * sparse_block + c % sparse_block``, further
    right by ``row_start % sparse_block`` when anchored.
    """
    low, _ = row_range(row_start, None, num_positions, blocks.device)
    positions = raw_columns(blocks, low, num_positions, sparse_block, anchored)
    return positions.clamp(0, max(num_positions - 1, 0)).contiguous()


def sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    anchored: bool = False,
) -> Tensor:
    """Scores of the candidate columns [B, S, W]; -inf where hidden and from ``end`` on."""
    dtype = accumulator(q, k, weights)
    batch, rows, positions = q.shape[0], q.shape[1], k.shape[1]
    width = blocks.shape[2] * sparse_block
    low, high = row_range(row_start, row_end, positions, q.device)
    place = raw_columns(blocks, low, positions, sparse_block, anchored).expand(batch, rows, -1)
    visible = (place >= low[..., None]) & (place < high[..., None])
    visible = visible & (torch.arange(width, device=q.device) < end[..., None])
    if mask is not None:
        visible = visible & mask
    if positions == 0 or width == 0:
        return torch.full((batch, rows, width), NEG_INF, dtype=dtype, device=q.device)
    place = place.clamp(0, positions - 1)
    item = torch.arange(batch, device=q.device)[:, None, None]
    keys = k.to(dtype).expand(batch, -1, -1)[item, place]
    product = torch.einsum("bshd,bswd->bshw", q.to(dtype), keys).relu()
    scores = torch.einsum("bshw,bsh->bsw", product, weights.to(dtype)) * scale
    if key_scale is not None:
        scores = scores * key_scale.to(dtype).expand(batch, -1)[item, place]
    if bias is not None:
        scores = scores + bias.to(dtype)
    return torch.where(visible, scores, NEG_INF)


def topk(logits: Tensor, end: Tensor, *, topk: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Best ``topk`` columns below ``end``: values, and int32 columns, -1 where none was left."""
    scores = logits.to(accumulator(logits))
    visible = torch.arange(logits.shape[-1], device=logits.device) < end[..., None]
    values, columns = rank(scores, visible, topk)
    missing = (0, topk - values.shape[-1])
    values = torch.nn.functional.pad(values, missing, value=NEG_INF)
    return values, torch.nn.functional.pad(columns, missing, value=-1).to(torch.int32)


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Columns back to positions; slots that found nothing get ``fill`` and hidden positions."""
    batch, rows, _ = values.shape
    scores = values.to(accumulator(values))
    low, _ = row_range(row_start, None, num_positions, values.device)
    place = raw_columns(blocks, low, num_positions, sparse_block, anchored).expand(batch, rows, -1)
    if place.shape[-1] == 0:
        indices = torch.full_like(columns, -1, dtype=torch.int64)
    else:
        found = place.gather(-1, columns.long().clamp(0, place.shape[-1] - 1))
        indices = torch.where(columns < 0, -1, found.clamp(0, max(num_positions - 1, 0)))
    return fill_empty(scores, indices, num_positions, fill_value(fill))
