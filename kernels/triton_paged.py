"""The kernel that scores quantised keys where they lie: in pages, or packed MXFP4 in one piece.

A program takes one row and a run of column tiles, as in ``triton_scores``. A column is a position,
of a candidate block or counted from 0; the block table says which page it is in, and keys are read
from there. MXFP4 keys are widened, for fp8 and packed queries to e5m2 by their scales beside the
largest of the key, else to bf16 with their scales, which is exact; even and odd dims make two
products, since they lie in the low and in the high halves of the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_expand import row_bound, within
from .triton_mxfp4 import (
    byte_of,
    largest_byte,
    scale_step,
    ue8m0,
    widen,
    widen_relative_fast,
)
from .triton_nibbles import in_order, query_nibbles
from .triton_pages import between, block_ids, column_positions, position_pages, remainder
from .triton_scores import relu_scale, times
from .triton_stored_tile import finish_tile, product_of
from .triton_tools import single


@triton.jit
def stored_kernel(
    q,
    q_scale,
    keys,
    key_scales,
    weights,
    table,
    requests,
    blocks,
    end,
    starts,
    ends,
    out,
    rows,
    heads,
    dim,
    positions,
    scale_offset,
    pages,
    lines,
    columns,
    width,
    run,
    scale,
    q_b,
    q_s,
    q_h,
    q_d,
    qs_b,
    qs_s,
    qs_h,
    qs_d,
    key_b,
    key_p,
    key_t,
    scale_b,
    scale_p,
    scale_t,
    w_b,
    w_s,
    w_h,
    table_q,
    table_p,
    requests_b,
    requests_s,
    blocks_b,
    blocks_s,
    blocks_n,
    end_b,
    end_s,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    SPARSE: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    MXFP4: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    RELU: tl.constexpr,
    NARROW: tl.constexpr,
    FAST: tl.constexpr,
    BY_LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = (program // rows).to(tl.int64), (program % rows).to(tl.int64)
    total = tl.cast(positions, tl.int64)
    low = row_bound(starts, batch, row, starts_b, starts_s, total, HAS_START, total * 0)
    # Read here, not by ``row_bound``: where the last scores are written depends on it.
    high = total
    if HAS_END:
        high = within(tl.load(ends + batch * ends_b + row * ends_s), total)
    high = high.to(tl.int32)
    shift = (low % SPARSE_BLOCK if ANCHORED else low * 0).to(tl.int32)
    low = low.to(tl.int32)
    owner = batch
    if HAS_REQUESTS:
        owner = tl.load(requests + batch * requests_b + row * requests_s).to(tl.int64)
    if PAGED:
        # A row of no request sees nothing.
        high = tl.where((owner >= 0) & (owner < lines), high, 0)
        owner = tl.minimum(tl.maximum(owner, 0), lines - 1)
        # Nor does any row see what its table has no entry for.
        high = tl.minimum(high.to(tl.int64), tl.cast(columns, tl.int64) * PAGE).to(tl.int32)
    entries = table + owner * table_q
    span = tl.maximum(high - low, 0).to(tl.uint32, bitcast=True)
    first = tl.program_id(1) * run
    limit = tl.minimum(first + run, width)
    valid = tl.load(end + batch * end_b + row * end_s).to(tl.int64)
    if PAGED and not SPARSE:
        valid = tl.minimum(valid, high)
    valid = tl.minimum(tl.maximum(valid, first), limit).to(tl.int32)

    head = tl.arange(0, HEADS)
    inner = tl.arange(0, TILE)
    w_at = weights + batch * w_b + row * w_s + head.to(tl.int64) * w_h
    weight = tl.load(w_at, mask=head < heads, other=0.0).to(tl.float32)
    weight *= single(scale) * relu_scale(RELU)
    q_at = q + batch * q_b + row * q_s
    line = blocks + batch * blocks_b + row * blocks_s
    own_keys = keys + batch * key_b
    own_scales = key_scales + batch * scale_b + scale_offset
    to = out + program.to(tl.int64) * width
    if MXFP4:
        qs_at = q_scale + batch * qs_b + row * qs_s
        group = tl.arange(0, DIM // 32)
        most = head
        if NARROW and PACKED:
            in_head = head.to(tl.int64)[:, None] * qs_h + group.to(tl.int64)[None, :] * qs_d
            shown = (head[:, None] < heads) & (group[None, :] < dim // 32)
            most = tl.max(tl.load(qs_at + in_head, mask=shown, other=0).to(tl.int32), 1)
            weight *= ue8m0(most) * 0.0001220703125
        even, odd = query_nibbles(
            q_at,
            qs_at,
            most,
            head,
            heads,
            dim,
            q_h,
            q_d,
            qs_h,
            qs_d,
            DIM // 2,
            BY_LANE,
            PACKED,
            TYPE,
        )
        half = tl.arange(0, DIM // 2)
    else:
        channel = tl.arange(0, DIM)
        there = (head[None, :] < heads) & (channel[:, None] < dim)
        at = q_at + head.to(tl.int64)[None, :] * q_h + channel.to(tl.int64)[:, None] * q_d
        query = tl.load(at, mask=there, other=0.0).to(TYPE)

    # Ids are loaded two tiles ahead and pages one: what a tile waits for is its keys alone.
    past = (total // SPARSE_BLOCK + 1).to(tl.uint32)
    column = first + inner
    block = column
    if SPARSE:
        # Up to the limit, so that the first ids do not wait for where the row ends.
        block = block_ids(line, column, limit, blocks_n, SPARSE_BLOCK)
    raw = column_positions(block, column, shift, past, SPARSE, SPARSE_BLOCK)
    seen = (column < valid) & between(raw, low, span)
    page = position_pages(entries, raw, seen, table_p, PAGED, PAGE)
    if SPARSE:
        block = block_ids(line, column + TILE, limit, blocks_n, SPARSE_BLOCK)
        block = tl.where(column + TILE < valid, block, -1)
    # Scores are finished one tile behind: the compiler starts the copies of the next keys after a
    # product, and they have all that to arrive in.
    product = tl.zeros([TILE, HEADS], tl.float32)
    factor = tl.zeros([TILE], tl.int32 if NARROW else tl.float32)
    found = inner < 0
    for base in tl.range(first, valid, TILE, num_stages=STAGES):
        finish_tile(
            product,
            weight,
            heads,
            factor,
            found,
            base - TILE + inner,
            first,
            valid,
            to,
            NARROW,
            not MXFP4,
            PADDED_HEADS,
            HEADS,
            RELU,
        )
        column = base + inner
        found = page.to(tl.uint32, bitcast=True) < pages
        which = tl.where(found, page, 0)
        place = raw
        if not (SPARSE and PAGED):
            place = tl.where(found, raw, 0)
        if PAGED:
            place = remainder(place, PAGE)
        key_at = own_keys + (times(which, key_p) + times(place, key_t))
        scale_at = own_scales + (times(which, scale_p) + times(place, scale_t))

        ahead = column + TILE
        raw = column_positions(block, ahead, shift, past, SPARSE, SPARSE_BLOCK)
        # Ids of columns that are not valid are junk, whose positions no row sees.
        seen = between(raw, low, span)
        if not SPARSE:
            seen = seen & (ahead < valid)
        page = position_pages(entries, raw, seen, table_p, PAGED, PAGE)
        if SPARSE:
            block = block_ids(line, ahead + TILE, valid, blocks_n, SPARSE_BLOCK)

        if MXFP4:
            # In two dimensions: neighbouring threads then copy neighbouring parts of a key.
            by_byte = key_at[:, None] + half[None, :]
            if PADDED_DIM:
                real = (inner[:, None] >= 0) & (half[None, :] < dim // 2)
                packed = tl.load(by_byte, mask=real, other=0)
            else:
                packed = tl.load(by_byte)
            packed = tl.reshape(packed, [TILE, DIM // 32, 16])
            if NARROW:
                # In two dimensions: the compiler hands threads the codes that they multiply if
                # nothing but loads and elementwise operations leads there.
                words = scale_at.to(tl.pointer_type(tl.int32))
                word = tl.load(words[:, None])
                step = scale_step(byte_of(word, group[None, :]), largest_byte(word))
                step = tl.broadcast_to(step[:, :, None], packed.shape)
                even_key, odd_key = widen_relative_fast(packed, step)
            else:
                by_group = scale_at[:, None] + group[None, :]
                if PADDED_DIM:
                    real_group = inner[:, None] * 0 + group[None, :] < dim // 32
                    byte_scale = tl.load(by_group, mask=real_group, other=127)
                else:
                    byte_scale = tl.load(by_group)
                own_scale = tl.broadcast_to(ue8m0(byte_scale)[:, :, None], packed.shape)
                even_key, odd_key = widen(packed, own_scale, TYPE, FAST)
            even_key = in_order(even_key, TILE, DIM // 2, BY_LANE)
            odd_key = in_order(odd_key, TILE, DIM // 2, BY_LANE)
            product = product_of(even_key, even, tl.zeros([TILE, HEADS], tl.float32), TYPE)
            product = product_of(odd_key, odd, product, TYPE)
            if NARROW:
                factor = tl.load(words, mask=found, other=0)
        else:
            by_dim = (key_at[:, None] + channel[None, :]).to(tl.pointer_type(tl.float8e4nv))
            if PADDED_DIM:
                real_dim = (inner[:, None] >= 0) & (channel[None, :] < dim)
                key = tl.load(by_dim, mask=real_dim, other=0.0)
            else:
                key = tl.load(by_dim)
            product = product_of(key.to(TYPE), query, tl.zeros([TILE, HEADS], tl.float32), TYPE)
            factor = tl.load(scale_at.to(tl.pointer_type(tl.float32)), mask=found, other=0.0)
    done = first + (valid - first + TILE - 1) // TILE * TILE
    finish_tile(
        product,
        weight,
        heads,
        factor,
        found,
        done - TILE + inner,
        first,
        valid,
        to,
        NARROW,
        not MXFP4,
        PADDED_HEADS,
        HEADS,
        RELU,
    )
    for base in range(valid, limit, TILE):
        column = base + inner
        nothing = tl.full([TILE], float("-inf"), tl.float32).to(out.dtype.element_ty)
        tl.store(to + column, nothing, mask=column < limit)
