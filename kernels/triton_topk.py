"""Top-k of strided score rows with an end of their own, and columns back to positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .triton_finish import finish
from .triton_groups import group_maxima
from .triton_select import select
from .triton_split import (
    MAX_TOPK,
    MAX_WIDTH,
    STREAMED,
    Split,
    groups_before,
    split_again,
    split_rows,
)
from .triton_tiles import MAX_MAXIMA
from .triton_tools import (
    at_most,
    bound,
    by_row,
    cap_registers,
    known_at_most,
    power_of_two,
    processors,
    require,
    result,
    wrap_triton,
)
from .validate import Size

SCORES = (torch.float16, torch.bfloat16, torch.float32)
# A row of so many columns is read once and stays in registers (measured on an H200).
_IN_REGISTERS = 8192
_REGISTERS = 128
_A_THREAD = 32


class Mapping(NamedTuple):
    """How columns become positions: through blocks [B|1, S|1, N], or as they are (None)."""

    positions: Size
    blocks: Tensor | None = None
    row_start: Tensor | None = None
    sparse_block: int = 1
    anchored: bool = False
    fill: float | None = None


def scratch_shape(rows: Size, topk: Size) -> tuple[Size, int, int]:
    """Shape of the int64 ``scratch`` of :func:`select_rows`."""
    return rows, 1, 2 * power_of_two(bound(topk, MAX_TOPK), 16)


def select_rows(
    op: str,
    scores: Tensor,
    *,
    topk: Size,
    ends: Tensor | None,
    sorted: bool = True,
    starts: Tensor | None = None,
    mapping: Mapping | None = None,
    keep_all: bool = False,
    split: Split | None = None,
    scratch: Tensor | None = None,
    maxima: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    warps: int | None = None,
    finish_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Best ``topk`` scores of every row.

    Args:
        scores: [B, S, W] fp16, bf16 or fp32, any strides; W at most 2**23.
        topk: at most 4,096.
        ends: [B|1, S|1]: columns from there on are not looked at; ``starts``: nor those before,
            only with a mapping without blocks.
        sorted: descending, ties by column. Otherwise in a fixed but meaningless order.
        mapping: return positions int64, empty slots holding hidden ones; without it, columns int32
            and -1.
        keep_all: -inf can be selected.
        split: how many programs share a row. Chosen by the number of rows when None.
        scratch: int64, see :func:`scratch_shape`; used where rows are not split.
        maxima: fp32 [B * S, G], the largest scores of G groups of each row's columns, as a scorer
            or :func:`group_maxima` has kept them; rows are then not split.
        out: (values [B, S, topk] fp32, indices) to write into.

    Raises:
        TypeError: a dtype that no kernel takes. ValueError: topk or W is over its limit.
    """
    require(op, "scores", scores, SCORES)
    at_most(op, "topk", topk, MAX_TOPK)
    batch, rows, width = scores.shape
    at_most(op, "the width of a row", width, MAX_WIDTH)
    given = (None, None) if out is None else out
    values = result(given[0], op, scores, (batch, rows, topk), torch.float32)
    kind = torch.int32 if mapping is None else torch.int64
    index = result(given[1], op, scores, (batch, rows, topk), kind)
    if isinstance(values.numel(), int) and values.numel() == 0:
        return values, index
    count = batch * rows
    k = power_of_two(bound(topk, MAX_TOPK), 16)
    room = 2 * k
    if maxima is None and split is None:
        groups = groups_before(count, width, topk, scores.device.index)
        maxima = None if groups is None else group_maxima(scores, groups, starts, ends)
    if maxima is not None:
        split = Split(1, (width + 15) // 16 * 16)
    if split is None:
        split = split_rows(count, width, room, scores.device.index)
    whole = isinstance(split.parts, int) and split.parts == 1
    survivors = result(scratch if whole else None, op, scores, (count, 1, room), torch.int64)
    source, stored, level = scores, False, 0
    while not whole:
        handed = scores.new_empty((count, split.parts, room), dtype=torch.int64)
        _launch_select(source, starts, ends, handed, topk, split, stored, keep_all, warps, None)
        source, stored = handed.view(batch, rows, -1), True
        starts, ends = None, None
        level += 1
        split = split_again(count, split.parts * room, room, level, scores.device.index)
        whole = isinstance(split.parts, int) and split.parts == 1
    _launch_select(source, starts, ends, survivors, topk, split, stored, keep_all, warps, maxima)
    to = mapping or Mapping(0)
    lines, blocks_b, blocks_s = by_row(to.blocks, batch, rows, scores)
    start, start_b, start_s = by_row(to.row_start, batch, rows, scores)
    infinite = to.fill is None or to.fill == float("-inf")
    if finish_warps is None:
        finish_warps = max(1, room // 1024)
    wrap_triton(finish)[(count,)](
        survivors,
        start,
        lines,
        values,
        index,
        rows,
        topk,
        to.positions,
        0.0 if infinite else to.fill,
        start_b,
        start_s,
        blocks_b,
        blocks_s,
        0 if to.blocks is None else to.blocks.stride(2),
        HAS_START=to.row_start is not None,
        SORTED=sorted,
        MAP=0 if mapping is None else 2 if to.blocks is None else 1,
        ANCHORED=to.anchored,
        SPARSE_BLOCK=to.sparse_block,
        INFINITE_FILL=infinite,
        LOG_ROOM=room.bit_length() - 1,
        LOG_K=k.bit_length() - 1,
        LOG_WARPS=finish_warps.bit_length() - 1,
        num_warps=finish_warps,
    )
    return values, index


def _warps_with_maxima(rows: Size, maxima: Size, device: int | None) -> int:
    """Warps of a program that gets its bar from maxima."""
    if not isinstance(rows, int) or rows < 4 * processors(device):
        return 8
    return max(1, power_of_two(bound(maxima, MAX_MAXIMA)) // 1024)


def _launch_select(
    source: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    survivors: Tensor,
    topk: Size,
    split: Split,
    stored: bool,
    keep_all: bool,
    warps: int | None,
    maxima: Tensor | None,
) -> None:
    batch, rows, width = source.shape
    room = int(survivors.shape[2])
    start, start_b, start_s = by_row(starts, batch, rows, source)
    end, end_b, end_s = by_row(ends, batch, rows, source)
    groups = max(room, min(1024, power_of_two(bound(split.width, _IN_REGISTERS), 16)))
    largest = max(_IN_REGISTERS, groups)
    single = maxima is None and known_at_most(split.width, largest)
    depth = max(1, STREAMED // groups)
    if single:
        depth = power_of_two(bound(split.width, largest), groups) // groups
    registers = None if groups > 1024 else _REGISTERS
    if maxima is not None:
        # The row is read once and in any order: a warp of its own, which waits for no other, where
        # there are rows enough, and whole groups of neighbouring columns a thread.
        warps = warps or _warps_with_maxima(batch * rows, maxima.shape[1], source.device.index)
        groups, depth, registers = 32 * warps, _A_THREAD, _REGISTERS
    wrap_triton(select)[(batch * rows, split.parts)](
        source,
        start,
        end,
        source if maxima is None else maxima,
        survivors,
        rows,
        topk,
        width,
        split.width,
        0 if maxima is None else maxima.shape[1],
        source.stride(0),
        source.stride(1),
        source.stride(2),
        start_b,
        start_s,
        end_b,
        end_s,
        STORED=stored,
        HAS_START=starts is not None,
        HAS_END=ends is not None,
        KEEP_ALL=keep_all,
        SINGLE=single,
        DEPTH=depth,
        GROUPS=groups,
        MAXIMA=0 if maxima is None else power_of_two(bound(maxima.shape[1], MAX_MAXIMA), room),
        LOG_ROOM=room.bit_length() - 1,
        num_warps=warps or max(4, min(16, groups // 128)),
        **({} if registers is None else cap_registers(registers)),
    )


def topk(
    logits: Tensor,
    end: Tensor,
    *,
    topk: Size,
    sorted: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Best columns below ``end``; see ``dsa::topk``.

    Args:
        logits: [B, S, W] fp16, bf16 or fp32, any strides, W at most 2**23.
        end: [B|1, S|1] int32 or int64.
        topk: at most 4,096; may exceed W.

    Returns:
        values [B, S, topk] fp32 and columns [B, S, topk] int32, -1 where none was left.
    """
    return select_rows("topk", logits, topk=topk, ends=end, sorted=sorted, out=out, scratch=scratch)


def topk_positions(
    logits: Tensor,
    end: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    topk: Size,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    scratch: Tensor | None = None,
    maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``topk`` and ``topk_remap`` in one launch: values fp32 and positions int64 [B, S, topk]."""
    to = Mapping(num_positions, blocks, row_start, sparse_block, anchored, fill)
    if isinstance(logits.shape[2], int) and logits.shape[2] == 0:
        # Without a column there is no block to read either: every slot is empty.
        to = Mapping(num_positions, fill=fill)
    return select_rows(
        "topk",
        logits,
        topk=topk,
        ends=end,
        sorted=sorted,
        mapping=to,
        out=out,
        scratch=scratch,
        maxima=maxima,
    )
