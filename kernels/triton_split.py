"""How the programs of a selection share a row, and whether they get its bar before they read it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_tools import bound, power_of_two, processors
from .validate import Size

MAX_TOPK = 4096
MAX_WIDTH = 2**23
STREAMED = 8192
"""Columns of a wide row that a program holds at once: as many as leave registers for a second
program on the multiprocessor (measured on an H200)."""
# From this width on, and where groups hold columns enough, their maxima are found first: the two
# reads are then faster than two of a program that holds 2 * topk groups.
_WIDE = 16384
_A_GROUP = 8


class Split(NamedTuple):
    """Parts of a row that programs of their own reduce first, and the columns of each."""

    parts: Size
    width: Size


def split_rows(rows: Size, width: Size, room: int, device: int | None) -> Split:
    """As many parts as keep the GPU busy, each at least 4 times as wide as what it hands on."""
    wanted = torch.sym_max(2 * processors(device) // torch.sym_max(rows, 1), 1)
    most = torch.sym_max(width // (4 * max(room, 1024)), 1)
    parts = torch.sym_min(torch.sym_min(wanted, most), 128)
    part = (width + parts - 1) // parts
    return Split(parts, (part + 15) // 16 * 16)


def split_again(rows: Size, width: Size, room: int, level: int, device: int | None) -> Split:
    """How what parts have handed on is reduced: by one program unless that had much to do.

    Args:
        width: what a row's parts of the ``level``-th reduction hand on.
    """
    split = split_rows(rows, width, room, device)
    if isinstance(split.parts, int):
        return split if split.parts >= 4 else Split(1, width)
    # Where sizes are symbolic, the number of reductions cannot depend on them.
    return split if level == 1 and bound(width, MAX_WIDTH) > 4 * STREAMED else Split(1, width)


def groups_before(rows: Size, width: Size, topk: Size, device: int | None) -> int | None:
    """Groups of a row whose maxima are found before its selection; None where no kernel of its own
    is worth it."""
    room = 2 * power_of_two(bound(topk, MAX_TOPK), 16)
    groups = max(room, 1024)
    if not isinstance(width, int) or width <= _WIDE or width < _A_GROUP * groups:
        return None
    parts = split_rows(rows, width, room, device).parts
    return groups if isinstance(parts, int) and parts == 1 else None
