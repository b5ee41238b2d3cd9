"""Schedules of DeepGEMM's sparse kernel, and scores by them.

A call has two steps: ``plan_sparse`` turns candidates into the kernel's schedule, which layers with
the same candidates share, and ``score_plan`` runs the kernel.

The kernel is not told how many candidates a row has: it takes ``ceil((ke - ks) / sparse_block)``
blocks. Rows may have fewer, so it is given ``ke = ks + end`` and never the row's real end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import deep_needs
from .deep_package import DeepGemm, bound, check_warm, require
from .deep_requests import PACKED_FP4, ScoreRequest, round_up, without_capability
from .deep_scales import UNIT, for_tma, head_weights, pack_ue8m0, pad_heads
from .reference import row_range

MAX_ROWS = 2**20


@dataclass(frozen=True)
class SparsePlan:
    """The kernel's schedule for one list of candidates.

    The kernel does not check that a schedule belongs to its other arguments; ``score_plan`` does,
    by what is kept here.

    Attributes:
        chunks: first row, number of rows and metadata of each launch.
        end: [B, S] int32, valid leading columns of a row.
        shape: (B, S, N) with N blocks a row, as given.
        keys: batches and positions of the keys.
        padded: blocks a row as the kernel sees them, a multiple of 4.
    """

    chunks: tuple[tuple[int, int, Tensor], ...]
    end: Tensor
    shape: tuple[int, int, int]
    keys: tuple[int, int]
    padded: int
    sparse_block: int
    dtype: torch.dtype
    unaligned: bool


def check_call(op: str, request: ScoreRequest, package: DeepGemm) -> None:
    """Raises ValueError with every unmet need of a sparse call, whatever the device."""
    unmet = deep_needs.sparse_needs(without_capability(request), package.limits)
    if unmet:
        raise ValueError(deep_needs.describe(f"{op} cannot be served by DeepGEMM", unmet))


def request_of(
    q: Tensor,
    k: Tensor,
    *,
    capability: tuple[int, int] | None,
    sparse_block: int | None,
    blocks: int | None = None,
    key_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> ScoreRequest:
    """The request that a call with these operands makes. q [..., H, D] and k [..., D]."""
    return ScoreRequest(
        capability=capability,
        q_dtype=q.dtype,
        k_dtype=k.dtype,
        heads=int(q.shape[-2]),
        head_dim=int(q.shape[-1]) * (2 if q.dtype == PACKED_FP4 else 1),
        key_scale=None if key_scale is None else key_scale.dtype,
        q_scale=None if q_scale is None else q_scale.dtype,
        sparse_block=sparse_block,
        blocks=blocks,
    )


def padded_blocks(ids: Tensor, padded: int) -> Tensor:
    """Contiguous int32 [rows, padded]: rows of ids, the last one repeated."""
    rows, have = ids.shape
    if have == padded:
        return ids.to(torch.int32).contiguous()
    out = torch.empty(rows, padded, dtype=torch.int32, device=ids.device)
    out[:, :have] = ids
    out[:, have:] = ids[:, -1:]
    return out


def launches(rows: int) -> list[tuple[int, int]]:
    """First row and number of rows of each launch: a kernel takes at most ``MAX_ROWS``."""
    return [(first, min(MAX_ROWS, rows - first)) for first in range(0, rows, MAX_ROWS)]


def plan_sparse(
    blocks: Tensor,
    end: Tensor,
    *,
    rows: tuple[int, int],
    keys: tuple[int, int],
    sparse_block: int,
    dtype: torch.dtype,
    row_start: Tensor | None = None,
    anchored: bool = False,
    package: DeepGemm | None = None,
) -> SparsePlan:
    """The schedule of candidates as ``candidate_expand`` makes them.

    Keys of several batches are laid end to end for the kernel, so a row of batch b begins at
    position ``b * T`` at the least; blocks move along, which takes unaligned rows where the sparse
    block does not divide T.

    Args:
        blocks: [B|1, S|1, N] int32 or int64, ascending and unique up to the row's last valid one.
        end: [B|1, S|1] valid leading columns of a row.
        rows: (B, S) of the queries.
        keys: (B|1, T) of the keys.
        sparse_block: 8 or 16 positions.
        dtype: of queries and keys.
        row_start: [B|1, S|1] where a row begins; only looked at when ``anchored``.
        anchored: blocks lie ``row_start % sparse_block`` further right.
        package: the bound DeepGEMM; the installed one when None.

    Raises:
        RuntimeError: a first call inside a CUDA-graph capture; see ``deep_package.check_warm``.
        ValueError: more positions in all than an int32 can count.
    """
    gemm = require(package)
    batch, count = rows
    key_batch, positions = keys
    total = key_batch * positions
    if total >= 2**31:
        raise ValueError(f"plan_sparse: {total} key positions in all; DeepGEMM counts in int32")
    device = blocks.device
    width = blocks.shape[2] * sparse_block
    low, _ = row_range(row_start if anchored else None, None, positions, device)
    base = torch.arange(batch, device=device)[:, None] * (positions if key_batch > 1 else 0)
    start = base + low
    # Never more columns than there are keys: what lies beyond the prefix that the kernel derives
    # from a clamped end would be undefined, and not hidden.
    limit = (positions - low).clamp(max=width)
    valid = torch.minimum(end.long().clamp(min=0), limit).expand(batch, count)
    shift = base + low % sparse_block
    ids = blocks.long() + torch.div(shift, sparse_block, rounding_mode="floor")[..., None]
    padded = round_up(blocks.shape[2], 4)
    ids = padded_blocks(ids.expand(batch, count, -1).flatten(0, 1), padded)
    ks = start.expand(batch, count).flatten().to(torch.int32).contiguous()
    ke = (start + valid).flatten().to(torch.int32).contiguous()
    unaligned = (anchored and row_start is not None) or (
        key_batch > 1 and positions % sparse_block != 0
    )
    option = {"use_unaligned_ks": unaligned} if unaligned or gemm.unaligned else {}
    metadata = bound(gemm.sparse_metadata)
    check_warm(gemm, device, ("metadata", padded, sparse_block, dtype, unaligned))
    chunks = []
    for first, many in launches(batch * count):
        part = slice(first, first + many)
        data = metadata(
            ks=ks[part],
            ke=ke[part],
            num_kv_tokens=total,
            sparse_indices=ids[part],
            qk_dtype=dtype,
            sparse_block_kv=sparse_block,
            **option,
        )
        chunks.append((first, many, data))
    shape = (batch, count, blocks.shape[2])
    end = valid.to(torch.int32)
    return SparsePlan(tuple(chunks), end, shape, keys, padded, sparse_block, dtype, unaligned)


def score_plan(
    plan: SparsePlan,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    package: DeepGemm | None = None,
) -> Tensor:
    """Scores of a plan's columns as the kernel leaves them.

    Args:
        plan: made for these shapes.
        q: [B, S, H, D] float8_e4m3fn, or int8 [B, S, H, D / 2].
        k: [B|1, T, D] like q.
        weights: [B, S, H], rounded to bf16.
        q_scale, key_scale: [B, S, H] and [B|1, T]: int32 with four UE8M0 bytes, float8_e8m0fnu, or
            float32 powers of two.
        package: the bound DeepGEMM; the installed one when None.

    Returns:
        bf16 [B, S, N * sparse_block]; rows are padded (``stride(1) > width``), and columns from
        ``plan.end`` on hold anything.

    Raises:
        ValueError: the plan is of other arguments, or DeepGEMM does not take the call.
        RuntimeError: a first call inside a CUDA-graph capture.
    """
    gemm = require(package)
    batch, count, blocks = plan.shape
    fits = (batch, count) == tuple(q.shape[:2]) and plan.keys == tuple(k.shape[:2])
    if not fits or plan.dtype != q.dtype:
        raise ValueError(
            f"score_plan: the plan is of {batch} x {count} rows, keys {plan.keys}, {plan.dtype}, "
            f"not of queries {tuple(q.shape)} {q.dtype} and keys {tuple(k.shape)}"
        )
    request = request_of(
        q,
        k,
        capability=None,
        sparse_block=plan.sparse_block,
        blocks=blocks,
        key_scale=key_scale,
        q_scale=q_scale,
    )
    check_call("score_plan", request, gemm)
    heads = gemm.limits.padded_heads(q.shape[2])
    query = pad_heads(q.flatten(0, 1), heads)
    scale = pack_ue8m0(q_scale, tuple(q.shape[:3]), q.device).flatten(0, 1)
    scale = pad_heads(scale, heads, UNIT)
    weight = head_weights(weights.flatten(0, 1), heads, torch.bfloat16)
    keys = for_tma(k.flatten(0, 1))
    key_scales = pack_ue8m0(key_scale, tuple(k.shape[:2]), k.device).flatten()
    option = {"use_unaligned_ks": plan.unaligned} if plan.unaligned or gemm.unaligned else {}
    logits = bound(gemm.sparse_logits)
    check_warm(gemm, q.device, ("logits", heads, plan.sparse_block, q.dtype, plan.unaligned))
    parts = []
    for first, many, metadata in plan.chunks:
        part = slice(first, first + many)
        scores = logits(
            q=(query[part], scale[part]),
            kv=(keys, key_scales),
            weights=weight[part],
            metadata=metadata,
            num_max_sparse_blocks=plan.padded,
            sparse_block_kv=plan.sparse_block,
            **option,
        )
        parts.append(scores[:, : blocks * plan.sparse_block])
    return join_rows(parts).unflatten(0, (batch, count))


def join_rows(parts: list[Tensor]) -> Tensor:
    """Rows [rows, W] of all parts together, as far apart as those of one part."""
    if len(parts) == 1:
        return parts[0]
    rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    out = parts[0].new_empty(rows, parts[0].stride(0))[:, :width]
    first = 0
    for part in parts:
        out[first : first + part.shape[0]] = part
        first += part.shape[0]
    return out
