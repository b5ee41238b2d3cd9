"""Calls of DeepGEMM and DeepSelect before they are made, and limits of the releases that take them.

A request holds what is known of a call when the graph is compiled; ``deep_needs`` says what it
lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FP8 = torch.float8_e4m3fn
PACKED_FP4 = torch.int8
UE8M0 = torch.float8_e8m0fnu
MAX_SPARSE_HEADS = 32


@dataclass(frozen=True)
class GemmLimits:
    """What differs between releases of DeepGEMM.

    Attributes:
        any_heads: sparse scores take every multiple of 4 heads up to 32; otherwise exactly 32.
        page_alignment: bytes that the stride of a cache page must be a multiple of.
    """

    any_heads: bool = True
    page_alignment: int = 128

    def padded_heads(self, heads: int) -> int:
        """Heads that the sparse kernel is given for ``heads`` real ones."""
        return round_up(heads, 4) if self.any_heads else MAX_SPARSE_HEADS


@dataclass(frozen=True)
class ScoreRequest:
    """A call of the scores, as far as it is known when the graph is compiled.

    Attributes:
        capability: CUDA compute capability; None is the CPU.
        q_dtype, k_dtype: float8_e4m3fn, or int8 for two packed e2m1 values a byte (MXFP4).
        heads, head_dim: of the queries; ``head_dim`` counts values, also where two share a byte.
        key_scale, q_scale: dtype of the scales; None where there are none.
        sparse_block: columns of a block; None for the dense form.
        blocks: blocks of a row; None while the size is symbolic.
        ordered: sparse blocks are ascending and unique, as ``candidate_expand`` makes them.
    """

    capability: tuple[int, int] | None
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    heads: int
    head_dim: int
    key_scale: torch.dtype | None = None
    q_scale: torch.dtype | None = None
    sparse_block: int | None = None
    blocks: int | None = None
    ordered: bool = True


@dataclass(frozen=True)
class CacheRequest:
    """The key cache of a paged call: tokens and bytes of a page, and where the pages start."""

    page: int
    stride_bytes: int
    base_bytes: int = 0


@dataclass(frozen=True)
class TopkRequest:
    """A call of top-k: dtype of the scores, k, and columns of a row (None while symbolic)."""

    capability: tuple[int, int] | None
    dtype: torch.dtype
    topk: int
    width: int | None = None


def round_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step


def without_capability(request: ScoreRequest) -> ScoreRequest:
    """The same call on the newest device that is known: what is left is wrong with the call."""
    return replace(request, capability=(10, 0))
