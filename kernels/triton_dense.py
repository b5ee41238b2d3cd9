"""How indexer scores of all positions are launched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .triton_dense_scores import dense_scores
from .triton_flags import BlockFlags
from .triton_sparse import _TYPES, check_operands, padded, product_dtype
from .triton_tiles import DenseTiles, TileMaxima, choose_dense_tiles, group_rows
from .triton_tools import by_row, power_of_two, shared_memory, wrap_triton


def _launch_tiles(q: Tensor, k: Tensor) -> DenseTiles:
    dtype = product_dtype(q.dtype, k.dtype)
    heads, dim = padded(q.shape[2], q.shape[3])
    return choose_dense_tiles(heads, dim, dtype, shared_memory(q.device.index), q.shape[1])


def tile_maxima(q: Tensor, k: Tensor) -> TileMaxima | None:
    """What :func:`score_rows` keeps of these operands' scores, if each group has several."""
    tiles = _launch_tiles(q, k)
    share = 8 * tiles.warps
    if tiles.tile < 4 * share:
        return None
    return TileMaxima(tiles.tile, share, (k.shape[1] + tiles.tile - 1) // tiles.tile * share)


def score_rows(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    scale: float,
    key_scale: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    flags: BlockFlags | None = None,
    maxima: Tensor | None = None,
    tiles: DenseTiles | None = None,
    group: int | None = None,
) -> None:
    """Writes scores [B, S, T] of the positions that rows see into ``out`` [B, S, >= T] fp32.

    Masked positions, and those of blocks without a flag, get -inf. Positions outside a row's range
    hold anything.

    Args:
        q, k, weights, key_scale, bias: as ``sparse_mqa_logits`` of this provider takes them.
        flags: blocks that a row may select from; None: all.
        maxima: fp32 [B * S, whole], see :func:`tile_maxima`, to write the largest scores of groups
            of a row's positions into; those of tiles beyond what a row sees hold anything, too.
        tiles, group: launch parameters, for measurements.
    """
    check_operands("indexer_select", q, k, weights, key_scale, bias)
    batch, rows, heads, dim = q.shape
    positions = k.shape[1]
    dtype = product_dtype(q.dtype, k.dtype)
    padded_heads, padded_dim = padded(heads, dim)
    tiles = tiles or _launch_tiles(q, k)
    tile = tiles.tile
    group = group or group_rows(batch * rows, positions, tile, q.device.index)
    keys, k_b, _ = by_row(k[:, None], batch, rows, q)
    starts, starts_b, starts_s = by_row(row_start, batch, rows, q)
    ends, ends_b, ends_s = by_row(row_end, batch, rows, q)
    key_scales, scale_b, _ = by_row(
        None if key_scale is None else key_scale[:, None], batch, rows, weights
    )
    masks, mask_b, mask_s = by_row(mask, batch, rows, q)
    biases, bias_b, bias_s = by_row(bias, batch, rows, weights)
    listed, flags_b, flags_s = by_row(None if flags is None else flags.words, batch, rows, q)
    grid = ((positions + tile - 1) // tile, (rows + group - 1) // group, batch)
    wrap_triton(dense_scores)[grid](
        q,
        keys,
        weights,
        starts,
        ends,
        key_scales,
        masks.view(torch.int8) if mask is not None else masks,
        listed,
        biases,
        q if maxima is None else maxima,
        out,
        rows,
        heads,
        dim,
        positions,
        group,
        scale,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        q.stride(3),
        k_b,
        k.stride(1),
        k.stride(2),
        weights.stride(0),
        weights.stride(1),
        weights.stride(2),
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        scale_b,
        0 if key_scale is None else key_scale.stride(1),
        mask_b,
        mask_s,
        0 if mask is None else mask.stride(2),
        flags_b,
        flags_s,
        bias_b,
        bias_s,
        0 if bias is None else bias.stride(2),
        0 if maxima is None else maxima.stride(0),
        out.stride(0),
        out.stride(1),
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        HAS_SCALE=key_scale is not None,
        HAS_MASK=mask is not None,
        FLAGS=0 if flags is None else flags.size,
        HAS_BIAS=bias is not None,
        HAS_MAXIMA=maxima is not None,
        HEADS=padded_heads,
        PADDED_HEADS=not (isinstance(heads, int) and heads == padded_heads),
        DIM=padded_dim,
        PADDED_DIM=not (isinstance(dim, int) and dim == padded_dim),
        TILE=tile,
        GROUP=power_of_two(group),
        PAIR=tiles.pair,
        EVEN=statically_known_true(rows >= tiles.pair),
        WARPS=tiles.warps,
        TYPE=_TYPES[dtype],
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
