"""Dense scores of the strict stand-in of DeepGEMM, in the forms of its releases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .strict_gemm_process import StrictProcess
from .strict_operands import FP8, dequantized, logical_dim, poison, scores_of


class StrictDense(StrictProcess):
    """Scores of all columns of a row's range, counted from its start or by position."""

    def _dense(
        self,
        q: Tensor,
        q_sf: Tensor | None,
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        ks: Tensor,
        ke: Tensor,
        columns: int,
        compact: bool,
    ) -> Tensor:
        keys, kv_sf = kv
        major = self.capability[0]
        rows, heads, _ = q.shape
        assert major in (9, 10) and (q_sf is not None) == (major == 10)
        if major == 10:
            self._check_queries(q, q_sf, weights)
            assert 0 < heads <= 128 and heads % 4 == 0
            assert logical_dim(q) in (64, 128) or (q.dtype == FP8 and logical_dim(q) == 32)
        else:
            assert q.dtype == FP8 and q.is_contiguous() and heads in (32, 64)
            assert q.shape[2] in (32, 64, 128)
            assert weights.shape == (rows, heads) and weights.dtype == torch.float32
            assert weights.stride(1) == 1 and weights.stride(0) * 4 % 16 == 0
        assert keys.dim() == 2 and keys.dtype == q.dtype and keys.is_contiguous()
        assert keys.shape[1] == q.shape[2] and kv_sf.shape == keys.shape[:1]
        assert kv_sf.dtype == (torch.int32 if major == 10 else torch.float32)
        assert kv_sf.is_contiguous()
        self._check_bounds(rows, ks, ke)
        assert columns > 0
        assert all(t.data_ptr() % 16 == 0 for t in (q, keys, kv_sf, weights))
        self._compile("dense", heads, q.shape[2], q.dtype)
        dtype = torch.bfloat16 if major == 10 else torch.float32
        stride = -(-columns // 512) * 512
        out = poison((rows + -rows % 4, stride), dtype)[:rows, :columns]
        query, values = dequantized(q, q_sf), dequantized(keys, kv_sf)
        for row, (low, high) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            high = min(high, keys.shape[0])
            if low >= high:
                continue
            first = 0 if compact else low
            assert first + high - low <= columns, "a row's scores run over the row"
            score = scores_of(query[row], values[low:high], weights[row])
            out[row, first : first + high - low] = score.to(dtype)
        return out

    def fp8_fp4_mqa_logits_compact(
        self,
        q: tuple[Tensor, Tensor | None],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        cu_seq_len_k_start: Tensor,
        cu_seq_len_k_end: Tensor,
        max_seqlen_k: int,
        schedule_meta: Tensor | None = None,
    ) -> Tensor:
        self.calls.append("fp8_fp4_mqa_logits")
        assert schedule_meta is None
        return self._dense(
            *q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, True
        )

    def _by_position(
        self,
        q: tuple[Tensor, Tensor | None],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        ks: Tensor,
        ke: Tensor,
        clean: bool,
    ) -> Tensor:
        columns = kv[0].shape[0]
        out = self._dense(*q, kv, weights, ks, ke, columns, False)
        if clean:
            place = torch.arange(columns)
            out.masked_fill_((place < ks[:, None]) | (place >= ke[:, None]), -math.inf)
        return out

    def fp8_fp4_mqa_logits_clean(
        self,
        q: tuple[Tensor, Tensor | None],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        cu_seq_len_k_start: Tensor,
        cu_seq_len_k_end: Tensor,
        clean_logits: bool = True,
        max_seqlen_k: int = 0,
        logits_dtype: torch.dtype = torch.float32,
        schedule_meta: Tensor | None = None,
    ) -> Tensor:
        self.calls.append("fp8_fp4_mqa_logits")
        assert self.capability[0] == 9, "what this release asks for on sm100 is not known"
        assert max_seqlen_k == 0 and schedule_meta is None and logits_dtype == torch.float32
        return self._by_position(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits)

    def fp8_mqa_logits(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        cu_seq_len_k_start: Tensor,
        cu_seq_len_k_end: Tensor,
        clean_logits: bool = True,
    ) -> Tensor:
        self.calls.append("fp8_mqa_logits")
        assert isinstance(q, Tensor)
        return self._by_position(
            (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits
        )
