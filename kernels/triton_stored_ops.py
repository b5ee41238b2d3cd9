"""Scores of quantised keys where they lie: pages of a cache, or packed MXFP4 keys.

MXFP4 keys meet bf16, fp16 and fp32 queries exactly. With fp8 or packed queries of 128 dims, on GPUs
that multiply fp8 and where the four scales of every key are an aligned word, products are of 8-bit
numbers: Hopper adds those in about 22 bits, and scales further than 2**26 below the largest of a
key count as 2**-26 of it. Elsewhere they are exact, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantise import dequantise_mxfp4
from .serving_validate import head_dim
from .triton_stored import Keys, launch, pages_of
from .validate import Size


def _plain_queries(q: Tensor, q_scale: Tensor | None, quant: str) -> tuple[Tensor, Tensor | None]:
    """Packed queries for fp8 keys, which are scored in bf16, widened."""
    if q_scale is None or quant == "mxfp4":
        return q, q_scale
    # Exact: e2m1 numbers times powers of two.
    return dequantise_mxfp4(q, q_scale).to(torch.bfloat16), None


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
    **options: Any,
) -> Tensor:
    """Scores of candidate columns of a paged cache; see ``dsa::paged_sparse_mqa_logits``.

    Args:
        q: [B, S, H, D], H at most 128, D at most 256; fp16, bf16, fp32, float8_e4m3fn, or packed
            MXFP4. With an fp8 cache products run in fp8 or in q's dtype, with an MXFP4 cache in
            bf16 (fp32 for fp16 and fp32 queries); each holds both operands exactly.
        options: ``out`` [B, S, W] to write into, ``out_dtype`` (fp32 or bf16), ``tiles``.
    """
    dim = head_dim("paged_sparse_mqa_logits", cache, quant)
    q, q_scale = _plain_queries(q, q_scale, quant)
    return launch(
        "paged_sparse_mqa_logits",
        q,
        q_scale,
        weights,
        pages_of(cache, quant, dim),
        dim,
        block_table.shape[1] * cache.shape[1],
        blocks.shape[2] * sparse_block,
        mxfp4=quant == "mxfp4",
        scale=scale,
        end=end,
        blocks=blocks,
        sparse_block=sparse_block,
        block_table=block_table,
        requests=requests,
        row_end=row_end,
        **options,
    )


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
    **options: Any,
) -> Tensor:
    """Scores of all positions of a paged cache; see ``dsa::paged_mqa_logits``."""
    dim = head_dim("paged_mqa_logits", cache, quant)
    q, q_scale = _plain_queries(q, q_scale, quant)
    return launch(
        "paged_mqa_logits",
        q,
        q_scale,
        weights,
        pages_of(cache, quant, dim),
        dim,
        block_table.shape[1] * cache.shape[1],
        num_positions,
        mxfp4=quant == "mxfp4",
        scale=scale,
        end=row_end,
        block_table=block_table,
        requests=requests,
        row_end=row_end,
        **options,
    )


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
    **options: Any,
) -> Tensor:
    """Scores of candidate columns of packed keys; see ``dsa::mxfp4_sparse_mqa_logits``.

    Args:
        k, k_scale: the bytes of a key and of its scales each lie together.
    """
    op = "mxfp4_sparse_mqa_logits"
    for name, tensor in (("k", k), ("k_scale", k_scale)):
        if tensor.stride(2) != 1 and isinstance(tensor.shape[2], int) and tensor.shape[2] > 1:
            raise ValueError(f"{op}: the last dimension of {name} must be contiguous")
    by_key, by_scale = (
        (0 if t.shape[0] == 1 else t.stride(0), 0, t.stride(1)) for t in (k, k_scale)
    )
    return launch(
        op,
        q,
        q_scale,
        weights,
        Keys(k, k_scale, by_key, by_scale, 0, 1, None),
        2 * k.shape[2],
        k.shape[1],
        blocks.shape[2] * sparse_block,
        mxfp4=True,
        scale=scale,
        end=end,
        blocks=blocks,
        sparse_block=sparse_block,
        row_start=row_start,
        row_end=row_end,
        anchored=anchored,
        **options,
    )
