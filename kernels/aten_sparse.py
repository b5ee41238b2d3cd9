"""The sparse chain in functional ATen: expand, score the columns, select, map back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .aten_rank import fill_hidden, ranked
from .aten_rows import by_rows, rows_of, surely, upper_bound
from .reference import NEG_INF, accumulator, fill_value, row_range
from .reference_sparse import candidate_columns as candidate_columns
from .reference_sparse import raw_columns

Size = Any
_GATHERED_BYTES = 64 << 20
_MOST_ROWS = 8


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: Size,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    low, high = row_range(row_start, row_end, num_positions, block_ids.device)
    shape = torch.broadcast_shapes(block_ids.shape[:2], low.shape, high.shape)
    low, high = low.expand(shape)[..., None], high.expand(shape)[..., None]
    ratio = block_size // sparse_block
    origin = low if anchored else torch.zeros_like(low)
    total = (num_positions + sparse_block - 1) // sparse_block
    ids = block_ids.long().expand(*shape, -1)
    # Junk must not overflow.
    ids = torch.where((ids < 0) | (ids > num_positions // block_size), -1, ids)
    sub = ids[..., None] * ratio + torch.arange(ratio, device=ids.device)
    sub = torch.where(ids[..., None] < 0, -1, sub).flatten(-2)
    start = origin + sub * sparse_block
    keep = (sub >= 0) & (start < high) & (start + sparse_block > low) & (low < high)
    sub = torch.where(keep, sub, total).sort(dim=-1).values
    before = pad(sub, (1, 0), value=-1).narrow(-1, 0, sub.shape[-1])
    sub = torch.where(sub == before, total, sub).sort(dim=-1).values
    valid = sub < total
    count = valid.long().sum(-1, keepdim=True)
    last = sub.gather(-1, (count - 1).clamp(min=0))
    tail = (high - origin - last * sparse_block).clamp(1, sparse_block)
    end = torch.where(count > 0, (count - 1) * sparse_block + tail, 0).squeeze(-1)
    blocks = torch.where(valid, sub, last) + torch.div(origin, sparse_block, rounding_mode="floor")
    return torch.where(count > 0, blocks, 0).to(torch.int32), end.to(torch.int32)


def _rows_at_once(width: Size, batch: Size, row_bytes: int) -> int:
    """Rows whose columns, at ``row_bytes`` each, fit the budget."""
    columns, items = upper_bound(width), upper_bound(batch)
    if columns is None or items is None:
        return 1
    return max(1, min(_MOST_ROWS, _GATHERED_BYTES // max(1, items * columns * row_bytes)))


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
    sizes: Sequence[Size] = (),
) -> Tensor:
    dtype = accumulator(q, k, weights)
    batch, rows, heads, dim = q.shape
    width = blocks.shape[2] * sparse_block
    low, high = row_range(row_start, row_end, k.shape[1], q.device)
    low, high = low.expand(batch, rows), high.expand(batch, rows)
    blocks, end = blocks.expand(batch, rows, -1), end.expand(batch, rows)
    optional = {"key_scale": key_scale, "mask": mask, "bias": bias}
    names = [name for name, tensor in optional.items() if tensor is not None]
    more = [tensor for tensor in optional.values() if tensor is not None]

    def step(row: Tensor, *args: Any) -> tuple[Tensor, ...]:
        q, k, weights, blocks, end, low, high = args[:7]
        found = dict(zip(names, args[7 : 7 + len(names)], strict=True))
        batch = q.shape[0]
        low, high = low[:, row], high[:, row]
        place = raw_columns(blocks[:, row], low, k.shape[1], sparse_block, anchored)
        width = place.shape[-1]
        column = torch.arange(width, device=q.device)
        visible = (place >= low[..., None]) & (place < high[..., None])
        visible = visible & (column < end[:, row, None])
        place = place.clamp(0, k.shape[1] - 1)
        count = row.shape[0]
        if k.shape[0] == 1:
            keys = k[0].index_select(0, place.reshape(-1))
        else:
            item = torch.arange(batch, device=q.device)[:, None, None]
            keys = k[item, place]
        keys = keys.to(dtype).reshape(batch * count, width, dim)
        query = q[:, row].to(dtype).reshape(batch * count, heads, dim)
        product = torch.bmm(keys, query.transpose(1, 2)).relu()
        weighed = weights[:, row].to(dtype).reshape(batch * count, heads, 1)
        scores = torch.bmm(product, weighed).reshape(batch, count, width) * scale
        if "key_scale" in found:
            factor = found["key_scale"].to(dtype).expand(batch, -1)[:, None, :]
            scores = scores * factor.expand(-1, count, -1).gather(-1, place)
        if "bias" in found:
            scores = scores + rows_of(found["bias"], row).to(dtype)
        if "mask" in found:
            visible = visible & rows_of(found["mask"], row)
        return (torch.where(visible, scores, NEG_INF),)

    chunk = _rows_at_once(width, batch, (heads + dim) * dtype.itemsize)
    tensors = [q, k, weights, blocks, end, low, high, *more]
    return by_rows(step, tensors, [], batch, rows, chunk, sizes)[0]


def topk(
    logits: Tensor, end: Tensor, *, topk: Size, sizes: Sequence[Size] = ()
) -> tuple[Tensor, Tensor]:
    dtype = accumulator(logits)
    batch, rows, width = logits.shape

    enough = surely(topk <= width)

    def step(row: Tensor, logits: Tensor, end: Tensor, topk: Size) -> tuple[Tensor, ...]:
        scores = logits[:, row].to(dtype)
        column = torch.arange(scores.shape[-1], device=logits.device)
        scores = torch.where(column < end[:, row, None], scores, NEG_INF)
        if not enough:
            scores = pad(scores, (0, topk), value=NEG_INF)
        values, columns = ranked(scores, topk)
        return values, columns.to(torch.int32)

    chunk = _rows_at_once(width, batch, 24)
    values, columns = by_rows(
        step, [logits, end.expand(batch, rows)], [topk], batch, rows, chunk, sizes
    )
    return values, columns


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, rows, _ = values.shape
    low, _ = row_range(row_start, None, num_positions, values.device)
    chosen = columns.long()
    block = torch.div(chosen.clamp(min=0), sparse_block, rounding_mode="floor")
    block = block.clamp(max=blocks.shape[2] - 1)
    start = blocks.expand(batch, rows, -1).gather(-1, block).long()
    start = start.clamp(-1, num_positions // sparse_block + 1)
    places = start * sparse_block + chosen % sparse_block
    if anchored:
        places = places + (low % sparse_block)[..., None]
    places = torch.where(chosen < 0, -1, places.clamp(0, num_positions - 1))
    scores = values.to(accumulator(values))
    return fill_hidden(scores, places, num_positions, fill_value(fill))
