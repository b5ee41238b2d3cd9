"""Sparse scores of the strict stand-in of DeepGEMM, over plain keys and over pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .strict_gemm_process import Schedule, StrictProcess
from .strict_operands import dequantized, scores_of


class StrictSparse(StrictProcess):
    """Schedules of sparse scores, and the scores by them."""

    def get_sparse_mqa_logits_metadata(
        self,
        cu_seq_len_k_start: Tensor,
        cu_seq_len_k_end: Tensor,
        num_kv_tokens: int,
        sparse_kv_block_indices: Tensor,
        qk_dtype: torch.dtype,
        sparse_block_kv: int,
        use_unaligned_ks: bool = False,
    ) -> Tensor:
        self._sparse_call("get_sparse_mqa_logits_metadata")
        self._check_indices(sparse_kv_block_indices, sparse_block_kv, qk_dtype)
        rows, blocks = sparse_kv_block_indices.shape
        self._check_bounds(rows, cu_seq_len_k_start, cu_seq_len_k_end)
        assert isinstance(num_kv_tokens, int) and 0 <= num_kv_tokens < 2**31
        self._workspace(rows)
        self._compile("metadata", blocks, sparse_block_kv, qk_dtype, use_unaligned_ks)
        places = []
        for row, ks, ke in zip(
            sparse_kv_block_indices,
            cu_seq_len_k_start.tolist(),
            cu_seq_len_k_end.tolist(),
            strict=True,
        ):
            begin = min(ks, num_kv_tokens)
            length = max(begin, min(ke, num_kv_tokens)) - begin
            count = min(blocks, -(-length // sparse_block_kv))
            if not use_unaligned_ks:
                assert length == 0 or begin % sparse_block_kv == 0, f"unaligned ks {ks}"
            start = self._prefix(row, count) * sparse_block_kv + begin % sparse_block_kv
            assert bool((start >= begin).all()) and bool((start < num_kv_tokens).all())
            place = (start[:, None] + torch.arange(sparse_block_kv)).flatten()[:length]
            assert bool((place < num_kv_tokens).all()), "only the last block may be partial"
            places.append(place)
        return self._record(
            Schedule(
                rows,
                blocks,
                sparse_block_kv,
                qk_dtype,
                use_unaligned_ks,
                num_kv_tokens,
                None,
                places,
                None,
            )
        )

    def fp8_fp4_sparse_mqa_logits(
        self,
        q: tuple[Tensor, Tensor | None],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        metadata: Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
        use_unaligned_ks: bool = False,
    ) -> Tensor:
        self._sparse_call("fp8_fp4_sparse_mqa_logits")
        (data, q_sf), (keys, kv_sf) = q, kv
        assert data.dim() == 3 and data.shape[0] > 0
        self._check_queries(data, q_sf, weights)
        self._check_sparse_heads(data)
        assert keys.dim() == 2 and keys.shape[0] > 0 and keys.is_contiguous()
        assert keys.dtype == data.dtype and keys.shape[1] == data.shape[2]
        assert kv_sf.shape == keys.shape[:1] and kv_sf.dtype == torch.int32
        assert kv_sf.is_contiguous()
        schedule = self._check_schedule(
            metadata, data.shape[0], data.dtype, num_max_sparse_blocks, sparse_block_kv
        )
        assert schedule.page is None and schedule.unaligned == use_unaligned_ks
        assert schedule.tokens == keys.shape[0], "metadata of other keys"
        assert all(t.data_ptr() % 16 == 0 for t in (data, q_sf, keys, kv_sf, weights))
        self._compile("logits", data.shape[1], sparse_block_kv, data.dtype, use_unaligned_ks)
        query, values = dequantized(data, q_sf), dequantized(keys, kv_sf)
        out = self._output(data.shape[0], num_max_sparse_blocks * sparse_block_kv)
        for row, place in enumerate(schedule.places):
            out[row, : len(place)] = scores_of(query[row], values[place], weights[row]).bfloat16()
        return out

    def get_paged_sparse_mqa_logits_metadata(
        self,
        context_lens: Tensor,
        block_table: Tensor,
        indices: Tensor,
        page_kv: int,
        sparse_kv_block_indices: Tensor,
        qk_dtype: torch.dtype,
        sparse_block_kv: int,
    ) -> Tensor:
        self._sparse_call("get_paged_sparse_mqa_logits_metadata")
        self._check_indices(sparse_kv_block_indices, sparse_block_kv, qk_dtype)
        rows, blocks = sparse_kv_block_indices.shape
        assert context_lens.numel() == rows and context_lens.dtype == torch.int32
        assert context_lens.is_contiguous() and bool((context_lens >= 0).all())
        assert block_table.dim() == 2 and block_table.shape[0] == rows and block_table.shape[1] > 0
        assert block_table.dtype == torch.int32 and block_table.stride(1) == 1
        assert indices.shape == (rows,) and indices.dtype == torch.int32
        assert indices.is_contiguous()
        assert page_kv > 0 and page_kv % sparse_block_kv == 0
        owners = indices.tolist()
        seen: set[int] = set()
        for at, owner in enumerate(owners):
            if at and owner == owners[at - 1]:
                assert torch.equal(block_table[at], block_table[at - 1]), "rows of one request"
            else:
                assert owner not in seen, "rows of one request must be consecutive"
                seen.add(owner)
        self._workspace(rows)
        self._compile("paged metadata", blocks, sparse_block_kv, page_kv, qk_dtype)
        places = []
        for row, length in zip(sparse_kv_block_indices, context_lens.tolist(), strict=True):
            count = min(blocks, -(-length // sparse_block_kv))
            ids = self._prefix(row, count)
            assert bool((ids * sparse_block_kv // page_kv < block_table.shape[1]).all())
            place = ids[:, None] * sparse_block_kv + torch.arange(sparse_block_kv)
            places.append(place.flatten()[:length])
        return self._record(
            Schedule(
                rows,
                blocks,
                sparse_block_kv,
                qk_dtype,
                False,
                None,
                page_kv,
                places,
                block_table.clone(),
            )
        )

    def fp8_fp4_paged_sparse_mqa_logits(
        self,
        q: tuple[Tensor, Tensor | None],
        kv_cache: Tensor,
        weights: Tensor,
        metadata: Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> Tensor:
        self._sparse_call("fp8_fp4_paged_sparse_mqa_logits")
        data, q_sf = q
        assert data.dim() == 4 and data.shape[0] > 0 and data.shape[1] == 1
        self._check_queries(data, q_sf, weights)
        self._check_sparse_heads(data)
        key_bytes = data.shape[3]
        assert kv_cache.dim() == 4 and kv_cache.dtype == torch.uint8
        pages, page, heads, size = kv_cache.shape
        assert pages > 0 and page % sparse_block_kv == 0 and heads == 1 and size == key_bytes + 4
        assert kv_cache.stride(1) == size and kv_cache.stride(3) == 1
        step = 128 if self.newest else 512
        assert kv_cache.stride(0) % step == 0 and kv_cache.stride(0) < 2**31
        assert kv_cache.data_ptr() % 16 == 0
        schedule = self._check_schedule(
            metadata, data.shape[0], data.dtype, num_max_sparse_blocks, sparse_block_kv
        )
        assert schedule.page == page and schedule.table is not None
        assert all(t.data_ptr() % 16 == 0 for t in (data, q_sf, weights))
        self._compile("paged logits", data.shape[2], page, sparse_block_kv, data.dtype)
        flat = torch.stack([kv_cache[n].reshape(-1) for n in range(pages)])
        keys = flat[:, : page * key_bytes].reshape(pages, page, key_bytes).view(data.dtype)
        scales = flat[:, page * key_bytes :].contiguous().view(torch.int32)
        values = dequantized(keys, scales)
        query = dequantized(data, q_sf).squeeze(1)
        out = self._output(data.shape[0], num_max_sparse_blocks * sparse_block_kv)
        for row, place in enumerate(schedule.places):
            physical = schedule.table[row].long()[place // page]
            assert bool(((physical >= 0) & (physical < pages)).all()), "a page outside the cache"
            found = values[physical, place % page]
            out[row, : len(place)] = scores_of(query[row], found, weights[row]).bfloat16()
        return out
