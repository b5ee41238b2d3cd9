"""Selection from candidate columns in the cheaper of two forms, chosen on the host by shape."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_indexer import indexer_select
from .triton_sparse import sparse_mqa_logits
from .triton_topk import topk_positions
from .validate import Size


def candidate_flags(blocks: Tensor, end: Tensor, positions: Size, sparse_block: int) -> Tensor:
    """Which positions are in a row's candidate blocks, bool [B, S, positions].

    Args:
        blocks: int32 [B|1, S|1, N] as ``candidate_expand`` gives them: the padding repeats the
            last block, so that all of a row's blocks are its candidates unless ``end`` is 0.
        end: int32 [B|1, S|1], valid columns of a row.
    """
    count = (positions + sparse_block - 1) // sparse_block
    lead = blocks.shape[:2]
    used = blocks.long().masked_fill((end == 0)[..., None], count)
    table = torch.zeros((*lead, count + 1), dtype=torch.bool, device=blocks.device)
    table = table.scatter_(-1, used, True)[..., :count]
    return table.repeat_interleave(sparse_block, dim=-1)[..., :positions]


def select_columns(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    topk: Size,
    sparse_block: int,
    dense_below: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Best candidate positions of every row: sparse logits, top-k and remap, or all densely.

    Args:
        q, k, weights, blocks, end: as ``dsa::sparse_mqa_logits`` takes them.
        dense_below: contexts of fewer positions are scored densely and masked.
        topk, fill, sorted, anchored: as ``dsa::topk`` and ``dsa::topk_remap`` take them.
        out: (values fp32, indices int64) to write into.
    """
    positions = k.shape[1]
    if positions < dense_below and not anchored:
        return indexer_select(
            q,
            k,
            weights,
            topk=topk,
            scale=scale,
            key_scale=key_scale,
            row_start=row_start,
            row_end=row_end,
            mask=candidate_flags(blocks, end, positions, sparse_block),
            fill=fill,
            sorted=sorted,
            out=out,
        )
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
        anchored=anchored,
    )
    return topk_positions(
        logits,
        end,
        blocks,
        row_start,
        topk=topk,
        num_positions=positions,
        sparse_block=sparse_block,
        anchored=anchored,
        fill=fill,
        sorted=sorted,
        out=out,
    )
