"""What every canonical op returns, and the checks on what it is given.

One function an op, with the op's own signature: it checks the arguments and returns shape and dtype
of every result. Fakes and kernels both go through it, so that they cannot disagree. All results are
contiguous and on the device of the first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import validate
from .reference import accumulator
from .validate import Size


class Result(NamedTuple):
    """Shape and dtype of one result."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


Results = tuple[Result, ...]


def indexer_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
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
) -> Results:
    op = "indexer_select"
    validate.check_scores(op, q, k, weights, key_scale, row_start, row_end, mask, bias, None)
    validate.check_select(op, q, k, topk, block_ids, block_size)
    shape = (q.shape[0], q.shape[1], topk)
    return Result(shape, accumulator(q, k, weights)), Result(shape, torch.int64)


def indexer_block_max(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
    block_size: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    fill: float | None = None,
    sorted: bool = True,
) -> Results:
    op = "indexer_block_max"
    validate.check_scores(op, q, k, weights, key_scale, row_start, row_end, mask, bias, None)
    validate.check_select(op, q, k, topk, None, 0)
    validate.check_publish(op, k, block_size, None)
    b, s = q.shape[:2]
    dtype = accumulator(q, k, weights)
    blocks = (k.shape[1] + block_size - 1) // block_size
    shape = (b, s, topk)
    return Result(shape, dtype), Result(shape, torch.int64), Result((b, s, blocks), dtype)


def indexer_publish(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: Size,
    num_blocks: Size,
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
) -> Results:
    op = "indexer_publish"
    validate.check_scores(op, q, k, weights, key_scale, row_start, row_end, mask, bias, None)
    validate.check_select(op, q, k, topk, None, 0)
    validate.check_publish(op, k, block_size, num_blocks)
    b, s = q.shape[:2]
    dtype = accumulator(q, k, weights)
    best, blocks = (b, s, topk), (b, s, num_blocks)
    return (
        Result(best, dtype),
        Result(best, torch.int64),
        Result(blocks, dtype),
        Result(blocks, torch.int64),
    )


def candidate_expand(
    block_ids: Tensor,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    *,
    num_positions: Size,
    block_size: int,
    sparse_block: int,
    anchored: bool = False,
) -> Results:
    op = "candidate_expand"
    b, s = validate.check_expand(
        op, block_ids, row_start, row_end, num_positions, block_size, sparse_block
    )
    width = block_ids.shape[2] * (block_size // sparse_block)
    return Result((b, s, width), torch.int32), Result((b, s), torch.int32)


def candidate_columns(
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
) -> Results:
    b, s = validate.check_columns(
        "candidate_columns", blocks, row_start, num_positions, sparse_block
    )
    return (Result((b, s, blocks.shape[2] * sparse_block), torch.int64),)


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
) -> Results:
    op = "sparse_mqa_logits"
    width = validate.sparse_width(op, blocks, sparse_block)
    validate.check_scores(op, q, k, weights, key_scale, row_start, row_end, mask, bias, width)
    validate.check_sparse(op, q, blocks, end)
    return (Result((q.shape[0], q.shape[1], width), accumulator(q, k, weights)),)


def topk(logits: Tensor, end: Tensor, *, topk: Size, sorted: bool = True) -> Results:
    validate.check_topk("topk", logits, end, topk)
    shape = (logits.shape[0], logits.shape[1], topk)
    return Result(shape, accumulator(logits)), Result(shape, torch.int32)


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: Size,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
) -> Results:
    validate.check_remap(
        "topk_remap", values, columns, blocks, row_start, num_positions, sparse_block
    )
    shape = tuple(values.shape)
    return Result(shape, accumulator(values)), Result(shape, torch.int64)


RESULTS: dict[str, Callable[..., Results]] = {
    "indexer_select": indexer_select,
    "indexer_publish": indexer_publish,
    "indexer_block_max": indexer_block_max,
    "candidate_expand": candidate_expand,
    "candidate_columns": candidate_columns,
    "sparse_mqa_logits": sparse_mqa_logits,
    "topk": topk,
    "topk_remap": topk_remap,
}
