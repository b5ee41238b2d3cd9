"""Schemas of the canonical indexer ops, written once for every namespace that implements them.

Layouts: B batch, S query rows, T key positions, H heads, D dim, C published candidate ids,
N expanded sparse blocks, W = N * sparse_block columns. A dimension written ``B|1`` or ``S|1``
broadcasts.

``fill=None`` means -inf and ``pin_value=None`` means +inf: a schema cannot spell an infinite
default.
"""

from __future__ import annotations

_SCORES = "Tensor q, Tensor k, Tensor weights"
_ROWS = (
    "float scale=1.0, Tensor? key_scale=None, Tensor? row_start=None, Tensor? row_end=None, "
    "Tensor? mask=None, Tensor? bias=None"
)
_RANK = "float? fill=None, bool sorted=True"

SCHEMAS: dict[str, str] = {
    "indexer_select": (
        f"({_SCORES}, *, SymInt topk, {_ROWS}, Tensor? block_ids=None, int block_size=0, "
        f"bool anchored=False, {_RANK}) -> (Tensor values, Tensor indices)"
    ),
    "indexer_publish": (
        f"({_SCORES}, *, SymInt topk, SymInt num_blocks, int block_size, bool pin_newest=True, "
        f"float? pin_value=None, {_ROWS}, {_RANK}) "
        "-> (Tensor values, Tensor indices, Tensor block_values, Tensor block_indices)"
    ),
    "indexer_block_max": (
        f"({_SCORES}, *, SymInt topk, int block_size, {_ROWS}, {_RANK}) "
        "-> (Tensor values, Tensor indices, Tensor block_max)"
    ),
    "candidate_expand": (
        "(Tensor block_ids, Tensor? row_start=None, Tensor? row_end=None, *, SymInt num_positions, "
        "int block_size, int sparse_block, bool anchored=False) -> (Tensor blocks, Tensor end)"
    ),
    "candidate_columns": (
        "(Tensor blocks, Tensor? row_start=None, *, SymInt num_positions, int sparse_block, "
        "bool anchored=False) -> Tensor positions"
    ),
    "sparse_mqa_logits": (
        f"({_SCORES}, Tensor blocks, Tensor end, *, int sparse_block, {_ROWS}, "
        "bool anchored=False) -> Tensor logits"
    ),
    "topk": (
        "(Tensor logits, Tensor end, *, SymInt topk, bool sorted=True) "
        "-> (Tensor values, Tensor columns)"
    ),
    "topk_remap": (
        "(Tensor values, Tensor columns, Tensor blocks, Tensor? row_start=None, *, "
        "SymInt num_positions, int sparse_block, bool anchored=False, float? fill=None) "
        "-> (Tensor values, Tensor indices)"
    ),
}
"""Op name -> signature. The ``dsa`` and ``dsa_cpu`` namespaces carry the same signatures."""
