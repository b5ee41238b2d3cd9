"""The serving ops on the CPU: the reference's arithmetic on pieces that fit the working set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import fused_q_reference, key_cache_reference
from .cpu_dense import problem
from .cpu_gather import Candidates
from .cpu_plan import working_set
from .cpu_sparse import sparse_logits
from .paged_reference import lines_of_rows, row_limits, scores_at, wide_queries
from .quantise import dequantise_mxfp4
from .reference import NEG_INF, accumulator
from .register import register
from .serving_results import SERVING_RESULTS
from .serving_results import fused_indexer_q as q_results
from .serving_schemas import SERVING_SCHEMAS

# What a rotated and quantised number takes at most, with its intermediate results.
_BYTES_A_NUMBER = 64


def _slices(count: int, bytes_each: int) -> Iterator[slice]:
    """Pieces of ``count`` things, each within the working set."""
    step = max(1, working_set() // max(1, bytes_each))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _rows(tensor: Tensor | None, part: slice, lead: tuple[int, int]) -> Tensor | None:
    """Rows of an argument [B|1, S|1, ...], flattened: [1, rows of the part, ...]."""
    if tensor is None:
        return None
    return tensor.expand(*lead, *tensor.shape[2:]).flatten(0, 1)[part][None]


def fused_indexer_q(q: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, ...]:
    outs = tuple(q.new_empty(r.shape, dtype=r.dtype) for r in q_results(q, weights, **options))
    batch, rows, heads, dim = q.shape
    lead = (batch, rows)
    angles = {name: options.pop(name, None) for name in ("cos", "sin", "positions")}
    table = angles["positions"] is not None
    for part in _slices(batch * rows, heads * dim * _BYTES_A_NUMBER):
        own: dict[str, Any] = {
            name: x if table and name != "positions" else _rows(x, part, lead)
            for name, x in angles.items()
        }
        piece = fused_q_reference.fused_indexer_q(
            _rows(q, part, lead),  # type: ignore[arg-type]
            _rows(weights, part, lead),  # type: ignore[arg-type]
            **own,
            **options,
        )
        for out, new in zip(outs, piece, strict=True):
            if out.dim() > 1:
                out.flatten(0, 1)[part] = new[0]
    return outs


def _key_pieces(k: Tensor, options: dict[str, Any]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Quantised pieces of keys."""
    table = options.get("positions") is not None
    names = ("positions",) if table else ("cos", "sin")
    for part in _slices(k.shape[0], k.shape[1] * _BYTES_A_NUMBER):
        own = {name: options[name][part] for name in names if options.get(name) is not None}
        yield part, *key_cache_reference.indexer_k_quant(k[part], **{**options, **own})


