"""What DeepGEMM and DeepSelect ask of a call, checked once and ahead of any kernel.

Every function returns all unmet needs, each with its mend; an empty tuple means that the call is
legal. Nothing is imported, compiled or run here. The limits are those of the host and device
asserts of DeepGEMM 2.8.2 and DeepSelect 1.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from .deep_requests import (
    FP8,
    MAX_SPARSE_HEADS,
    PACKED_FP4,
    UE8M0,
    CacheRequest,
    GemmLimits,
    ScoreRequest,
    TopkRequest,
    round_up,
)

HEAD_DIM = 128
SPARSE_BLOCKS = (8, 16)
MAX_DENSE_HEADS = 128
MAX_BLOCKS = 4096
MAX_TOPK = 4096
MAX_WIDTH = 2**23 - 1
SELECT_CAPABILITIES = ((10, 0), (10, 3))


class Need(NamedTuple):
    """One unmet need of a call: what is missing, and how to mend it."""

    what: str
    mend: str


Needs = tuple[Need, ...]


def _name(capability: tuple[int, int] | None) -> str:
    return "the CPU" if capability is None else f"sm{capability[0]}{capability[1]}"


def _dtype(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def _operand_needs(request: ScoreRequest) -> list[Need]:
    needs = []
    kinds = (FP8, PACKED_FP4)
    if request.q_dtype not in kinds or request.k_dtype != request.q_dtype:
        # Graphs give packed operands to the sparse form alone.
        formats = "'fp8'" if request.sparse_block is None else "'fp8' or 'mxfp4'"
        needs.append(
            Need(
                f"queries are {_dtype(request.q_dtype)} and keys {_dtype(request.k_dtype)}; "
                "DeepGEMM multiplies float8_e4m3fn, or e2m1 packed into int8, both alike",
                f"ask for precision={formats}, or use provider='triton'",
            )
        )
    scales = (request.q_scale, request.key_scale)
    if request.q_dtype == PACKED_FP4 and scales != (torch.int32, torch.int32):
        needs.append(
            Need(
                f"MXFP4 operands come with scales {_dtype(scales[0])} and {_dtype(scales[1])}",
                "pass four UE8M0 bytes of 32 dims each, packed into an int32, for both",
            )
        )
    known = (None, torch.float32, UE8M0, torch.int32)
    for what, dtype in (("query", request.q_scale), ("key", request.key_scale)):
        if dtype not in known:
            needs.append(
                Need(
                    f"{what} scales are {_dtype(dtype)}",
                    "use float32, float8_e8m0fnu, or UE8M0 bytes packed into int32",
                )
            )
    return needs


def sparse_needs(request: ScoreRequest, limits: GemmLimits, padded: int | None = None) -> Needs:
    """Unmet needs of sparse scores.

    Args:
        request: the call; ``sparse_block`` must be set.
        limits: what the installed release takes.
        padded: heads that the kernel is given; chosen by ``limits`` when None.
    """
    needs = _operand_needs(request)
    if request.capability is None or request.capability[0] != 10:
        needs.append(
            Need(
                f"DeepGEMM has sparse scores for sm100 and sm103, not for "
                f"{_name(request.capability)}",
                "use provider='triton'",
            )
        )
    heads = limits.padded_heads(request.heads) if padded is None else padded
    if not 0 < request.heads <= MAX_SPARSE_HEADS or heads > MAX_SPARSE_HEADS:
        needs.append(
            Need(
                f"{request.heads} heads; DeepGEMM's sparse scores take 1 to {MAX_SPARSE_HEADS}",
                "use provider='triton'",
            )
        )
    if request.head_dim != HEAD_DIM:
        needs.append(
            Need(
                f"head dim {request.head_dim}; DeepGEMM's sparse scores take {HEAD_DIM}",
                "use provider='triton'",
            )
        )
    if request.sparse_block not in SPARSE_BLOCKS:
        needs.append(
            Need(
                f"sparse blocks of {request.sparse_block} columns; DeepGEMM takes 8 or 16",
                "choose sparse_block 8 or 16; it must divide the model's block size",
            )
        )
    if request.blocks is not None and round_up(request.blocks, 4) > MAX_BLOCKS:
        needs.append(
            Need(
                f"{request.blocks} sparse blocks a row; DeepGEMM takes at most {MAX_BLOCKS}",
                "choose a larger sparse_block, or use provider='triton'",
            )
        )
    if not request.ordered:
        needs.append(
            Need(
                "candidate blocks are in no order or not unique",
                "make them with candidate_expand",
            )
        )
    return tuple(needs)


def paged_needs(request: ScoreRequest, cache: CacheRequest, limits: GemmLimits) -> Needs:
    """Unmet needs of sparse scores through a block table, those of the contiguous form included."""
    # The scales lie in the cache: four UE8M0 bytes a token, whatever the call says of key scales.
    needs = list(sparse_needs(replace(request, key_scale=torch.int32), limits))
    block = request.sparse_block or 1
    if cache.page <= 0 or cache.page % block:
        needs.append(
            Need(
                f"pages of {cache.page} tokens are not whole sparse blocks of {block}",
                f"use pages of a multiple of {block} tokens",
            )
        )
    step = limits.page_alignment
    if cache.stride_bytes % step or cache.stride_bytes >= 2**31:
        needs.append(
            Need(
                f"the stride of a cache page is {cache.stride_bytes} bytes",
                f"allocate pages {round_up(cache.stride_bytes, step)} bytes apart: a multiple of "
                f"{step}, under 2**31",
            )
        )
    if cache.base_bytes % 16:
        needs.append(
            Need(
                "the first cache page does not start at a multiple of 16 bytes",
                "align the start of the cache",
            )
        )
    return tuple(needs)


def dense_needs(request: ScoreRequest, compact: bool) -> Needs:
    """Unmet needs of dense scores.

    Args:
        request: the call; ``sparse_block`` is not looked at.
        compact: the installed release counts columns from a row's start, which is also the release
            whose SM100 form is known here.
    """
    needs = _operand_needs(request)
    major = 0 if request.capability is None else request.capability[0]
    heads, dim = request.heads, request.head_dim
    if major not in (9, 10):
        needs.append(
            Need(
                "DeepGEMM has dense scores for sm90 and sm100, not for "
                f"{_name(request.capability)}",
                "use provider='triton', or 'cpu'",
            )
        )
    if major == 9 and heads not in (32, 64):
        needs.append(
            Need(
                f"{heads} heads; DeepGEMM's dense scores take 32 or 64 on sm90",
                "use provider='triton'",
            )
        )
    if major == 9 and request.q_dtype == PACKED_FP4:
        needs.append(Need("MXFP4 on sm90", "ask for precision='fp8'"))
    if major == 9 and request.key_scale in (UE8M0, torch.int32):
        needs.append(
            Need(
                f"key scales are {_dtype(request.key_scale)} on sm90",
                "pass one float32 scale a key",
            )
        )
    if major == 10 and not compact:
        needs.append(
            Need(
                "this release of DeepGEMM has no dense scores for sm100 that are known here",
                "install DeepGEMM 2.8.2 or newer",
            )
        )
    if major == 10 and not 0 < heads <= MAX_DENSE_HEADS:
        needs.append(
            Need(
                f"{heads} heads; DeepGEMM's dense scores take at most {MAX_DENSE_HEADS}",
                "use provider='triton'",
            )
        )
    dims = (64, 128) if request.q_dtype == PACKED_FP4 else (32, 64, 128)
    if dim not in dims:
        needs.append(
            Need(
                f"head dim {dim}; DeepGEMM's dense scores take {', '.join(map(str, dims))}",
                "use provider='triton'",
            )
        )
    return tuple(needs)


def topk_needs(request: TopkRequest) -> Needs:
    """Unmet needs of DeepSelect's top-k."""
    needs = []
    if request.capability not in SELECT_CAPABILITIES:
        needs.append(
            Need(
                f"DeepSelect holds code for sm100 and sm103, not for {_name(request.capability)}",
                "use provider='triton'",
            )
        )
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        needs.append(
            Need(f"scores are {_dtype(request.dtype)}", "rank bfloat16, float16 or float32 scores")
        )
    if not 0 <= request.topk <= MAX_TOPK:
        needs.append(
            Need(
                f"topk = {request.topk}; DeepSelect selects at most {MAX_TOPK}",
                "choose a smaller k, or use provider='reference'",
            )
        )
    if request.width is not None and request.width > MAX_WIDTH:
        needs.append(
            Need(
                f"rows of {request.width} columns; DeepSelect takes fewer than 2**23",
                "score candidates only, or use provider='reference'",
            )
        )
    return tuple(needs)


def describe(subject: str, needs: Needs) -> str:
    """One message that lists every need of ``subject``."""
    return "\n".join([f"{subject}:", *(f"  - {need.what}; {need.mend}" for need in needs)])
