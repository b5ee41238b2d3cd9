"""What every serving op returns, and the checks on what it is given: see ``results``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import serving_validate as check
from .quantise import FP8, GROUP
from .reference import accumulator
from .results import Result, Results
from .validate import (
    FLOATS,
    INTS,
    Size,
    _at_least,
    _at_most,
    _tensor,
    check_rows,
    check_sparse,
    sparse_width,
)


def fused_indexer_q(
    q: Tensor,
    weights: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope: str = "half",
    rope_start: int = 0,
    hadamard: bool = False,
    quant: str = "none",
    pow2_scale: bool = True,
    floor: float = 1e-4,
    fold_scale: bool = True,
    softmax_scale: float = 1.0,
    head_scale: float = 1.0,
    weights_out_dtype: torch.dtype | None = None,
    bf16_weights: bool = False,
) -> Results:
    op = "fused_indexer_q"
    _tensor(op, "q", q, FLOATS, (None,) * 4, q.device, "[B, S, H, D]")
    b, s, h, d = q.shape
    _tensor(op, "weights", weights, FLOATS, (b, s, h), q.device, "[B, S, H]")
    check.check_rope(op, d, (b, s), q.device, cos, sin, positions, rope, rope_start, hadamard)
    check.check_quant(op, d, quant, floor, none=True)
    out = torch.float32 if weights_out_dtype is None else weights_out_dtype
    if out not in check.WEIGHTS_OUT:
        raise TypeError(f"{op}: weights_out_dtype must be float32 or bfloat16, got {out}")
    values, scales = _quantised((b, s, h), d, quant, q.dtype)
    low = Result((b, s, h) if bf16_weights else (0,), torch.bfloat16)
    return values, scales, Result((b, s, h), out), low


def _quantised(
    lead: tuple[Size, ...], dim: Size, quant: str, dtype: torch.dtype
) -> tuple[Result, Result]:
    """Values and scales of vectors [*lead, dim]."""
    if quant == "fp8":
        return Result((*lead, dim), FP8), Result(lead, torch.float32)
    if quant == "mxfp4":
        scales = Result((*lead, dim // GROUP), torch.uint8)
        return Result((*lead, dim // 2), torch.uint8), scales
    return Result((*lead, dim), dtype), Result((0,), torch.float32)


def indexer_k_quant(
    k: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "none",
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope: str = "half",
    rope_start: int = 0,
    hadamard: bool = False,
    quant: str = "fp8",
    pow2_scale: bool = True,
    floor: float = 1e-4,
    op: str = "indexer_k_quant",
) -> Results:
    check.check_key(op, k, norm_weight, norm_bias, norm, eps)
    n, d = k.shape
    check.check_rope(op, d, (n,), k.device, cos, sin, positions, rope, rope_start, hadamard)
    check.check_quant(op, d, quant, floor, none=False)
    return _quantised((n,), d, quant, k.dtype)


def indexer_k_quant_and_cache(
    k: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "none",
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope: str = "half",
    rope_start: int = 0,
    hadamard: bool = False,
    quant: str = "fp8",
    pow2_scale: bool = True,
    floor: float = 1e-4,
) -> Results:
    op = "indexer_k_quant_and_cache"
    indexer_k_quant(
        k,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        norm=norm,
        eps=eps,
        cos=cos,
        sin=sin,
        positions=positions,
        rope=rope,
        rope_start=rope_start,
        hadamard=hadamard,
        quant=quant,
        pow2_scale=pow2_scale,
        floor=floor,
        op=op,
    )
    check.check_cache(op, cache, k.shape[1], quant, k.device)
    _tensor(op, "slots", slots, INTS, (k.shape[0],), k.device, "[N]")
    return ()


def gather_indexer_k(
    cache: Tensor, block_table: Tensor, starts: Tensor, *, num_tokens: Size, quant: str = "fp8"
) -> Results:
    op = "gather_indexer_k"
    check.check_cache(op, cache, None, quant, cache.device)
    check.check_table(op, block_table, cache.device)
    lines = block_table.shape[0] + 1
    _tensor(op, "starts", starts, INTS, (lines,), cache.device, "[Q + 1]")
    _at_least(op, "num_tokens", num_tokens, 0)
    return _quantised((num_tokens,), check.head_dim(op, cache, quant), quant, torch.uint8)


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
) -> Results:
    op = "paged_sparse_mqa_logits"
    dim = check.check_queries(op, q, weights, q_scale, q.device)
    check.check_cache(op, cache, dim, quant, q.device)
    width = sparse_width(op, blocks, sparse_block)
    check_sparse(op, q, blocks, end)
    check.check_table(op, block_table, q.device)
    check.check_requests(op, q, block_table, requests)
    check.check_row_end(op, q, row_end)
    return (Result((q.shape[0], q.shape[1], width), accumulator(q, weights)),)


def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    row_end: Tensor,
    block_table: Tensor,
    *,
    num_positions: Size,
    quant: str = "fp8",
    scale: float = 1.0,
    q_scale: Tensor | None = None,
    requests: Tensor | None = None,
) -> Results:
    op = "paged_mqa_logits"
    dim = check.check_queries(op, q, weights, q_scale, q.device)
    check.check_cache(op, cache, dim, quant, q.device)
    check.check_row_end(op, q, row_end)
    check.check_table(op, block_table, q.device)
    check.check_requests(op, q, block_table, requests)
    _at_least(op, "num_positions", num_positions, 0)
    room = block_table.shape[1] * cache.shape[1]
    _at_most(op, "num_positions", num_positions, room, "the positions of a line of block_table")
    return (Result((q.shape[0], q.shape[1], num_positions), accumulator(q, weights)),)


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
) -> Results:
    op = "mxfp4_sparse_mqa_logits"
    dim = check.check_queries(op, q, weights, q_scale, q.device)
    check.check_quant(op, dim, "mxfp4", 1.0, none=False)
    b = q.shape[0]
    _tensor(op, "k", k, check.BYTES, (b, None, dim // 2), q.device, "[B|1, T, D/2]", broadcast=1)
    sizes = (k.shape[0], k.shape[1], dim // GROUP)
    _tensor(op, "k_scale", k_scale, check.BYTES, sizes, q.device, "[B|1, T, D/32]")
    width = sparse_width(op, blocks, sparse_block)
    check_sparse(op, q, blocks, end)
    for name, bound in (("row_start", row_start), ("row_end", row_end)):
        check_rows(op, name, bound, q.device)
        _tensor(op, name, bound, INTS, q.shape[:2], q.device, "[B|1, S|1]", broadcast=2)
    return (Result((q.shape[0], q.shape[1], width), accumulator(q, weights)),)


SERVING_RESULTS: dict[str, Callable[..., Results]] = {
    "fused_indexer_q": fused_indexer_q,
    "indexer_k_quant": indexer_k_quant,
    "indexer_k_quant_and_cache": indexer_k_quant_and_cache,
    "gather_indexer_k": gather_indexer_k,
    "paged_sparse_mqa_logits": paged_sparse_mqa_logits,
    "paged_mqa_logits": paged_mqa_logits,
    "mxfp4_sparse_mqa_logits": mxfp4_sparse_mqa_logits,
}