def indexer_k_quant(k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    outs = tuple(
        k.new_empty(r.shape, dtype=r.dtype)
        for r in SERVING_RESULTS["indexer_k_quant"](k, **options)
    )
    for part, *piece in _key_pieces(k, options):
        for out, new in zip(outs, piece, strict=True):
            out[part] = new
    return outs[0], outs[1]


def indexer_k_quant_and_cache(k: Tensor, cache: Tensor, slots: Tensor, **options: Any) -> None:
    if 0 in cache.shape:
        return
    quant = options.get("quant", "fp8")
    for part, values, scales in _key_pieces(k, options):
        key_cache_reference.write_slots(cache, values, scales, slots[part], quant)


def gather_indexer_k(
    cache: Tensor, block_table: Tensor, starts: Tensor, *, num_tokens: int, quant: str = "fp8"
) -> tuple[Tensor, Tensor]:
    # What is gathered is the result: nothing to cut.
    return key_cache_reference.gather_indexer_k(
        cache, block_table, starts, num_tokens=num_tokens, quant=quant
    )


def _paged(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    quant: str,
    scale: float,
    q_scale: Tensor | None,
    requests: Tensor | None,
    row_end: Tensor | None,
    columns: tuple[Tensor, Tensor, int] | None,
) -> Tensor:
    """Scores into ``out`` [B, S, W], a few columns of a few rows at a time.

    Args:
        columns: blocks, end and size of a sparse block; None: all positions.
    """
    width = out.shape[-1]
    wide = wide_queries(q, q_scale)
    heads, dim = wide.shape[2:]
    lead = (q.shape[0], q.shape[1])
    high = row_limits(q, row_end, block_table, cache.shape[1])
    lines = lines_of_rows(q, requests)
    size = 1 if columns is None else columns[2]
    # Bytes, their codes and numbers; the products of all heads.
    column_bytes = 16 * dim + 2 * accumulator(q, weights).itemsize * heads
    for cols in _slices(width // size, column_bytes * size):
        first, last = cols.start * size, cols.stop * size
        for part in _slices(lead[0] * lead[1], column_bytes * (last - first)):
            limit = _rows(high, part, lead)
            assert limit is not None
            column = torch.arange(first, last)
            if columns is None:
                position = column.expand(1, limit.shape[1], -1)
                visible = position < limit[..., None]
            else:
                blocks, end = (_rows(x, part, lead) for x in columns[:2])
                assert blocks is not None and end is not None
                ids = blocks[..., cols].long().clamp(-1, 2**31)
                position = (ids[..., None] * size + torch.arange(size)).flatten(-2)
                visible = (column < end[..., None]) & (position < limit[..., None])
            target = out.flatten(0, 1)[part, first:last]
            if not bool(visible.any()):
                target.fill_(NEG_INF)
                continue
            own = (_rows(x, part, lead) for x in (wide, weights, lines))
            own_q, own_weights, own_lines = own
            target.copy_(
                scores_at(
                    own_q,  # type: ignore[arg-type]
                    cache,
                    own_weights,  # type: ignore[arg-type]
                    block_table,
                    own_lines,  # type: ignore[arg-type]
                    position,
                    visible,
                    quant,
                    scale,
                )[0]
            )
    return out


def paged_sparse_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    block_table: Tensor,
    *,
    sparse_block: int,
    quant: str = "fp8",
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    requests: Tensor | None = None,
    row_end: Tensor | None = None,
) -> Tensor:
    width = blocks.shape[2] * sparse_block
    return _paged(
        q,
        cache,
        weights,
        block_table,
        q.new_empty((*q.shape[:2], width), dtype=accumulator(q, weights)),
        quant=quant,
        scale=scale,
        q_scale=q_scale,
        requests=requests,
        row_end=row_end,
        columns=(blocks, end, sparse_block),
    )


def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    row_end: Tensor,
    block_table: Tensor,
    *,
    num_positions: int,
    quant: str = "fp8",
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    requests: Tensor | None = None,
) -> Tensor:
    return _paged(
        q,
        cache,
        weights,
        block_table,
        q.new_empty((*q.shape[:2], num_positions), dtype=accumulator(q, weights)),
        quant=quant,
        scale=scale,
        q_scale=q_scale,
        requests=requests,
        row_end=row_end,
        columns=None,
    )


def _widened(k: Tensor, k_scale: Tensor) -> Tensor:
    """Packed keys as bf16, which holds e2m1 numbers times powers of two exactly."""
    batch, count, half = k.shape
    out = k.new_empty((batch, count, 2 * half), dtype=torch.bfloat16)
    for part in _slices(count, batch * half * _BYTES_A_NUMBER):
        out[:, part] = dequantise_mxfp4(k[:, part], k_scale[:, part])
    return out


def mxfp4_sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    anchored: bool = False,
) -> Tensor:
    wide = wide_queries(q, q_scale)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    rows = problem(wide, _widened(k, k_scale), weights, scale, None, row_start, row_end, None, None)
    lead = q.shape[:2]
    candidates = Candidates(blocks.expand(*lead, -1), end.expand(lead), sparse_block, anchored)
    return sparse_logits(rows, candidates)


SERVING_LIBRARY = register(
    "dsa_cpu",
    {
        "fused_indexer_q": fused_indexer_q,
        "indexer_k_quant": indexer_k_quant,
        "indexer_k_quant_and_cache": indexer_k_quant_and_cache,
        "gather_indexer_k": gather_indexer_k,
        "paged_sparse_mqa_logits": paged_sparse_mqa_logits,
        "paged_mqa_logits": paged_mqa_logits,
        "mxfp4_sparse_mqa_logits": mxfp4_sparse_mqa_logits,
    },
    "CPU",
    SERVING_SCHEMAS,
    SERVING_RESULTS,
    "FRAGMENT",
)
