"""The kernel that finds the few columns of a row among which its best are, in two reads of it.

1. Columns are dealt to G >= 2k groups, and the largest score of every group is kept. The k-th
   largest of these maxima cannot exceed the k-th largest score, since each of k groups holds one at
   least as large: a bar under which nothing can be selected. On data without structure about 1.4 k
   columns reach it, whatever the row's length. A scorer that has kept such maxima saves this read.
2. Columns that reach it are written to scratch memory with their scores, in a fixed order. What is
   there is cut at the exact k-th and sorted by ``triton_finish``.

If more columns reach the bar than scratch holds (long ties, best columns all in few groups), it is
first raised by counting over the whole row, among equals by column. Nothing depends on the order in
which threads run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_expand import within
from .triton_tools import (
    candidate,
    candidate_column,
    candidate_score,
    key_score,
    middle,
    no_candidate,
    order_key,
)


@triton.constexpr_function
def _nothing(stored):
    """What stands for columns that are not read: a score of -inf, and no column."""
    return -36028792723996673 if stored else float("-inf")


@triton.jit
def _scored(loaded, column, STORED: tl.constexpr):
    """Scores fp32 and columns of what was read."""
    if STORED:
        return candidate_score(loaded), candidate_column(loaded)
    return loaded.to(tl.float32), column


@triton.jit
def _places(topk, DEPTH: tl.constexpr, GROUPS: tl.constexpr):
    """Offsets [GROUPS, DEPTH] int64 of columns looked at together; a row of them is a group."""
    # ``topk >> 13`` is 0, which the compiler cannot know. Knowing that neighbours are neighbours in
    # memory, it would give a thread several for wide loads, and later move all scores to other
    # threads for the narrow stores. So lanes take neighbours, and a thread takes whole groups.
    group = (tl.arange(0, GROUPS) ^ (topk >> 13)).to(tl.int64)
    return group[:, None] + tl.arange(0, DEPTH).to(tl.int64)[None, :] * GROUPS


@triton.jit
def _above(score, column, bar, stop, KEEP_ALL: tl.constexpr, STORED: tl.constexpr):
    """Whether columns reach a bar [fp32]; NaN always does."""
    hit = (score < bar) == 0
    if KEEP_ALL:
        # -inf can be selected, but not what is no column.
        hit = hit & (column >= 0 if STORED else column < stop)
    return hit


@triton.jit
def _reach(score, column, bar, tie, stop, KEEP_ALL: tl.constexpr, STORED: tl.constexpr):
    """Whether columns reach a bar [key], those equal to it below the column ``tie``."""
    key = order_key(score)
    hit = (key > bar) | ((key == bar) & (column < tie))
    if KEEP_ALL:
        hit = hit & (column >= 0 if STORED else column < stop)
    return hit


@triton.jit
def _group_bar(best, topk, least):
    """A large key such that ``topk`` of the maxima [fp32] reach it, to within an eighth."""
    key = order_key(best)
    bar = tl.min(key, 0)
    above = tl.max(key, 0) + 1
    count = tl.sum((key >= bar).to(tl.int32), 0)
    enough = topk + topk // 8
    while (count > enough) & (above - 1 > bar):
        half = middle(bar, above)
        found = tl.sum((key >= half).to(tl.int32), 0)
        if found >= topk:
            bar = half
            count = found
        else:
            above = half
    # Where fewer groups than slots hold anything, everything is a candidate.
    return tl.maximum(bar, least)


@triton.jit
def _append(hit, score, column, own, total, LIMIT: tl.constexpr):
    """Writes what is hit behind ``total`` entries of ``own``; returns the new total.

    Entries from LIMIT on are not written; with LIMIT 0, the caller knows that there are none.
    """
    hit = hit.to(tl.int32)
    counts = tl.sum(hit, 1)
    offset = total + tl.cumsum(counts, 0) - counts
    slot = offset[:, None] + tl.cumsum(hit, 1) - hit
    wanted = hit != 0
    if LIMIT:
        wanted = wanted & (slot < LIMIT)
    tl.store(own + slot, candidate(score, column), mask=wanted)
    return total + tl.sum(counts, 0)


@triton.jit
def _append_row(
    source,
    first,
    stop,
    stride,
    bar,
    tie,
    topk,
    own,
    EXACT: tl.constexpr,
    ROOM: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED: tl.constexpr,
    KEEP_ALL: tl.constexpr,
):
    """Writes all of a row that reaches the bar, read once more; returns how many do."""
    place = _places(topk, DEPTH, GROUPS)
    total = tl.cast(0, tl.int32)
    # 64-bit offsets, here as below: a thread's columns then share one address and constant offsets.
    for base in range(first, stop, DEPTH * GROUPS):
        column = base + place.to(tl.int32)
        address = source + tl.cast(base, tl.int64) * stride + place * stride
        loaded = tl.load(address, mask=column < stop, other=_nothing(STORED))
        score, column = _scored(loaded, column, STORED)
        if EXACT:
            hit = _reach(score, column, bar, tie, stop, KEEP_ALL, STORED)
        else:
            hit = _above(score, column, bar, stop, KEEP_ALL, STORED)
        total = _append(hit, score, column, own, total, ROOM)
    return total


@triton.jit
def select(
    source,
    starts,
    ends,
    maxima,
    survivors,
    rows,
    topk,
    width,
    part_width,
    maxima_count,
    source_b,
    source_s,
    source_w,
    starts_b,
    starts_s,
    ends_b,
    ends_s,
    STORED: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    SINGLE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    MAXIMA: tl.constexpr,
    LOG_ROOM: tl.constexpr,
):
    """Survivors of one part of one row a program; see the module.

    Scores are read here, not by functions that are given ``source``: see ``row_bound``.

    Args:
        source: scores [B, S, width], or the STORED survivors of earlier parts.
        starts, ends: only [start, end) is looked at, as far as given.
        maxima: fp32 [B * S, maxima_count], the largest scores of groups of a row's columns, where
            MAXIMA, a power of two that holds them and 2 * topk, is not 0; rows are not in parts.
        survivors: [B * S, parts, 2**LOG_ROOM] int64 candidates in no particular order. All of a
            row's best ``topk`` are among them.
        KEEP_ALL: -inf can be selected like any other score.
        SINGLE: a part is at most DEPTH * GROUPS wide and stays in registers.
    """
    row_id = tl.program_id(0)
    part = tl.program_id(1)
    batch, row = (row_id // rows).to(tl.int64), (row_id % rows).to(tl.int64)
    first = part * part_width
    stop = tl.minimum(first + part_width, width)
    if HAS_END:
        end = tl.load(ends + batch * ends_b + row * ends_s).to(tl.int64)
        stop = tl.minimum(tl.maximum(end, first), stop).to(tl.int32)
    if HAS_START:
        whole = tl.cast(width, tl.int64)
        low = within(tl.load(starts + batch * starts_b + row * starts_s), whole)
        first = tl.minimum(tl.maximum(low, first), stop).to(tl.int32)
    line = source + batch * source_b + row * source_s
    ROOM: tl.constexpr = 2**LOG_ROOM
    own = survivors + (row_id.to(tl.int64) * tl.num_programs(1) + part) * ROOM

    place = _places(topk, DEPTH, GROUPS)
    if MAXIMA:
        score = tl.full([GROUPS, 1], float("-inf"), tl.float32)
        column = tl.zeros([GROUPS, 1], tl.int32)
        group = tl.arange(0, MAXIMA)
        at = maxima + row_id.to(tl.int64) * maxima_count + group
        best = tl.load(at, mask=group < maxima_count, other=float("-inf"))
    elif SINGLE:
        column = first + place.to(tl.int32)
        address = line + tl.cast(first, tl.int64) * source_w + place * source_w
        loaded = tl.load(address, mask=column < stop, other=_nothing(STORED))
        score, column = _scored(loaded, column, STORED)
        best = tl.max(score, 1)
    else:
        score = tl.full([GROUPS, 1], float("-inf"), tl.float32)
        column = tl.zeros([GROUPS, 1], tl.int32)
        most = tl.full([GROUPS, DEPTH], float("-inf"), tl.float32)
        for base in range(first, stop, DEPTH * GROUPS):
            where = base + place.to(tl.int32)
            address = line + tl.cast(base, tl.int64) * source_w + place * source_w
            loaded = tl.load(address, mask=where < stop, other=_nothing(STORED))
            some, where = _scored(loaded, where, STORED)
            most = tl.maximum(most, some)
        best = tl.max(most, 1)
    bar = _group_bar(best, topk, -2139095041 if KEEP_ALL else -2139095040)
    everyone = tl.cast(2147483647, tl.int32)
    nothing = tl.cast(0, tl.int32)
    if SINGLE:
        hit = _above(score, column, key_score(bar), stop, KEEP_ALL, STORED)
        total = tl.sum(tl.sum(hit.to(tl.int32), 1), 0)
    else:
        total = _append_row(
            line, first, stop, source_w, key_score(bar), everyone, topk, own, False, ROOM, DEPTH,
            GROUPS, STORED, KEEP_ALL,
        )  # fmt: skip
    if total > ROOM:
        # First the bar is raised, then its equals are cut by column.
        count = total
        above = tl.cast(0x7FC00001, tl.int32)
        while (count > ROOM) & (above - 1 > bar):
            half = middle(bar, above)
            if SINGLE:
                hits = _reach(score, column, half, everyone, stop, KEEP_ALL, STORED).to(tl.int32)
            else:
                hits = tl.zeros([GROUPS, DEPTH], tl.int32)
                for base in range(first, stop, DEPTH * GROUPS):
                    where = base + place.to(tl.int32)
                    address = line + tl.cast(base, tl.int64) * source_w + place * source_w
                    loaded = tl.load(address, mask=where < stop, other=_nothing(STORED))
                    some, where = _scored(loaded, where, STORED)
                    hits += _reach(some, where, half, everyone, stop, KEEP_ALL, STORED).to(tl.int32)
            found = tl.sum(tl.sum(hits, 1), 0)
            if found >= topk:
                bar = half
                count = found
            else:
                above = half
        tie = everyone
        if count > ROOM:
            below = nothing
            while tie - below > 1:
                half = middle(below, tie)
                if SINGLE:
                    hits = _reach(score, column, bar, half, stop, KEEP_ALL, STORED).to(tl.int32)
                else:
                    hits = tl.zeros([GROUPS, DEPTH], tl.int32)
                    for base in range(first, stop, DEPTH * GROUPS):
                        where = base + place.to(tl.int32)
                        address = line + tl.cast(base, tl.int64) * source_w + place * source_w
                        loaded = tl.load(address, mask=where < stop, other=_nothing(STORED))
                        some, where = _scored(loaded, where, STORED)
                        hits += _reach(some, where, bar, half, stop, KEEP_ALL, STORED).to(tl.int32)
                if tl.sum(tl.sum(hits, 1), 0) >= topk:
                    tie = half
                else:
                    below = half
        if SINGLE:
            exact = _reach(score, column, bar, tie, stop, KEEP_ALL, STORED)
            total = _append(exact, score, column, own, nothing, 0)
        else:
            total = _append_row(
                line, first, stop, source_w, bar, tie, topk, own, True, ROOM, DEPTH, GROUPS,
                STORED, KEEP_ALL,
            )  # fmt: skip
    else:
        if SINGLE:
            total = _append(hit, score, column, own, nothing, 0)
    slot = tl.arange(0, ROOM)
    tl.store(own + slot, no_candidate(ROOM), mask=slot >= total)
