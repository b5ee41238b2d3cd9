"""The canonical ops ``torch.ops.dsa.*``, backed by the plain PyTorch reference on every device."""

from __future__ import annotations

from . import reference, reference_sparse
from .register import register

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
