"""Selection from candidate columns in the cheaper of two forms, chosen on the host by shape."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_flags import BlockFlags, block_flags
from .triton_indexer import SCORE_BYTES, select_densely
from .triton_sparse import scorer_tiles, sparse_mqa_logits
from .triton_tiles import columns_for_maxima, maxima_groups
from .triton_topk import topk_positions
from .validate import Size

# Up to so many rows, both forms take what their launches take, and the dense one is the cheaper
# up to so many times the candidates' columns (on an H200, 1 row at 32,768 and 131,072 positions).
FEW_ROWS = 4
FEW_ROWS_RATIO = 2.25


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
    few_rows: int = FEW_ROWS,
    few_rows_ratio: float = FEW_ROWS_RATIO,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Best candidate positions of every row: sparse logits, top-k and remap, or all densely.

    Args:
        q, k, weights, blocks, end: as ``dsa::sparse_mqa_logits`` takes them.
        dense_below: contexts of fewer positions are scored densely and masked; 0: none is.
        few_rows, few_rows_ratio: calls of so few rows take the dense form for contexts of up to
            so many times the candidates' columns, too.
        topk, fill, sorted, anchored: as ``dsa::topk`` and ``dsa::topk_remap`` take them.
        out: (values fp32, indices int64) to write into.
    """
    positions = k.shape[1]
    rows, width = q.shape[0] * q.shape[1], blocks.shape[2] * sparse_block
    if dense_below > 0 and rows <= few_rows:
        dense_below = torch.sym_max(dense_below, int(few_rows_ratio * 64) * width // 64)
    if positions < dense_below and not anchored:
        flags = block_flags(blocks, end, positions, sparse_block)
        wide = BlockFlags(flags.words.expand(*q.shape[:2], -1), sparse_block)
        return select_densely(
            q,
            k,
            weights,
            topk,
            scale,
            key_scale,
            row_start,
            row_end,
            None,
            None,
            fill,
            sorted,
            out,
            SCORE_BYTES,
            flags=wide,
        )
    tile = scorer_tiles(q, k).tile
    run = columns_for_maxima(rows, width, topk, tile, q.device.index)
    maxima = None
    if run is not None:
        groups = maxima_groups(width, run, tile)
        maxima = q.new_empty((rows, groups), dtype=torch.float32)
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
        run=run,
        maxima=maxima,
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
        maxima=maxima,
    )
