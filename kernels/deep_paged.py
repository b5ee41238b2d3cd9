"""Sparse indexer scores through a block table: DeepGEMM's paged pair, on SM100.

A cache page holds all keys of the page and then all their scales, four UE8M0 bytes each; pages lie
``cache.stride(0)`` bytes apart. Every query, speculative ones too, is a row with a context of its
own that begins at position 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import deep_needs
from .deep_package import DeepGemm, bound, check_warm, require
from .deep_plan import join_rows, launches, padded_blocks, request_of
from .deep_requests import CacheRequest, round_up
from .deep_scales import UNIT, head_weights, pack_ue8m0, pad_heads
from .reference import NEG_INF


@dataclass(frozen=True)
class PagedPlan:
    """The kernel's schedule for one list of candidates, and what it was made for.

    Attributes:
        chunks: first row, number of rows and metadata of each launch.
        end: [R] int32, valid leading columns of a row.
        shape: (R, N) with N blocks a row, as given.
        page: tokens of a cache page.
        padded: blocks a row as the kernel sees them, a multiple of 4.
    """

    chunks: tuple[tuple[int, int, Tensor], ...]
    end: Tensor
    shape: tuple[int, int]
    page: int
    padded: int
    sparse_block: int
    dtype: torch.dtype


def cache_request(cache: Tensor) -> CacheRequest:
    """What a cache asks of the kernel; ``cache`` uint8 [pages, page, 1, D + 4]."""
    return CacheRequest(int(cache.shape[1]), int(cache.stride(0)), int(cache.data_ptr() % 16))


def plan_paged(
    blocks: Tensor,
    end: Tensor,
    block_table: Tensor,
    requests: Tensor,
    *,
    page: int,
    sparse_block: int,
    dtype: torch.dtype,
    package: DeepGemm | None = None,
) -> PagedPlan:
    """The schedule of candidates as ``candidate_expand`` makes them.

    The context that the kernel is given is a row's valid columns and not its real length, since it
    takes as many blocks as that length has.

    Args:
        blocks: [R, N] int32 or int64, logical blocks, ascending and unique.
        end: [R] valid leading columns; at most the real context.
        block_table: [R, pages of a row] int32; equal for all rows of a request.
        requests: [R] request of each row; those of one request follow each other.
        page: tokens of a cache page, a multiple of ``sparse_block``.
        dtype: of queries and keys.
        package: the bound DeepGEMM; the installed one when None.

    Raises:
        RuntimeError: a first call inside a CUDA-graph capture.
    """
    gemm = require(package)
    rows, have = blocks.shape
    padded = round_up(have, 4)
    ids = padded_blocks(blocks, padded)
    room = min(have * sparse_block, block_table.shape[1] * page)
    lengths = end.long().clamp(0, room).to(torch.int32).contiguous()
    table = block_table.to(torch.int32)
    table = table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous()
    owners = requests.to(torch.int32).contiguous()
    metadata = bound(gemm.paged_metadata)
    check_warm(gemm, blocks.device, ("paged metadata", padded, page, sparse_block, dtype))
    chunks = []
    for first, many in launches(rows):
        part = slice(first, first + many)
        data = metadata(
            context_lens=lengths[part],
            block_table=table[part],
            indices=owners[part],
            page_kv=page,
            sparse_indices=ids[part],
            qk_dtype=dtype,
            sparse_block_kv=sparse_block,
        )
        chunks.append((first, many, data))
    return PagedPlan(tuple(chunks), lengths, (rows, have), page, padded, sparse_block, dtype)


def paged_sparse_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    block_table: Tensor,
    requests: Tensor,
    *,
    sparse_block: int,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    q_scale: Tensor | None = None,
    plan: PagedPlan | None = None,
    package: DeepGemm | None = None,
) -> Tensor:
    """Scores of candidate columns of a paged cache.

    Args:
        q: [R, H, 128] float8_e4m3fn, or int8 [R, H, 64] for MXFP4; at most 32 heads.
        cache: uint8 [pages, page, 1, 128 + 4], or 64 + 4 for MXFP4; pages may lie apart.
        weights: [R, H], rounded to bf16; without the query scale if ``q_scale`` is given.
        blocks, end, block_table, requests: see :func:`plan_paged`.
        scale: applied to the kernel's scores in fp32, and after it ``bias`` and ``mask`` [R|1, W].
        q_scale: [R, H] int32 with four UE8M0 bytes, float8_e8m0fnu, or float32 powers of two.
        plan: of these candidates; made when None.
        package: the bound DeepGEMM; the installed one when None.

    Returns:
        float32 [R, N * sparse_block], -inf where hidden and from ``end`` on.

    Raises:
        ValueError: DeepGEMM does not take the call; the message lists every unmet need.
        RuntimeError: a first call inside a CUDA-graph capture.
    """
    gemm = require(package)
    rows, have = blocks.shape
    width = have * sparse_block
    bytes_of_key = q.shape[-1]
    if cache.dtype != torch.uint8 or tuple(cache.shape[2:]) != (1, bytes_of_key + 4):
        raise ValueError(
            f"paged_sparse_mqa_logits: cache must be uint8 [pages, page, 1, {bytes_of_key + 4}], "
            f"got {cache.dtype} {tuple(cache.shape)}"
        )
    if cache.stride(1) != bytes_of_key + 4 or cache.stride(3) != 1:
        raise ValueError("paged_sparse_mqa_logits: a page of the cache must be contiguous")
    call = request_of(
        q, q, capability=(10, 0), sparse_block=sparse_block, blocks=have, q_scale=q_scale
    )
    unmet = deep_needs.paged_needs(call, cache_request(cache), gemm.limits)
    if unmet:
        subject = "paged_sparse_mqa_logits cannot be served by DeepGEMM"
        raise ValueError(deep_needs.describe(subject, unmet))
    if rows == 0 or width == 0:
        return torch.full((rows, width), NEG_INF, dtype=torch.float32, device=q.device)
    if plan is None:
        plan = plan_paged(
            blocks,
            end,
            block_table,
            requests,
            page=int(cache.shape[1]),
            sparse_block=sparse_block,
            dtype=q.dtype,
            package=gemm,
        )
    made_for = (plan.shape, plan.page, plan.sparse_block, plan.dtype)
    if made_for != ((rows, have), cache.shape[1], sparse_block, q.dtype):
        raise ValueError(f"paged_sparse_mqa_logits: the plan was made for {made_for}")
    heads = gemm.limits.padded_heads(q.shape[1])
    query = pad_heads(q, heads).unsqueeze(1)
    scales = pack_ue8m0(q_scale, tuple(q.shape[:2]), q.device)
    scales = pad_heads(scales, heads, UNIT).unsqueeze(1)
    weight = head_weights(weights, heads, torch.bfloat16)
    logits = bound(gemm.paged_logits)
    check_warm(gemm, q.device, ("paged logits", heads, plan.page, sparse_block, q.dtype))
    parts = []
    for first, many, metadata in plan.chunks:
        part = slice(first, first + many)
        scores = logits(
            q=(query[part], scales[part]),
            kv_cache=cache,
            weights=weight[part],
            metadata=metadata,
            num_max_sparse_blocks=plan.padded,
            sparse_block_kv=sparse_block,
        )
        parts.append(scores[:, :width])
    out = join_rows(parts).float()
    if scale != 1.0:
        out = out.mul_(scale)
    if bias is not None:
        out = out.add_(bias)
    column = torch.arange(width, device=q.device)
    out = out.masked_fill_(column >= plan.end[:, None], NEG_INF)
    return out if mask is None else out.masked_fill_(~mask, NEG_INF)
