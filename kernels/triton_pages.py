"""Where the keys of a row's columns lie: their positions, and the pages that hold those."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quotient(x, DIVISOR: tl.constexpr):
    """Quotient of int32 that are not negative; unsigned division by a power of two is a shift."""
    return (x.to(tl.uint32, bitcast=True) // DIVISOR).to(tl.int32, bitcast=True)


@triton.jit
def remainder(x, DIVISOR: tl.constexpr):
    return (x.to(tl.uint32, bitcast=True) % DIVISOR).to(tl.int32, bitcast=True)


@triton.jit
def between(x, low, span):
    """Whether int32 numbers that are not negative lie in [low, low + span); one comparison."""
    return (x - low).to(tl.uint32, bitcast=True) < span


@triton.jit
def block_ids(line, column, valid, blocks_n, SPARSE_BLOCK: tl.constexpr):
    """Block ids of columns."""
    at = line + quotient(column, SPARSE_BLOCK).to(tl.int64) * blocks_n
    return tl.load(at, mask=column < valid, other=-1)


@triton.jit
def column_positions(block, column, shift, past, SPARSE: tl.constexpr, SPARSE_BLOCK: tl.constexpr):
    """Positions [int32] of columns; junk ids are one block past the context."""
    if SPARSE:
        if block.dtype == tl.int64:
            block = tl.minimum(tl.maximum(block, -1), 2147483647)
        # Negative ids are large ones.
        id32 = block.to(tl.int32).to(tl.uint32, bitcast=True)
        id32 = tl.minimum(id32, past).to(tl.int32, bitcast=True)
        return id32 * SPARSE_BLOCK + remainder(column, SPARSE_BLOCK) + shift
    return column


@triton.jit
def position_pages(table, position, seen, table_p, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """The page [int32] of each position that is seen, and so has an entry; else negative."""
    if PAGED:
        at = table + quotient(position, PAGE).to(tl.int64) * table_p
        page = tl.load(at, mask=seen, other=-1)
        if page.dtype == tl.int64:
            page = tl.minimum(tl.maximum(page, -1), 2147483647)
        return page.to(tl.int32)
    return tl.where(seen, 0, -1)
