"""The serving ops of the Triton provider, by name, and the kernels that they launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .triton_fused_q import fused_indexer_q, fused_q_kernel
from .triton_gather import gather_indexer_k, gather_kernel
from .triton_key_cache import indexer_k_quant, indexer_k_quant_and_cache, key_kernel
from .triton_paged import stored_kernel
from .triton_stored_ops import (
    mxfp4_sparse_mqa_logits,
    paged_mqa_logits,
    paged_sparse_mqa_logits,
)

SERVING_KERNELS: dict[str, Callable[..., Any]] = {
    "fused_indexer_q": fused_indexer_q,
    "indexer_k_quant": indexer_k_quant,
    "indexer_k_quant_and_cache": indexer_k_quant_and_cache,
    "gather_indexer_k": gather_indexer_k,
    "paged_sparse_mqa_logits": paged_sparse_mqa_logits,
    "paged_mqa_logits": paged_mqa_logits,
    "mxfp4_sparse_mqa_logits": mxfp4_sparse_mqa_logits,
}
"""Op name -> what it runs; functions that make_fx can trace, with ``out=`` forms of their own."""

SERVING_JIT_KERNELS = (fused_q_kernel, gather_kernel, key_kernel, stored_kernel)
