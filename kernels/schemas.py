"""Schemas of the canonical indexer ops, written once for every namespace that implements them.

Sizes: B batch, S query rows, T key positions, H heads, D dim, C published candidate ids, N expanded
sparse blocks, W = N * sparse_block columns. ``B|1`` and ``S|1`` broadcast.

Arguments of every scoring op:

- ``q`` [B, S, H, D], ``k`` [B|1, T, D], ``weights`` [B, S, H]: fp16, bf16, fp32 or fp64, not
  necessarily the same.
- ``scale``: a number; ``key_scale`` [B|1, T] float.
- ``row_start``, ``row_end`` [B|1, S|1] int32 or int64: the half-open range that a row sees, clamped
  to [0, T].
- ``mask`` [B|1, S|1, T] bool, True where visible; ``bias`` [B|1, S|1, T] float. In
  ``sparse_mqa_logits`` both are given at the columns: [B|1, S|1, W].

``logit(t, s) = scale * key_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]) + bias[t, s]``
(the lightning indexer of DeepSeek-V3.2 and V4.1), in fp32, or fp64 when q, k or weights is fp64.

Candidates: ``block_ids`` [B|1, S|1, C] int32 or int64 name blocks of ``block_size`` positions,
counted from 0, or with ``anchored`` from the row's own start. Ids out of range are ignored, double
ones are harmless. ``blocks`` [B|1, S|1, N] are such ids in units of ``sparse_block``, ascending;
``end`` [B|1, S|1] says how many leading columns of a row are valid.

Results: ``values`` in the dtype of the scores, descending (NaN first, equal ones by position);
``indices`` and ``positions`` int64; ``columns``, ``blocks`` and ``end`` int32; block scores like
values, their indices int64. A slot that found nothing, or nothing but -inf, has the value ``fill``
and comes last. Its index is a position hidden from the row, in range and distinct, the largest
first; its column is -1. With ``sorted=False`` callers promise to read no order but that.

``fill=None`` means -inf and ``pin_value=None`` means +inf: a schema cannot spell an infinite
default. Results are new, contiguous, on the device of the first argument, and have no gradient.

Errors: ``TypeError`` for a dtype, ``ValueError`` for a shape, a device or a number; each names the
op and the argument. ``topk`` may not exceed T in a dense selection, since every slot needs a
position of its own; in ``topk`` it may exceed W.
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
