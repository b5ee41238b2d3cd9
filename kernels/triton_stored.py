"""How the scorer of quantised keys is launched: dtypes, tile sizes, strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .quantise import FP8, GROUP
from .triton_paged import stored_kernel
from .triton_sparse import (
    MAX_DIM,
    MAX_HEADS,
    MAX_POSITIONS,
    NUMBERS,
    OPERANDS,
    Tiles,
    choose_tiles,
    columns_a_program,
    product_dtype,
)
from .triton_tiles import equal_parts
from .triton_tools import (
    at_most,
    bound,
    by_row,
    capability,
    interpreted,
    like_hopper,
    power_of_two,
    processors,
    require,
    result,
    shared_memory,
    wrap_triton,
)
from .validate import Size

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    FP8: tl.float8e4nv,
}


class Keys(NamedTuple):
    """Stored keys as the kernel reads them, all in bytes.

    Attributes:
        values, scales: uint8; a cache is both, with its scales ``offset`` bytes into each page.
        value_strides, scale_strides: between batch items, pages and tokens.
        page: tokens of a page; None where keys are in one piece.
    """

    values: Tensor
    scales: Tensor
    value_strides: tuple[Size, Size, Size]
    scale_strides: tuple[Size, Size, Size]
    offset: Size
    pages: Size
    page: int | None


def mxfp4_dtype(q: torch.dtype) -> torch.dtype:
    """What MXFP4 keys are widened to for a product with queries of dtype ``q``, exactly."""
    if interpreted() or q in (torch.float32, torch.float16):
        return torch.float32
    return torch.bfloat16


def fp8_products(index: int | None) -> bool:
    """Whether a GPU multiplies fp8 numbers: those from sm_89 on."""
    return not torch.cuda.is_available() or capability(index) >= (8, 9)


def _read_as_words(keys: Keys) -> bool:
    """Whether the four scales of every key are an aligned word of memory."""
    steps = (*keys.scale_strides, keys.offset, keys.scales.storage_offset())
    return all(statically_known_true(step % 4 == 0) for step in steps)


def narrow_type(q: Tensor, keys: Keys, dim: Size) -> Any:
    """What queries are widened to where MXFP4 keys become e5m2; None where those become bf16.

    8-bit products take half the instructions. Those of Hopper add in about 22 bits, as they do for
    fp8 keys.
    """
    if interpreted() or not fp8_products(q.device.index):
        return None
    if not statically_known_true(dim == 128) or not _read_as_words(keys):
        return None
    return {FP8: tl.float8e4nv, torch.uint8: tl.float8e5}.get(q.dtype)


def check_fp8(op: str, device: torch.device) -> None:
    """Raises where fp8 operands have no instructions.

    Raises:
        TypeError: a GPU older than compute capability 8.9.
    """
    if not interpreted() and torch.cuda.is_available() and capability(device.index) < (8, 9):
        raise TypeError(
            f"{op}: float8_e4m3fn needs compute capability 8.9 or newer; "
            "MXFP4 keys with bf16 or packed queries need no more than 8.0"
        )


def operands_by_lane(index: int | None) -> bool:
    """Whether matrix instructions take their first operand from registers, lane by lane.

    Those of sm_100 and its kin read it from memory of their own.
    """
    return not torch.cuda.is_available() or capability(index)[0] not in (10, 11)


def mxfp4_tiles(heads: int, dim: int, dtype: torch.dtype, memory: int, deep: bool = False) -> Tiles:
    """Tile sizes for padded ``heads`` and ``dim``.

    Args:
        deep: keys become e5m2, on a GPU where a third stage costs no program.
    """
    if dtype == torch.float32:
        return Tiles(32 if heads * dim <= 4096 else 16, 4, 1)
    tile = 128 if heads <= 64 and dim <= 128 else 64
    while (tile + heads) * dim * 2 + 2 * tile * dim > memory - 8192 and tile > 32:
        tile //= 2
    return Tiles(tile, 4, 3 if deep else 2)


def stored_columns(rows: Size, width: Size, tile: int, device: int | None, most: int) -> Size:
    """Columns that one program scores: where that fills the GPU once, all programs at a time.

    Args:
        most: tiles of such a program.
    """
    tiles = (width + tile - 1) // tile
    at_once = 4 * processors(device)
    if isinstance(rows * tiles, int) and 8 * at_once < rows * tiles <= most * at_once:
        return equal_parts(tiles, -(-rows * tiles // at_once)) * tile
    return columns_a_program(rows, width, tile, device)


def pages_of(cache: Tensor, quant: str, dim: Size) -> Keys:
    """The keys of a cache uint8 [pages, page, bytes of a token]."""
    page, stride = int(cache.shape[1]), cache.stride(0)
    size = dim if quant == "fp8" else dim // 2
    scale_size = 4 if quant == "fp8" else dim // GROUP
    strides = ((0, stride, size), (0, stride, scale_size))
    return Keys(cache, cache, *strides, page * size, cache.shape[0], page)


def launch(
    op: str,
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    keys: Keys,
    dim: Size,
    positions: Size,
    width: Size,
    *,
    mxfp4: bool,
    scale: float,
    end: Tensor,
    blocks: Tensor | None = None,
    sparse_block: int = 1,
    block_table: Tensor | None = None,
    requests: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    anchored: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
) -> Tensor:
    require(op, "q", q, (*OPERANDS, torch.uint8))
    require(op, "weights", weights, NUMBERS)
    batch, rows, heads = q.shape[:3]
    at_most(op, "the number of heads", heads, MAX_HEADS)
    at_most(op, "the head dim", dim, MAX_DIM)
    at_most(op, "the number of positions", positions, MAX_POSITIONS)
    if not mxfp4 or q.dtype == FP8:
        check_fp8(op, q.device)
    out = result(out, op, q, (batch, rows, width), out_dtype)
    if isinstance(out.numel(), int) and out.numel() == 0:
        return out
    nothing = (keys.values, q) if block_table is None else (keys.values, q, block_table)
    if any(isinstance(t.numel(), int) and t.numel() == 0 for t in nothing):
        return out.fill_(float("-inf"))
    given = torch.bfloat16 if q.dtype == torch.uint8 else q.dtype
    dtype = mxfp4_dtype(given) if mxfp4 else product_dtype(given, FP8)
    padded_heads = power_of_two(bound(heads, MAX_HEADS), 16)
    padded_dim = power_of_two(bound(dim, MAX_DIM), 32)
    narrow = narrow_type(q, keys, dim) if mxfp4 else None
    if tiles is None:
        shape = (padded_heads, padded_dim, dtype, shared_memory(q.device.index))
        deep = narrow is not None and like_hopper(q.device.index)
        tiles = mxfp4_tiles(*shape, deep) if mxfp4 else choose_tiles(*shape)
    # On an H200, 256 rows of MXFP4 candidates take 110 us in 512 long programs, 117 in many short
    # ones; fp8 keys, which wait for memory alone, were tried up to 16 tiles.
    most = 64 if mxfp4 else 16
    run = stored_columns(batch * rows, width, tiles.tile, q.device.index, most)
    table = q if block_table is None else block_table
    own, own_b, own_s = by_row(requests, batch, rows, end)
    some, blocks_b, blocks_s = by_row(blocks, batch, rows, end)
    stops, end_b, end_s = by_row(end, batch, rows, q)
    first, starts_b, starts_s = by_row(row_start, batch, rows, end)
    last, ends_b, ends_s = by_row(row_end, batch, rows, end)
    scales = (0, 0, 0, 0) if q_scale is None else q_scale.stride()
    wrap_triton(stored_kernel)[(batch * rows, (width + run - 1) // run)](
        q,
        q if q_scale is None else q_scale,
        keys.values,
        keys.scales,
        weights,
        table,
        own,
        some,
        stops,
        first,
        last,
        out,
        rows,
        heads,
        dim,
        positions,
        keys.offset,
        keys.pages,
        1 if block_table is None else block_table.shape[0],
        0 if block_table is None else block_table.shape[1],
        width,
        run,
        float(scale),
        *q.stride(),
        *scales,
        *keys.value_strides,
        *keys.scale_strides,
        *weights.stride(),
        *((0, 0) if block_table is None else block_table.stride()),
        own_b,
        own_s,
        blocks_b,
        blocks_s,
        0 if blocks is None else blocks.stride(2),
        end_b,
        end_s,
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        SPARSE=blocks is not None,
        PAGED=block_table is not None,
        PAGE=keys.page or 1,
        MXFP4=mxfp4,
        PACKED=q_scale is not None,
        HAS_REQUESTS=requests is not None,
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        HEADS=padded_heads,
        PADDED_HEADS=not (isinstance(heads, int) and heads == padded_heads),
        DIM=padded_dim,
        PADDED_DIM=not (isinstance(dim, int) and dim == padded_dim),
        TILE=tiles.tile,
        TYPE=narrow or _TYPES[dtype],
        # Sums of products of fp8 and MXFP4 numbers are finite or NaN.
        RELU=tl.float8e4nv if mxfp4 and q.dtype in (FP8, torch.uint8) else _TYPES[dtype],
        NARROW=narrow is not None,
        FAST=dtype == torch.bfloat16,
        BY_LANE=operands_by_lane(q.device.index),
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
