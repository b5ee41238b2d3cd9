"""A consumer layer's selection on SM100 in one function: score candidates, select, map back.

What the kernels do not know (masks, bias, a range that begins inside a block, key scales that are
no powers of two) costs passes over the scores in fp32. Where there is none of it, scores stay in
bf16 and are looked at up to each row's end; what is left is the one pass that DeepSelect needs, in
which NaN becomes a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .deep_gemm import check_sparse, sparse_mqa_logits
from .deep_package import DeepGemm, require
from .deep_plan import SparsePlan, plan_sparse, score_plan
from .deep_select import DeepSelect, topk_remap
from .deep_select import topk as select_columns
from .reference import row_range


def visible_ends(
    blocks: Tensor, plan: SparsePlan, row_start: Tensor | None, row_end: Tensor, anchored: bool
) -> Tensor:
    """Leading columns [B, S] of each row that lie before ``row_end`` too.

    Blocks ascend, so the visible columns are a prefix; only blocks of the plan's prefix count.
    """
    size = plan.sparse_block
    low, high = row_range(row_start, row_end, plan.keys[1], blocks.device)
    start = blocks.long() * size + (low % size if anchored else torch.zeros_like(low))[..., None]
    first = torch.arange(blocks.shape[2], device=blocks.device) * size
    seen = (high[..., None] - start).clamp(0, size)
    seen = torch.where(first < plan.end[..., None], seen, 0)
    return torch.minimum(seen.sum(-1), plan.end)


def select_candidates(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    topk: int,
    sparse_block: int,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
    q_scale: Tensor | None = None,
    plan: SparsePlan | None = None,
    gemm: DeepGemm | None = None,
    select: DeepSelect | None = None,
) -> tuple[Tensor, Tensor]:
    """``dsa::sparse_mqa_logits``, ``dsa::topk`` and ``dsa::topk_remap`` in one call.

    Args:
        q, k, weights, blocks, end: as ``deep_gemm.sparse_mqa_logits``, like the options up to
            ``anchored``, ``q_scale`` and ``plan``.
        topk: at most 4,096 and at most T.
        fill, sorted: as ``dsa::topk_remap`` and ``dsa::topk``.
        gemm, select: the bound packages; the installed ones when None.

    Returns:
        values fp32 and positions int64 [B, S, topk].

    Raises:
        ValueError: a package does not take the call; the message lists every unmet need.
        RuntimeError: a first call inside a CUDA-graph capture.
    """
    package = require(gemm)
    rows, positions = (q.shape[0], q.shape[1]), k.shape[1]
    late = key_scale is not None and key_scale.dtype == torch.float32
    plain = mask is None and bias is None and not late and scale > 0
    if plain and (anchored or row_start is None) and 0 not in (*rows, positions, blocks.shape[2]):
        check_sparse(q, k, blocks, sparse_block, key_scale, q_scale, package)
        if plan is None:
            plan = plan_sparse(
                blocks,
                end,
                rows=rows,
                keys=(k.shape[0], positions),
                sparse_block=sparse_block,
                dtype=q.dtype,
                row_start=row_start,
                anchored=anchored,
                package=package,
            )
        scores = score_plan(
            plan, q, k, weights, q_scale=q_scale, key_scale=key_scale, package=package
        )
        ends = plan.end
        if row_end is not None:
            ends = visible_ends(blocks, plan, row_start, row_end, anchored)
        values, columns = select_columns(scores, ends, topk=topk, sorted=sorted, package=select)
        # A positive factor keeps the order, and -inf.
        values = values if scale == 1.0 else values * scale
    else:
        scores = sparse_mqa_logits(
            q,
            k,
            weights,
            blocks,
            end,
            sparse_block=sparse_block,
            scale=scale,
            key_scale=key_scale,
            row_start=row_start,
            row_end=row_end,
            mask=mask,
            bias=bias,
            anchored=anchored,
            q_scale=q_scale,
            plan=plan,
            package=package,
        )
        values, columns = select_columns(scores, end, topk=topk, sorted=sorted, package=select)
    return topk_remap(
        values,
        columns,
        blocks,
        row_start,
        num_positions=positions,
        sparse_block=sparse_block,
        anchored=anchored,
        fill=fill,
    )
