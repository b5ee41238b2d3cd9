"""The CPU provider ``torch.ops.dsa_cpu.*``: the canonical ops, chunked, with bounded memory.

Nothing of size rows * heads * positions is ever held, and rows * positions only within
:func:`working_set`. Products run in fp32 (fp64 for fp64 inputs): low precision inputs are widened a
tile at a time, which is exact.
"""

from __future__ import annotations

from torch import Tensor

from . import cpu_candidates
from .cpu_dense import problem
from .cpu_gather import Candidates
from .cpu_plan import limit_working_set, working_set
from .cpu_select import block_maxima, select_candidates, select_dense
from .cpu_sparse import dense_crossover, sparse_logits
from .cpu_topk import best_columns, ranked
from .reference import fill_value, pin_newest_block
from .register import register

__all__ = ["LIBRARY", "dense_crossover", "limit_working_set", "working_set"]


def indexer_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_ids: Tensor | None = None,
    block_size: int = 0,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
) -> tuple[Tensor, Tensor]:
    rows = problem(q, k, weights, scale, key_scale, row_start, row_end, mask, bias)
    if block_ids is None:
        return select_dense(rows, topk, fill_value(fill))
    return select_candidates(rows, topk, fill_value(fill), block_ids, block_size, anchored)


def indexer_block_max(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    block_size: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = problem(q, k, weights, scale, key_scale, row_start, row_end, mask, bias)
    maxima, observe = block_maxima(rows, block_size, fill_value(fill))
    values, indices = select_dense(
        rows, topk, fill_value(fill), block_size=block_size, observe=observe
    )
    return values, indices, maxima


def indexer_publish(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    num_blocks: int,
    block_size: int,
    pin_newest: bool = True,
    pin_value: float | None = None,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = problem(q, k, weights, scale, key_scale, row_start, row_end, mask, bias)
    maxima, observe = block_maxima(rows, block_size, fill_value(fill))
    values, indices = select_dense(
        rows, topk, fill_value(fill), block_size=block_size, observe=observe
    )
    if pin_newest:
        maxima = pin_newest_block(maxima, rows.high, block_size, pin_value)
    flat = maxima.flatten(0, 1)
    block_values, block_indices = ranked(flat, num_blocks, keep_all=True)
    shape = (*maxima.shape[:2], num_blocks)
    return values, indices, block_values.reshape(shape), block_indices.reshape(shape)


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: int,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    return cpu_candidates.expand(
        block_ids,
        row_start,
        row_end,
        num_positions=num_positions,
        block_size=block_size,
        sparse_block=sparse_block,
        anchored=anchored,
    )


def candidate_columns(
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
) -> Tensor:
    return cpu_candidates.columns(
        blocks,
        row_start,
        num_positions=num_positions,
        sparse_block=sparse_block,
        anchored=anchored,
    )


def sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    anchored: bool = False,
) -> Tensor:
    rows = problem(q, k, weights, scale, key_scale, row_start, row_end, mask, bias)
    shape = q.shape[:2]
    candidates = Candidates(blocks.expand(*shape, -1), end.expand(shape), sparse_block, anchored)
    return sparse_logits(rows, candidates)


def topk(logits: Tensor, end: Tensor, *, topk: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
    return best_columns(logits, end.expand(logits.shape[:2]), topk)


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
) -> tuple[Tensor, Tensor]:
    return cpu_candidates.remap(
        values,
        columns,
        blocks,
        row_start,
        num_positions=num_positions,
        sparse_block=sparse_block,
        anchored=anchored,
        fill=fill_value(fill),
    )


LIBRARY = register(
    "dsa_cpu",
    {
        "indexer_select": indexer_select,
        "indexer_publish": indexer_publish,
        "indexer_block_max": indexer_block_max,
        "candidate_expand": candidate_expand,
        "candidate_columns": candidate_columns,
        "sparse_mqa_logits": sparse_mqa_logits,
        "topk": topk,
        "topk_remap": topk_remap,
    },
    "CPU",
)
