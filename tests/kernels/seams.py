"""Makes the CPU kernels cut small problems into many pieces, or take one path, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from dsa_compile.kernels import (
    cpu_candidates,
    cpu_gather,
    cpu_plan,
    cpu_sparse,
    cpu_threads,
    cpu_topk,
)
from dsa_compile.kernels.cpu import limit_working_set

CUTS = st.fixed_dictionaries(
    {
        "budget": st.sampled_from([None, None, 1, 3000, 20000]),
        "tiny_tiles": st.booleans(),
        "path": st.sampled_from([None, "gather", "dense"]),
        "row_loop": st.booleans(),
        "sort": st.booleans(),
        "groups": st.booleans(),
        "threads": st.booleans(),
    }
)


@contextmanager
def cut(
    budget: int | None = None,
    tiny_tiles: bool = False,
    path: str | None = None,
    row_loop: bool = False,
    sort: bool = False,
    groups: bool = False,
    threads: bool = False,
) -> Iterator[None]:
    """Results must not depend on any of this.

    Args:
        budget: Bytes of the working set.
        tiny_tiles: Tiles of a few rows and columns.
        path: Score candidates always from gathered keys, or always from dense scores.
        row_loop: Hide the columns past the end row by row, as for wide rows.
        sort: Expand candidates by sorting, as when there are many more blocks than ids.
        threads: Share every piece of work, however small, among three threads.
        groups: Rank groups of columns first, as for rows much wider than k.
    """
    with ExitStack() as stack:
        if budget is not None:
            stack.enter_context(limit_working_set(budget))
        if tiny_tiles:
            for name, value in (
                ("_TILE_SCORES", 16),
                ("_TILE_HEAD_ROWS", 4),
                ("_MIN_STRIP", 5),
                ("_MAX_STRIP", 5),
                ("_GATHER_BYTES", 64),
                ("_MIN_GATHER", 6),
            ):
                stack.enter_context(patch.object(cpu_plan, name, value))
            stack.enter_context(patch.object(cpu_gather, "_PRODUCTS", 40))
        if path is not None:
            limit = 0.0 if path == "gather" else float("inf")
            stack.enter_context(patch.object(cpu_sparse, "dense_crossover", lambda h, d: limit))
        if row_loop:
            stack.enter_context(patch.object(cpu_sparse, "_ROW_LOOP_WIDTH", 0))
        if sort:
            stack.enter_context(patch.object(cpu_candidates, "_BITMAP_CELLS_PER_ID", 0))
        if groups:
            stack.enter_context(patch.object(cpu_topk, "_GROUP", 3))
            stack.enter_context(patch.object(cpu_topk, "_GROUPED_WIDTH", 3))
        if threads:
            stack.enter_context(patch.object(cpu_threads, "_MIN_OPERATIONS", 0))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(3)
        yield
