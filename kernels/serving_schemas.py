"""Schemas of the ops around the indexer's scores in a serving engine.

Sizes: B batch, S query rows, H heads, D dim, R rotary dims, N tokens, Q requests, P pages of a
request, W columns. ``B|1`` and ``S|1`` broadcast.

Rotation: the R dims from ``rope_start`` on are rotated by angles whose cosines and sines are
``cos`` and ``sin``: tables [positions, R/2] with ``positions`` (clamped into the table), or one
line a row. ``rope`` says which dims are a pair: ``"half"`` dims i and i + R/2, ``"interleaved"``
dims 2i and 2i + 1, ``"deinterleaved"`` reads the latter and writes the former. Without ``cos``
nothing is rotated. ``hadamard`` then multiplies by the orthonormal Hadamard matrix of order D.
Every stage computes in fp32 (fp64 for fp64) and rounds its result to the dtype of its input.

Formats: ``quant`` is ``"fp8"`` (float8_e4m3fn, one scale for all D dims, D at most 128; a power of
two with ``pow2_scale``, never below ``floor / 448``) or ``"mxfp4"`` (uint8 [.., D/2] and UE8M0
scales uint8 [.., D/32]); ``quantise`` defines both.

``fused_indexer_q``: ``q`` [B, S, H, D], ``weights`` [B, S, H]; ``cos`` and ``sin`` with
``positions`` [B|1, S|1] or themselves [B|1, S|1, R/2]. Results: q, rotated and quantised (with
``quant="none"`` in its own dtype); its scales, fp32 [B, S, H] for fp8, uint8 [B, S, H, D/32] for
MXFP4, else empty; ``weights * q_scale * softmax_scale * head_scale``, multiplied from left to right
in fp32, the q scale only for fp8 with ``fold_scale``, in ``weights_out_dtype`` (None: fp32; or
bf16); the same in bf16 with ``bf16_weights``, else empty. bf16 weights are the fp32 result rounded
once.

A cache is uint8 [pages, page, bytes of a token], D + 4 for fp8, D/2 + D/32 for MXFP4; pages may lie
apart. Within a page the values of all its tokens come first, then all their scales: the last
dimension measures, it does not address.

``indexer_k_quant_and_cache`` normalises (``norm``: ``"layer"`` or ``"rms"``, with ``norm_weight``
and ``norm_bias`` [D]), rotates and quantises keys ``k`` [N, D] and writes key n to token
``slots[n] % page`` of page ``slots[n] // page``; a slot out of range, as -1, writes nothing.
``indexer_k_quant`` returns values [N, ..] and scales instead (fp8: fp32 [N]).
``gather_indexer_k`` is the inverse for a prefill: token t of the workspace is position
``t - starts[r]`` of the request r with ``starts[r] <= t < starts[r + 1]``, read through
``block_table`` [Q, P]; ``starts`` [Q + 1] ascends. What no request has, or no page of the cache
holds, is zero.

``paged_sparse_mqa_logits`` scores columns of candidates, ``blocks`` [B|1, S|1, n] and ``end``
[B|1, S|1] as ``candidate_expand`` gives them, ``paged_mqa_logits`` all of ``num_positions``
positions, through ``block_table`` [Q, P] (``requests`` [B|1, S|1] says which line is a row's; None:
that of its batch item). A row sees the positions below ``row_end`` [B|1, S|1] whose page is in the
cache; the rest, and columns from ``end`` on, is -inf. ``q`` is of any float dtype, fp8 with its
scales in the weights, or packed MXFP4 with ``q_scale`` uint8 [B, S, H, D/32].
``mxfp4_sparse_mqa_logits`` is ``sparse_mqa_logits`` of packed keys ``k`` [B|1, T, D/2] with
``k_scale`` [B|1, T, D/32]. Scores are fp32 (fp64 where q or weights is fp64).

Errors: ``TypeError`` for a dtype, ``ValueError`` for a shape, a device, a number or a name; each
names the op and the argument.
"""

from __future__ import annotations

_ROPE = (
    "Tensor? cos=None, Tensor? sin=None, Tensor? positions=None, "
    'str rope="half", int rope_start=0, bool hadamard=False'
)
_KEY = (
    'Tensor? norm_weight=None, Tensor? norm_bias=None, str norm="none", float eps=1e-6, '
    f'{_ROPE}, str quant="fp8", bool pow2_scale=True, float floor=1e-4'
)
_PAGED = 'str quant="fp8", float scale=1.0, Tensor? q_scale=None, Tensor? requests=None'

SERVING_SCHEMAS: dict[str, str] = {
    "fused_indexer_q": (
        f'(Tensor q, Tensor weights, *, {_ROPE}, str quant="none", bool pow2_scale=True, '
        "float floor=1e-4, bool fold_scale=True, float softmax_scale=1.0, float head_scale=1.0, "
        "ScalarType? weights_out_dtype=None, bool bf16_weights=False) "
        "-> (Tensor q_out, Tensor q_scale, Tensor weights_out, Tensor weights_bf16)"
    ),
    "indexer_k_quant": f"(Tensor k, *, {_KEY}) -> (Tensor values, Tensor scales)",
    "indexer_k_quant_and_cache": f"(Tensor k, Tensor(a!) cache, Tensor slots, *, {_KEY}) -> ()",
    "gather_indexer_k": (
        "(Tensor cache, Tensor block_table, Tensor starts, *, SymInt num_tokens, "
        'str quant="fp8") -> (Tensor values, Tensor scales)'
    ),
    "paged_sparse_mqa_logits": (
        "(Tensor q, Tensor cache, Tensor weights, Tensor blocks, Tensor end, Tensor block_table, "
        f"*, int sparse_block, {_PAGED}, Tensor? row_end=None) -> Tensor logits"
    ),
    "paged_mqa_logits": (
        "(Tensor q, Tensor cache, Tensor weights, Tensor row_end, Tensor block_table, *, "
        f"SymInt num_positions, {_PAGED}) -> Tensor logits"
    ),
    "mxfp4_sparse_mqa_logits": (
        "(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor blocks, Tensor end, *, "
        "int sparse_block, float scale=1.0, Tensor? q_scale=None, Tensor? row_start=None, "
        "Tensor? row_end=None, bool anchored=False) -> Tensor logits"
    ),
}
"""Op name -> signature, in ``dsa``, ``dsa_cpu`` and ``dsa_triton`` alike."""
