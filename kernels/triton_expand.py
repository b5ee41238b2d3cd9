"""Candidate block ids to sorted, unique, padded sparse blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tools import bound, by_row, power_of_two, result, wrap_triton
from .validate import Size, row_shape

# Ids and words of a row's set that a program holds at once.
_AT_ONCE = 1024


@triton.jit
def within(bound, positions):
    """A row's start or end as it was read, as int64 clamped to the context."""
    return tl.minimum(tl.maximum(bound.to(tl.int64), 0), positions)


@triton.jit
def row_bound(pointer, batch, row, stride_b, stride_s, positions, GIVEN: tl.constexpr, absent):
    """A row's start or end [int64], clamped to the context; ``absent`` where none is given.

    Not where the address of a store depends on it: compilers take each pointer that a function got
    for written to if an address depends on what it returns. There the kernel itself reads it.
    """
    if GIVEN:
        at = tl.load(pointer + batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s)
        return within(at, positions)
    return absent.to(tl.int64)


@triton.jit
def _first_set(bits):
    """Index of the lowest set bit of uint32, which is not 0."""
    # A power of two is exact in fp32: its exponent is the index.
    lowest = (bits & (0 - bits)).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _ones(bits):
    """Number of set bits of uint32, as int32."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return ((bits + (bits >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _has(own, block, words):
    """1 if a block's bit is set, else 0."""
    word = tl.load(own + (block >> 5), mask=(block >= 0) & ((block >> 5) < words), other=0)
    return (word >> (block & 31)) & 1


@triton.jit
def set_bits(own, block, mask, SIZE: tl.constexpr):
    """Sets the bits of blocks [SIZE] in the int32 words of a row."""
    bit = tl.full([SIZE], 1, tl.uint32) << (block & 31).to(tl.uint32)
    bit = bit.to(tl.int32, bitcast=True)
    tl.atomic_or(own + (block >> 5), bit, mask=mask, sem="relaxed", scope="cta")


