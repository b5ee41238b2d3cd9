"""The canonical ops ``torch.ops.dsa.*``, backed by the plain PyTorch reference on every device."""

from __future__ import annotations

from . import (
    fused_q_reference,
    key_cache_reference,
    paged_reference,
    reference,
    reference_sparse,
)
from .register import register
from .serving_results import SERVING_RESULTS
from .serving_schemas import SERVING_SCHEMAS

LIBRARY = register(
    "dsa",
    {
        "indexer_select": reference.indexer_select,
        "indexer_publish": reference.indexer_publish,
        "indexer_block_max": reference.indexer_block_max,
        "candidate_expand": reference_sparse.candidate_expand,
        "candidate_columns": reference_sparse.candidate_columns,
        "sparse_mqa_logits": reference_sparse.sparse_mqa_logits,
        "topk": reference_sparse.topk,
        "topk_remap": reference_sparse.topk_remap,
    },
    "CompositeExplicitAutograd",
)

SERVING_LIBRARY = register(
    "dsa",
    {
        "fused_indexer_q": fused_q_reference.fused_indexer_q,
        "indexer_k_quant": key_cache_reference.indexer_k_quant,
        "indexer_k_quant_and_cache": key_cache_reference.indexer_k_quant_and_cache,
        "gather_indexer_k": key_cache_reference.gather_indexer_k,
        "paged_sparse_mqa_logits": paged_reference.paged_sparse_mqa_logits,
        "paged_mqa_logits": paged_reference.paged_mqa_logits,
        "mxfp4_sparse_mqa_logits": paged_reference.mxfp4_sparse_mqa_logits,
    },
    "CompositeExplicitAutograd",
    SERVING_SCHEMAS,
    SERVING_RESULTS,
    "FRAGMENT",
)
