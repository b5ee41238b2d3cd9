"""The kernel that scores a row's candidate columns, gathered by sparse block.

A program takes one row and a run of column tiles. A tile of keys [TILE, D] is the left operand of
one product with the row's queries [D, H], so that the sum over heads runs along the accumulator's
inner axis, mostly within a thread.

Where the best columns of a row are looked for next, the largest score of each of a program's TILE
lanes is kept on the way: a bar for the selection, without a read of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_expand import row_bound
from .triton_tools import single


@triton.jit
def relu(product, TYPE: tl.constexpr):
    """relu of products of ``TYPE`` operands, twice it for fp8; NaN goes through."""
    if TYPE == tl.float8e4nv:
        # Sums of fp8 products are finite or NaN: an addition will do, at twice a maximum's rate.
        return product + tl.abs(product)
    return tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_scale(TYPE: tl.constexpr):
    """What :func:`relu` must be multiplied with, a power of two."""
    return 0.5 if TYPE == tl.float8e4nv else 1.0


@triton.jit
def weighted_sum(
    product, weight, heads, PADDED: tl.constexpr, HEADS: tl.constexpr, TYPE: tl.constexpr
):
    """Sum over heads [TILE] of weight * relu(product [TILE, HEADS]); NaN goes through.

    The weights have been multiplied with ``relu_scale``.
    """
    shown = relu(product, TYPE) * weight[None, :]
    if PADDED:
        # A key that is infinite would turn the zero queries of heads that are none into NaN.
        shown = tl.where(tl.arange(0, HEADS)[None, :] < heads, shown, 0.0)
    return tl.sum(shown, 1)


@triton.jit
def _tile_blocks(
    line,
    base,
    inner,
    inner_block,
    valid,
    blocks_n,
    SPARSE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Block ids [TILE] of the columns from ``base`` on."""
    if TILE % SPARSE_BLOCK == 0:
        at = line + tl.cast(base // SPARSE_BLOCK, tl.int64) * blocks_n + inner_block
    else:
        at = line + ((base + inner) // SPARSE_BLOCK).to(tl.int64) * blocks_n
    return tl.load(at, mask=base + inner < valid, other=0)


@triton.jit
def times(place, stride):
    """Products [int64] of int32 numbers that are not negative and a stride, in one instruction."""
    stride += tl.zeros_like(place)
    if stride.dtype == tl.int32:
        place = place.to(tl.uint32, bitcast=True).to(tl.uint64)
        wide = place * stride.to(tl.uint32, bitcast=True)
        return wide.to(tl.int64, bitcast=True)
    return place.to(tl.int64) * stride


@triton.jit
def _finish(
    product,
    weight,
    heads,
    factor,
    added,
    seen,
    column,
    first,
    valid,
    to,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Scores [TILE] of a tile's products, written where ``column`` is in [first, valid)."""
    score = weighted_sum(product, weight, heads, PADDED, HEADS, TYPE)
    if HAS_SCALE:
        score *= factor
    if HAS_BIAS:
        score += added
    score = tl.where(seen, score, float("-inf"))
    here = (column >= first) & (column < valid)
    tl.store(to + column, score.to(to.dtype.element_ty), mask=here)
    return score


@triton.jit
def sparse_kernel(
    q,
    k,
    weights,
    blocks,
    end,
    starts,
    ends,
    key_scale,
    mask,
    bias,
    maxima,
    out,
    rows,
    heads,
    dim,
    positions,
    width,
    run,
    scale,
    q_b,
    q_s,
    q_h,
    q_d,
    k_b,
    k_t,
    k_d,
    w_b,
    w_s,
    w_h,
    blocks_b,
    blocks_s,
    blocks_n,
    end_b,
    end_s,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    scale_b,
    scale_t,
    mask_b,
    mask_s,
    mask_w,
    bias_b,
    bias_s,
    bias_w,
    out_r,
    WIDE_IDS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAXIMA: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = (program // rows).to(tl.int64), (program % rows).to(tl.int64)
    total = tl.cast(positions, tl.int64)
    low = row_bound(starts, batch, row, starts_b, starts_s, total, HAS_START, total * 0)
    high = row_bound(ends, batch, row, ends_b, ends_s, total, HAS_END, total).to(tl.int32)
    shift = (low % SPARSE_BLOCK if ANCHORED else low * 0).to(tl.int32)
    low = low.to(tl.int32)
    first = tl.program_id(1) * run
    limit = tl.minimum(first + run, width)
    valid = tl.load(end + batch * end_b + row * end_s).to(tl.int64)
    valid = tl.minimum(tl.maximum(valid, first), limit).to(tl.int32)

    head = tl.arange(0, HEADS)
    channel = tl.arange(0, DIM)
    inner = tl.arange(0, TILE)
    q_at = q + batch * q_b + row * q_s
    q_at = q_at + head.to(tl.int64)[None, :] * q_h + channel.to(tl.int64)[:, None] * q_d
    if PADDED_HEADS or PADDED_DIM:
        query = tl.load(q_at, (head[None, :] < heads) & (channel[:, None] < dim), other=0.0)
    else:
        query = tl.load(q_at)
    query = query.to(TYPE)
    w_at = weights + batch * w_b + row * w_s + head.to(tl.int64) * w_h
    weight = tl.load(w_at, mask=head < heads, other=0.0).to(tl.float32)
    weight *= single(scale) * relu_scale(TYPE)
    line = blocks + batch * blocks_b + row * blocks_s
    keys = k + batch * k_b + channel.to(tl.int64)[None, :] * k_d
    to = out + program.to(tl.int64) * out_r

    # Each thread that loads 16 bytes of a key finds the key's place anew, so places must be cheap:
    # 32-bit numbers, and junk ids (negative ones are large ones) become one block past the context,
    # whose columns are hidden. Hidden keys are read at some place within the context.
    past = (total // SPARSE_BLOCK + 1).to(tl.uint32)
    final = (total - 1).to(tl.int32)
    inner_block = (inner // SPARSE_BLOCK).to(tl.int64) * blocks_n
    inner_place = inner % SPARSE_BLOCK + shift

    # Ids are loaded one tile ahead: in the same iteration they would take a place of their own in
    # the pipeline, and with it a buffer of keys. Scores are finished one tile behind: the compiler
    # starts the copies of the next keys after a product, and they have all that to arrive in.
    block = _tile_blocks(line, first, inner, inner_block, valid, blocks_n, SPARSE_BLOCK, TILE)
    most = tl.full([TILE], float("-inf"), tl.float32)
    product = tl.zeros([TILE, HEADS], tl.float32)
    factor = tl.zeros([TILE], tl.float32)
    added = tl.zeros([TILE], tl.float32)
    seen = inner < 0
    for base in tl.range(first, valid, TILE, num_stages=STAGES):
        score = _finish(
            product,
            weight,
            heads,
            factor,
            added,
            seen,
            base - TILE + inner,
            first,
            valid,
            to,
            HAS_SCALE,
            HAS_BIAS,
            PADDED_HEADS,
            HEADS,
            TYPE,
        )
        if HAS_MAXIMA:
            most = tl.maximum(most, score)
        column = base + inner
        here = column < valid
        offset = inner_place if TILE % SPARSE_BLOCK == 0 else column % SPARSE_BLOCK + shift
        if WIDE_IDS:
            block = tl.minimum(tl.maximum(block, -1), 2147483647)
        id32 = block.to(tl.int32).to(tl.uint32, bitcast=True)
        id32 = tl.minimum(id32, past).to(tl.int32, bitcast=True)
        block = _tile_blocks(
            line, base + TILE, inner, inner_block, valid, blocks_n, SPARSE_BLOCK, TILE
        )
        raw = id32 * SPARSE_BLOCK + offset
        seen = here & (raw >= low) & (raw < high)
        place = tl.minimum(raw, final)
        at = keys + times(place, k_t)[:, None]
        if PADDED_DIM:
            key = tl.load(at, mask=(inner[:, None] >= 0) & (channel[None, :] < dim), other=0.0)
        else:
            key = tl.load(at)
        key = key.to(TYPE)
        if TYPE == tl.float32:
            product = tl.dot(key, query, input_precision="ieee")
        else:
            product = tl.dot(key, query)
        if HAS_SCALE:
            at_scale = key_scale + batch * scale_b + place.to(tl.int64) * scale_t
            factor = tl.load(at_scale, mask=seen, other=0.0).to(tl.float32)
        if HAS_BIAS:
            at_bias = bias + batch * bias_b + row * bias_s + column.to(tl.int64) * bias_w
            added = tl.load(at_bias, mask=seen, other=0.0).to(tl.float32)
        if HAS_MASK:
            at_mask = mask + batch * mask_b + row * mask_s + column.to(tl.int64) * mask_w
            seen = seen & (tl.load(at_mask, mask=here, other=0) != 0)
    done = first + (valid - first + TILE - 1) // TILE * TILE
    score = _finish(
        product,
        weight,
        heads,
        factor,
        added,
        seen,
        done - TILE + inner,
        first,
        valid,
        to,
        HAS_SCALE,
        HAS_BIAS,
        PADDED_HEADS,
        HEADS,
        TYPE,
    )
    if HAS_MAXIMA:
        most = tl.maximum(most, score)
        group = (program.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * TILE
        tl.store(maxima + group + inner, most)
    for base in range(valid, limit, TILE):
        column = base + inner
        nothing = tl.full([TILE], float("-inf"), tl.float32).to(out.dtype.element_ty)
        tl.store(to + column, nothing, mask=column < limit)