@triton.jit
def expand_kernel(
    ids,
    starts,
    ends,
    flags,
    blocks,
    end,
    rows,
    count,
    positions,
    words,
    ids_b,
    ids_s,
    ids_c,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    ANCHORED: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    IDS: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One row a program: its ids become bits of a set, which is then read out in order.

    Neighbouring lanes read UNIT bits each, so that what they find lies close together in the
    result; one set bit a unit or so is best.

    Args:
        flags: [B * S, words] int32, one bit a candidate block; the row's set is left there.
    """
    program = tl.program_id(0)
    batch, row = program // rows, program % rows
    total = tl.cast(positions, tl.int64)
    low, high = total * 0, total
    if HAS_START:
        at = starts + batch.to(tl.int64) * starts_b + row.to(tl.int64) * starts_s
        low = within(tl.load(at), total)
    if HAS_END:
        at = ends + batch.to(tl.int64) * ends_b + row.to(tl.int64) * ends_s
        high = within(tl.load(at), total)
    origin = low if ANCHORED else low * 0
    first = ((low - origin) // SPARSE_BLOCK).to(tl.int32)
    last = tl.where(low < high, (high - origin + SPARSE_BLOCK - 1) // SPARSE_BLOCK, 0).to(tl.int32)
    width = count * RATIO
    own = flags + program.to(tl.int64) * words
    word = tl.arange(0, WORDS)
    for base in range(0, words, WORDS):
        tl.store(own + base + word, tl.zeros([WORDS], tl.int32), mask=base + word < words)
    tl.debug_barrier()
    slot = tl.arange(0, IDS)
    at = ids + batch.to(tl.int64) * ids_b + row.to(tl.int64) * ids_s
    for base in range(0, count, IDS):
        which = base + slot
        raw = tl.load(at + which.to(tl.int64) * ids_c, mask=which < count, other=-1).to(tl.int64)
        known = (raw >= 0) & (raw < tl.cast(words, tl.int64) * 32)
        block = tl.where(known, raw, 0).to(tl.int32)
        seen = tl.minimum(block * RATIO + RATIO, last) > tl.maximum(block * RATIO, first)
        set_bits(own, block, known & seen, IDS)
    tl.debug_barrier()

    # Of a block that the row sees in part, only sparse blocks that it sees count.
    oldest, newest = first // RATIO, (last - 1) // RATIO
    before = _has(own, oldest, words) * (first - oldest * RATIO)
    line = blocks + program.to(tl.int64) * width - before
    shift = (origin // SPARSE_BLOCK).to(tl.int32)
    found = tl.cast(0, tl.int32)
    finals = tl.full([WORDS], -1, tl.int32)
    units = words * (32 // UNIT)
    for base in range(0, units, WORDS):
        here = base + word
        bits = tl.load(own + here * UNIT // 32, mask=here < units, other=0)
        bits = bits.to(tl.uint32, bitcast=True)
        if UNIT < 32:
            bits = (bits >> (here * UNIT % 32).to(tl.uint32)) & (2**UNIT - 1)
        ones = _ones(bits)
        to = (found + tl.cumsum(ones, 0) - ones) * RATIO
        for _ in range(tl.max(ones, 0)):
            some = bits != 0
            block = here * UNIT + _first_set(bits)
            finals = tl.where(some, block, finals)
            for j in tl.static_range(RATIO):
                kept = some
                if RATIO > 1:
                    kept = kept & (block * RATIO + j >= first) & (block * RATIO + j < last)
                tl.store(line + to + j, block * RATIO + j + shift, mask=kept)
            to += RATIO
            bits = bits & (bits - 1)
        found += tl.sum(ones, 0)
    after = tl.where(last > 0, _has(own, newest, words) * (newest * RATIO + RATIO - last), 0)
    valid = found * RATIO - before - after
    final = tl.minimum(tl.max(finals, 0) * RATIO + RATIO, last) - 1
    padding = tl.where(valid > 0, final + shift, 0)
    line = blocks + program.to(tl.int64) * width
    for base in range(valid // IDS * IDS, width, IDS):
        spare = base + slot
        tl.store(line + spare, padding + slot * 0, mask=(spare >= valid) & (spare < width))
    tail = high - origin - final.to(tl.int64) * SPARSE_BLOCK
    tail = tl.minimum(tl.maximum(tail, 1), SPARSE_BLOCK).to(tl.int32)
    tl.store(end + program, tl.where(valid > 0, (valid - 1) * SPARSE_BLOCK + tail, 0))


def bits_a_unit(total: Size, count: Size) -> int:
    """A power of two up to 32: how many of ``total`` blocks hold one of ``count`` candidates."""
    if not isinstance(total, int) or not isinstance(count, int):
        return 8
    return min(32, power_of_two(total // max(count, 1) // 2 + 1))


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: Size,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Candidate ids as unique ascending sparse blocks; see ``dsa::candidate_expand``.

    Args:
        block_ids: [B|1, S|1, C] int32 or int64.
        row_start, row_end: [B|1, S|1], the half-open range that a row sees.
        num_positions: T.
        block_size: positions of a candidate block; ``sparse_block``: of an expanded one.
        anchored: blocks are counted from the row's own start.
        out: (blocks, end) to write into.
        warps: of a program, for measurements.

    Returns:
        blocks [B, S, C * block_size / sparse_block] int32 and end [B, S] int32. A bit a row and
        candidate block of the context is held on the way.
    """
    batch, rows = row_shape(
        "candidate_expand", block_ids=block_ids, row_start=row_start, row_end=row_end
    )
    count = block_ids.shape[2]
    width = count * (block_size // sparse_block)
    given = (None, None) if out is None else out
    blocks = result(given[0], "candidate_expand", block_ids, (batch, rows, width), torch.int32)
    end = result(given[1], "candidate_expand", block_ids, (batch, rows), torch.int32)
    if isinstance(count, int) and count == 0:
        end.zero_()
        return blocks, end
    if isinstance(batch * rows, int) and batch * rows == 0:
        return blocks, end
    ids, ids_b, ids_s = by_row(block_ids, batch, rows, blocks)
    total = (num_positions + block_size - 1) // block_size
    words = (total + 31) // 32
    ids_at_once = power_of_two(bound(count, _AT_ONCE), 2)
    unit = bits_a_unit(total, count)
    units_at_once = power_of_two(bound(words * (32 // unit), _AT_ONCE), 2)
    starts, starts_b, starts_s = by_row(row_start, batch, rows, ids)
    ends, ends_b, ends_s = by_row(row_end, batch, rows, ids)
    if warps is None:
        warps = max(1, min(4, ids_at_once // 128))
    wrap_triton(expand_kernel)[(batch * rows,)](
        ids,
        starts,
        ends,
        blocks.new_empty((batch * rows, words)),
        blocks,
        end,
        rows,
        count,
        num_positions,
        words,
        ids_b,
        ids_s,
        ids.stride(2),
        starts_b,
        starts_s,
        ends_b,
        ends_s,
        HAS_START=row_start is not None,
        HAS_END=row_end is not None,
        ANCHORED=anchored,
        SPARSE_BLOCK=sparse_block,
        RATIO=block_size // sparse_block,
        IDS=ids_at_once,
        WORDS=units_at_once,
        UNIT=unit,
        num_warps=warps,
    )
    return blocks, end
