"""Indexer scores of candidate columns through DeepGEMM on SM100: ``dsa::sparse_mqa_logits``.

``needs`` says ahead of a call whether it can be made. The kernel scores blocks and nothing else;
what it does not know (row bounds, masks, bias, a score scale, key scales that are no powers of two)
is applied to its result in fp32, at the candidate columns. Scores come out of it in bf16, from bf16
head weights: ties are normal. Importing needs no DeepGEMM. The paged form is in ``deep_paged``, the
dense one in ``deep_dense``, schedules that layers share in ``deep_plan``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .deep_package import DeepGemm, find, needs, require
from .deep_plan import SparsePlan, check_call, plan_sparse, request_of, score_plan
from .deep_requests import FP8
from .reference import NEG_INF, row_range

__all__ = ["find", "mxfp4_sparse_mqa_logits", "needs", "sparse_mqa_logits", "warm_up"]


def _key_scale_at(key_scale: Tensor, start: Tensor, sparse_block: int) -> Tensor:
    """float32 key scales at the columns of blocks that begin at ``start`` [B, S, N]."""
    padded = torch.nn.functional.pad(key_scale.float(), (0, sparse_block))
    windows = padded.unfold(1, sparse_block, 1)
    batch = torch.arange(start.shape[0], device=start.device)[:, None, None]
    batch = batch if key_scale.shape[0] > 1 else torch.zeros_like(batch)
    return windows[batch, start.clamp(0, key_scale.shape[1])].flatten(-2)


def check_sparse(
    q: Tensor,
    k: Tensor,
    blocks: Tensor,
    sparse_block: int,
    key_scale: Tensor | None,
    q_scale: Tensor | None,
    package: DeepGemm,
) -> None:
    """Raises ValueError with every unmet need of a call with these operands."""
    request = request_of(
        q,
        k,
        capability=None,
        sparse_block=sparse_block,
        blocks=blocks.shape[2],
        key_scale=key_scale,
        q_scale=q_scale,
    )
    check_call("sparse_mqa_logits", request, package)


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
    q_scale: Tensor | None = None,
    plan: SparsePlan | None = None,
    package: DeepGemm | None = None,
) -> Tensor:
    """Scores of candidate columns; see ``dsa::sparse_mqa_logits``.

    The kernel scores blocks and nothing else: ``scale``, a float32 ``key_scale`` (any value, not
    only powers of two), ``bias``, ``mask`` and the row's range are applied to its result in fp32,
    at the candidate columns.

    Args:
        q: [B, S, H, 128] float8_e4m3fn (int8 [B, S, H, 64] for MXFP4), at most 32 heads.
        k: [B|1, T, 128] like q.
        weights: [B, S, H], rounded to bf16; without the query scale if ``q_scale`` is given.
        blocks, end: as ``candidate_expand`` makes them, from the same row bounds.
        key_scale: [B|1, T] float32, or UE8M0: float8_e8m0fnu or int32 with four bytes.
        q_scale: [B, S, H] UE8M0, or float32 powers of two.
        plan: of these candidates; made when None.
        package: the bound DeepGEMM; the installed one when None.

    Returns:
        float32 [B, S, N * sparse_block], -inf where hidden and from ``end`` on.

    Raises:
        ValueError: DeepGEMM does not take the call; the message lists every unmet need.
        RuntimeError: a first call inside a CUDA-graph capture.
    """
    gemm = require(package)
    batch, count, positions = q.shape[0], q.shape[1], k.shape[1]
    width = blocks.shape[2] * sparse_block
    check_sparse(q, k, blocks, sparse_block, key_scale, q_scale, gemm)
    if 0 in (batch, count, positions, width):
        return torch.full((batch, count, width), NEG_INF, dtype=torch.float32, device=q.device)
    if plan is None:
        plan = plan_sparse(
            blocks,
            end,
            rows=(batch, count),
            keys=(k.shape[0], positions),
            sparse_block=sparse_block,
            dtype=q.dtype,
            row_start=row_start,
            anchored=anchored,
            package=gemm,
        )
    if (plan.shape, plan.sparse_block) != ((batch, count, blocks.shape[2]), sparse_block):
        raise ValueError(
            f"sparse_mqa_logits: the plan is of {plan.shape} blocks of {plan.sparse_block}, not of "
            f"{(batch, count, blocks.shape[2])} blocks of {sparse_block}"
        )
    late = key_scale is not None and key_scale.dtype == torch.float32
    inside = None if late else key_scale
    scores = score_plan(plan, q, k, weights, q_scale=q_scale, key_scale=inside, package=gemm)
    out = scores.float()
    low, high = row_range(row_start, row_end, positions, q.device)
    shift = low % sparse_block if anchored else torch.zeros_like(low)
    # Junk behind a row's last block may wrap around: those columns are hidden whatever they say.
    start = blocks.long() * sparse_block + shift[..., None]
    start = start.expand(batch, count, -1)
    if scale != 1.0:
        out = out.mul_(scale)
    if late:
        assert key_scale is not None
        out = out.mul_(_key_scale_at(key_scale, start, sparse_block))
    if bias is not None:
        out = out.add_(bias)
    first = torch.arange(blocks.shape[2], device=q.device) * sparse_block
    inner = torch.arange(sparse_block, device=q.device)
    above = torch.minimum(high[..., None] - start, plan.end[..., None] - first)
    out = out.masked_fill_((inner >= above[..., None]).flatten(-2), NEG_INF)
    if row_start is not None:
        below = (low[..., None] - start)[..., None]
        out = out.masked_fill_((inner < below).flatten(-2), NEG_INF)
    return out if mask is None else out.masked_fill_(~mask, NEG_INF)


def mxfp4_sparse_mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    sparse_block: int,
    q_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Scores of candidate columns of packed keys; see ``dsa::mxfp4_sparse_mqa_logits``.

    Args:
        q: packed like the keys, with ``q_scale``.
        options: further ones of :func:`sparse_mqa_logits`.

    Raises:
        TypeError: ``q`` is not packed.
    """
    if q.dtype != torch.uint8 or q_scale is None:
        raise TypeError(
            f"mxfp4_sparse_mqa_logits: q must be packed like the keys, got {q.dtype}; DeepGEMM "
            "multiplies operands of one format"
        )
    # DeepGEMM's own types: two values an int8, the four scales of a vector an int32.
    (values, keys), (scales, key_scales) = (
        tuple(t.contiguous().view(kind) for t in pair)
        for pair, kind in (((q, k), torch.int8), ((q_scale, k_scale), torch.int32))
    )
    return sparse_mqa_logits(
        values,
        keys,
        weights,
        blocks,
        end,
        sparse_block=sparse_block,
        q_scale=scales.squeeze(-1),
        key_scale=key_scales.squeeze(-1),
        **options,
    )


def warm_up(device: torch.device | str, package: DeepGemm | None = None) -> None:
    """Has the workspace of the sparse kernels made on the current stream.

    Call it on every stream that will be captured into a CUDA graph, before the capture. Kernels are
    compiled by the first call of each kind, which must come before a capture as well.

    Raises:
        RuntimeError: the stream is capturing already.
    """
    blocks = torch.zeros(1, 1, 4, dtype=torch.int32, device=device)
    end = torch.zeros(1, 1, dtype=torch.int32, device=device)
    plan_sparse(
        blocks,
        end,
        rows=(1, 1),
        keys=(1, 8),
        sparse_block=8,
        dtype=FP8,
        package=package,
    )
