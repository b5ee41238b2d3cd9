"""Plain PyTorch meaning of the scorers of quantised keys: widen, then score as the others do.

A position is visible when it lies below the row's end and its page is in the cache. Scores follow
``reference``: fp32 from the exact values of what is stored, fp64 where q or weights is fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .key_cache_reference import find_pages, read_tokens
from .quantise import dequantise, dequantise_mxfp4
from .reference import NEG_INF, accumulator
from .reference_sparse import raw_columns, sparse_mqa_logits


def wide_queries(q: Tensor, q_scale: Tensor | None) -> Tensor:
    """Queries [B, S, H, D]: packed MXFP4 ones as fp32, others as they are."""
    return q if q_scale is None else dequantise_mxfp4(q, q_scale)


def lines_of_rows(q: Tensor, requests: Tensor | None) -> Tensor:
    """Line [B, S] of the block table for every row."""
    shape = q.shape[:2]
    if requests is None:
        return torch.arange(shape[0], device=q.device)[:, None].expand(shape)
    return requests.long().expand(shape)


def scores_at(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    lines: Tensor,
    position: Tensor,
    visible: Tensor,
    quant: str,
    scale: float,
) -> Tensor:
    """Scores [B, S, W] of positions [B, S, W], -inf where not visible or not in the cache."""
    dtype = accumulator(q, weights)
    page, token, found = find_pages(cache, block_table, lines[..., None], position)
    found = found & visible
    if 0 in cache.shape:
        return torch.full(position.shape, NEG_INF, dtype=dtype, device=q.device)
    keys = dequantise(*read_tokens(cache, page, token, found, quant), quant).to(dtype)
    product = torch.einsum("bshd,bswd->bshw", q.to(dtype), keys).relu()
    scores = torch.einsum("bshw,bsh->bsw", product, weights.to(dtype)) * scale
    return torch.where(found, scores, NEG_INF)


def row_limits(q: Tensor, row_end: Tensor | None, block_table: Tensor, page: int) -> Tensor:
    """Context length [B, S] of every row."""
    room = block_table.shape[1] * page
    if row_end is None:
        return torch.full(q.shape[:2], room, device=q.device)
    return row_end.long().expand(q.shape[:2]).clamp(0, room)


def paged_sparse_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    block_table: Tensor,
    *,
    sparse_block: int,
    quant: str = "fp8",
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    requests: Tensor | None = None,
    row_end: Tensor | None = None,
) -> Tensor:
    """Scores [B, S, W] of candidate columns; see ``serving_schemas``."""
    page = cache.shape[1]
    room = block_table.shape[1] * page
    high = row_limits(q, row_end, block_table, page)
    position = raw_columns(blocks, torch.zeros_like(high), room, sparse_block, False)
    column = torch.arange(position.shape[-1], device=q.device)
    visible = (column < end[..., None]) & (position < high[..., None])
    lines = lines_of_rows(q, requests)
    wide = wide_queries(q, q_scale)
    return scores_at(
        wide, cache, weights, block_table, lines, position, visible, quant, scale
    ).contiguous()


def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    row_end: Tensor,
    block_table: Tensor,
    *,
    num_positions: int,
    quant: str = "fp8",
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    requests: Tensor | None = None,
) -> Tensor:
    """Scores [B, S, num_positions] of all positions; see ``serving_schemas``."""
    high = row_limits(q, row_end, block_table, cache.shape[1])[..., None]
    position = torch.arange(num_positions, device=q.device).expand(*q.shape[:2], -1)
    lines = lines_of_rows(q, requests)
    wide = wide_queries(q, q_scale)
    return scores_at(
        wide, cache, weights, block_table, lines, position, position < high, quant, scale
    ).contiguous()


def mxfp4_sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    anchored: bool = False,
) -> Tensor:
    """``sparse_mqa_logits`` of packed keys; see ``serving_schemas``."""
    wide = wide_queries(q, q_scale)
    return sparse_mqa_logits(
        wide if wide.dtype == torch.float64 else wide.float(),
        dequantise_mxfp4(k, k_scale),
        weights,
        blocks,
        end,
        sparse_block=sparse_block,
        scale=scale,
        row_start=row_start,
        row_end=row_end,
        anchored=anchored,
    )
