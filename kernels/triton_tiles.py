"""How the scorers are launched: tiles, warps, and how much of a row a program takes.

The numbers were chosen on an H200; docs/performance.md says what else was tried.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_tools import bound, power_of_two, processors
from .validate import Size

# Rows up to this wide are selected from in registers; maxima of them are of no use.
MIN_WIDTH = 8192
MAX_MAXIMA = 4096
# Most tiles that a program of candidate columns scores where it keeps no maxima.
LONGEST = 32


class Tiles(NamedTuple):
    """How a scorer is launched: keys a tile, warps a program, software pipeline depth, and the most
    registers of a thread."""

    tile: int
    warps: int
    stages: int
    registers: int | None = None


def choose_tiles(heads: int, dim: int, dtype: torch.dtype, memory: int) -> Tiles:
    """Tile sizes for padded ``heads`` and ``dim`` within ``memory`` bytes of shared memory."""
    size = dtype.itemsize
    if dtype == torch.float32:
        return Tiles(32 if heads * dim <= 4096 else 16, 4, 1)
    # More stages than two cost more programs on a multiprocessor than they hide latency. Fewer
    # registers than the compiler would take make room for a fifth program of 32 heads, a fourth
    # of 64 (on an H200).
    tile, stages = (128 if heads <= 64 else 64), 2
    registers = {32: 88, 64: 120}.get(heads) if size == 1 else None
    if dtype.itemsize * (heads + tile) * dim > memory - 4096:
        tile = 32
    # Queries, the tiles in flight, and room for the reduction.
    while (heads + tile * stages) * dim * size + 4096 > memory and stages > 1:
        stages -= 1
    return Tiles(tile, 4, stages, registers)


def columns_a_program(
    rows: Size, width: Size, tile: int, device: int | None, most: int = 16
) -> Size:
    """Columns that one program scores: all of a row's where rows fill the GPU, fewer otherwise.

    Args:
        most: tiles of a program.
    """
    # Many programs a multiprocessor even out rows of different lengths and the last ones; 16 tiles
    # of a program pay for loading the queries. Programs of less than 4 are for when there would be
    # too few otherwise.
    device_programs = 32 * processors(device)
    tiles = (width + tile - 1) // tile
    run = torch.sym_min(rows * tiles // device_programs, most)
    run = torch.sym_max(run, torch.sym_min(16 * (rows * tiles) // device_programs, 4))
    return torch.sym_max(torch.sym_max(run, 1), (tiles + 65534) // 65535) * tile


def equal_parts(tiles: int, run: int) -> int:
    """Tiles a program, ``run`` to ``2 * run - 1``: a row gets no more programs than it holds whole
    runs. All tiles of a row that holds none."""
    return -(-tiles // max(1, tiles // run))


def columns_for_maxima(
    rows: Size, width: Size, topk: Size, tile: int, device: int | None
) -> Size | None:
    """Columns a program such that the scorer's maxima give the selection a good bar.

    None where the selection does better to look for itself.
    """
    if not isinstance(width, int) or not isinstance(topk, int):
        return None
    # Two groups a wanted column or more, and several columns a group, or nothing is won. More
    # groups than MAX_MAXIMA would be as long to read as the row.
    tiles = -(-width // tile)
    most = min(16, width // (2 * power_of_two(topk)))
    least = max(2, -(-tiles * tile // MAX_MAXIMA))
    if least > most or width <= MIN_WIDTH:
        return None
    run = columns_a_program(rows, width, tile, device) // tile
    if isinstance(run, int) and run > 4:
        # On an H200, 256 bf16 rows of 128 tiles: 0.201 ms in programs of 8, 0.206 in those of 7.
        # Shorter programs do not fill the GPU, and longer ones would only take longer.
        run = equal_parts(tiles, run)
    return torch.sym_max(torch.sym_min(run, most), least) * tile


def maxima_groups(width: Size, run: Size, tile: int) -> Size:
    """Maxima of a row where programs score ``run`` columns each."""
    return (width + run - 1) // run * tile


class DenseTiles(NamedTuple):
    """How the dense scorer is launched: positions and rows a product, warps, pipeline depth."""

    tile: int
    pair: int
    warps: int
    stages: int


class TileMaxima(NamedTuple):
    """What the dense scorer keeps of a row: ``share`` maxima of every ``tile`` positions, ``whole``
    in all."""

    tile: int
    share: int
    whole: Size


# Rows of a batch item up to which the dense scorer waits for keys, not for products.
FEW_DENSE_ROWS = 4


def choose_dense_tiles(
    heads: int, dim: int, dtype: torch.dtype, memory: int, rows: Size
) -> DenseTiles:
    """Launch for padded ``heads`` and ``dim`` within ``memory`` bytes of shared memory.

    Args:
        rows: of a batch item.
    """
    size = dtype.itemsize
    if size == 4:
        return DenseTiles(32 if heads * dim <= 4096 else 16, 1, 4, 1)
    choices = [DenseTiles(64, 1, 4, 3)]
    if heads <= 64:
        # A wide product reads less shared memory for its work; one of 128 columns leaves registers
        # for a second program, whose products fill this one's sums (on an H200, 32 and 64 heads).
        pair = max(1, min(4, 128 // heads))
        wide = DenseTiles(128, pair, 4, 3 if size == 1 else 2)
        choices = [wide, DenseTiles(128, 2 if size == 1 else 1, 4, 3), DenseTiles(128, 1, 4, 3)]
        if isinstance(rows, int) and rows <= FEW_DENSE_ROWS:
            # More programs at a time, and no products of rows that are not there.
            choices = [DenseTiles(128, 1, 4, 2)]
    for choice in choices:
        room = memory - 4096 - choice.tile * dim * size
        stages = room // (choice.pair * heads * dim * size)
        if stages >= 2:
            return choice._replace(stages=min(choice.stages, stages))
    return DenseTiles(32, 1, 4, 1)


def group_rows(rows: Size, positions: Size, tile: int, device: int | None) -> int:
    """Rows a program of :func:`dense_scores` takes, fewer where the grid would not fill the GPU."""
    tiles = bound(positions, 2**23) // tile + 1
    wanted = -(-bound(rows, 2**20) * tiles // (4 * processors(device)))
    return min(128, power_of_two(max(1, wanted)))
