"""A DeepGEMM that runs on the CPU, asserts every line of its contract and computes by reference.

What the real package leaves undefined holds poison here, so that a wrong call fails in a test. One
object is one process with one GPU: it knows the device it plays, the current stream and whether
that is being captured. ``module`` dresses it as a package whose functions are Python functions or
pybind11 functions, ``operators`` as operators of ``torch.ops``.

Releases: ``"2.8.2"``; ``"2.8.0"`` takes exactly 32 heads in its sparse form, 512-byte pages, and
has the dense form whose columns are positions; ``"2.5"`` has that dense form alone, fp8 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP4 = torch.int8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What memory may hold: NaN, infinities, and large numbers of either sign."""
    kinds = torch.tensor([math.nan, math.inf, 3e38, -3e38, 1.5e4])
    return kinds[torch.randint(0, len(kinds), shape)].to(dtype)


def logical_dim(data: Tensor) -> int:
    """Values of a row: two share a byte in MXFP4."""
    return data.shape[-1] * (2 if data.dtype == FP4 else 1)


def dequantized(data: Tensor, scale: Tensor | None) -> Tensor:
    """float64 values of operands whose scales are None, float32, or packed UE8M0."""
    if data.dtype == FP4:
        byte = data.contiguous().view(torch.uint8).long()
        values = torch.stack((E2M1[byte & 15], E2M1[byte >> 4]), -1).flatten(-2).double()
    else:
        values = data.float().double()
    if scale is None:
        return values
    if scale.dtype == torch.float32:
        return values * scale.double()[..., None]
    bits = torch.stack([(scale >> shift) & 255 for shift in (0, 8, 16, 24)], -1)
    powers = torch.exp2(bits.double() - 127)
    return values * powers.repeat_interleave(values.shape[-1] // 4, -1)


def scores_of(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Exact scores [n] of one row: q [H, D], keys [n, D], weights [H], all float64."""
    return torch.einsum("hd,nd->hn", q, keys).relu().mul(weights.double()[:, None]).sum(0)


@dataclass
class Schedule:
    """What a metadata tensor was made for."""

    rows: int
    blocks: int
    sparse_block: int
    dtype: torch.dtype
    unaligned: bool
    tokens: int | None
    page: int | None
    places: list[Tensor]
    """Token of each valid column of each row; logical tokens in the paged form."""
    table: Tensor | None


@dataclass
class StrictDeepGemm:
    """One DeepGEMM process. ``calls`` names the functions that were called."""

    release: str = "2.8.2"
    capability: tuple[int, int] = (10, 0)
    max_rows: int = 2**20
    stream: str = "main"
    capturing: bool = False
    calls: list[str] = field(default_factory=list)
    workspaces: set[str] = field(default_factory=set)
    schedules: dict[int, Schedule] = field(default_factory=dict)
    compiled: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def newest(self) -> bool:
        return self.release == "2.8.2"

    def _sparse_call(self, name: str) -> None:
        self.calls.append(name)
        assert self.capability[0] == 10, "host assert: arch 10"

    def _compile(self, *kernel: Any) -> None:
        """Kernels are compiled for their constants when they are first called."""
        assert kernel in self.compiled or not self.capturing, f"{kernel} is compiled in a capture"
        self.compiled.add(kernel)

    def _workspace(self, rows: int) -> None:
        assert rows <= self.max_rows
        if self.stream not in self.workspaces:
            assert not self.capturing, "the workspace is made on first use, outside of a capture"
            self.workspaces.add(self.stream)

    def _record(self, schedule: Schedule) -> Tensor:
        key = len(self.schedules) + 1
        self.schedules[key] = schedule
        return torch.tensor([key], dtype=torch.int64).view(torch.uint8).repeat(4)

    def _schedule(self, metadata: Tensor) -> Schedule:
        assert metadata.dim() == 1 and metadata.dtype == torch.uint8 and metadata.is_contiguous()
        return self.schedules[int(metadata[:8].view(torch.int64))]

    def _check_indices(self, indices: Tensor, sparse_block: int, dtype: torch.dtype) -> None:
        assert indices.dim() == 2 and indices.shape[0] > 0
        assert indices.dtype == torch.int32 and indices.is_contiguous()
        blocks = indices.shape[1]
        assert blocks > 0 and blocks % 4 == 0 and blocks <= 4096
        assert sparse_block in (8, 16)
        assert dtype in (FP8, FP4)

    def _prefix(self, row: Tensor, count: int) -> Tensor:
        """The ids of a row that are read: unique, strictly ascending, not negative."""
        ids = row[:count].long()
        assert bool((ids >= 0).all()), f"block ids of the derived prefix: {ids.tolist()}"
        assert bool((ids[1:] > ids[:-1]).all()), f"prefix is not ascending: {ids.tolist()}"
        return ids

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
        for bounds in (cu_seq_len_k_start, cu_seq_len_k_end):
            assert bounds.shape == (rows,) and bounds.dtype == torch.int32
            assert bounds.is_contiguous() and bool((bounds >= 0).all())
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

    def _check_queries(self, q: Tensor, q_sf: Tensor | None, weights: Tensor) -> None:
        """Checks shared by every form that takes UE8M0 scales; q [..., H, D]."""
        assert q_sf is not None and q_sf.shape == q.shape[:-1]
        assert q_sf.dtype == torch.int32 and q_sf.is_contiguous()
        assert q.dtype in (FP8, FP4) and q.is_contiguous()
        rows, heads = math.prod(q.shape[:-2]), q.shape[-2]
        assert weights.shape == (rows, heads) and weights.dtype == torch.bfloat16
        assert weights.stride(1) == 1 and weights.stride(0) * 2 % 16 == 0

    def _check_sparse_heads(self, q: Tensor) -> None:
        heads = q.shape[-2]
        assert 0 < heads <= 32 and heads % 4 == 0
        assert self.newest or heads == 32, "this release takes exactly 32 heads"
        assert logical_dim(q) == 128

    def _output(self, rows: int, columns: int) -> Tensor:
        stride = -(-columns // 512) * 512
        return poison((rows + rows % 2, stride), torch.bfloat16)[:rows, :columns]

    def _check_schedule(
        self, metadata: Tensor, rows: int, dtype: torch.dtype, blocks: int, sparse_block: int
    ) -> Schedule:
        schedule = self._schedule(metadata)
        assert blocks > 0 and blocks % 4 == 0 and blocks <= 4096 and sparse_block in (8, 16)
        given = (rows, blocks, sparse_block, dtype)
        made = (schedule.rows, schedule.blocks, schedule.sparse_block, schedule.dtype)
        assert given == made, f"metadata of {made} used for {given}"
        return schedule

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
        for bounds in (ks, ke):
            assert bounds.shape == (rows,) and bounds.dtype == torch.int32
            assert bounds.is_contiguous() and bool((bounds >= 0).all())
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

    @property
    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """The functions that this release has."""
        if self.release == "2.5":
            return {"fp8_mqa_logits": self.fp8_mqa_logits}
        dense = self.fp8_fp4_mqa_logits_compact if self.newest else self.fp8_fp4_mqa_logits_clean
        return {
            "fp8_fp4_mqa_logits": dense,
            "get_sparse_mqa_logits_metadata": self.get_sparse_mqa_logits_metadata,
            "fp8_fp4_sparse_mqa_logits": self.fp8_fp4_sparse_mqa_logits,
            "get_paged_sparse_mqa_logits_metadata": self.get_paged_sparse_mqa_logits_metadata,
            "fp8_fp4_paged_sparse_mqa_logits": self.fp8_fp4_paged_sparse_mqa_logits,
        }

    def module(self, style: str = "python") -> ModuleType:
        """The package: functions with a signature, or with a docstring alone (``"pybind"``)."""
        package = ModuleType("deep_gemm")
        package.__version__ = self.release  # type: ignore[attr-defined]
        for name, function in self.functions.items():
            shown: Any = function if style == "python" else PybindFunction(name, function)
            setattr(package, name, shown)
        return package


_ANNOTATIONS = {
    "q": "tuple[torch.Tensor, Optional[torch.Tensor]]",
    "kv": "tuple[torch.Tensor, torch.Tensor]",
    "num_kv_tokens": "typing.SupportsInt",
}


class PybindFunction:
    """A callable that, like pybind11's, has no signature but the first line of its docstring."""

    def __init__(self, name: str, function: Callable[..., Tensor]) -> None:
        import inspect

        self.function = function
        parts = []
        for parameter in inspect.signature(function).parameters.values():
            part = f"{parameter.name}: {_ANNOTATIONS.get(parameter.name, 'torch.Tensor')}"
            if parameter.default is not inspect.Parameter.empty:
                part += f" = {parameter.default}"
            parts.append(part)
        self.__doc__ = f"{name}({', '.join(parts)}) -> torch.Tensor\n"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


SCHEMAS = {
    "fp8_fp4_mqa_logits": "(Tensor q, Tensor? q_sf, Tensor kv, Tensor kv_sf, Tensor weights, "
    "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, int max_seqlen_k, "
    "Tensor? schedule_meta=None) -> Tensor",
    "get_sparse_mqa_logits_metadata": "(Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, "
    "int num_kv_tokens, Tensor sparse_kv_block_indices, ScalarType qk_dtype, int sparse_block_kv, "
    "bool use_unaligned_ks=False) -> Tensor",
    "get_paged_sparse_mqa_logits_metadata": "(Tensor context_lens, Tensor block_table, "
    "Tensor indices, int page_kv, Tensor sparse_kv_block_indices, ScalarType qk_dtype, "
    "int sparse_block_kv) -> Tensor",
    "fp8_fp4_sparse_mqa_logits": "(Tensor q, Tensor? q_sf, Tensor kv, Tensor kv_sf, "
    "Tensor weights, Tensor metadata, int num_max_sparse_blocks, int sparse_block_kv, "
    "bool use_unaligned_ks=False) -> Tensor",
    "fp8_fp4_paged_sparse_mqa_logits": "(Tensor q, Tensor? q_sf, Tensor kv_cache, "
    "Tensor weights, Tensor metadata, int num_max_sparse_blocks, int sparse_block_kv) -> Tensor",
}
_TAKES_PAIRS = {"fp8_fp4_mqa_logits": 2, "fp8_fp4_sparse_mqa_logits": 2}
_TAKES_PAIRS["fp8_fp4_paged_sparse_mqa_logits"] = 1


def _flat(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    pairs = _TAKES_PAIRS.get(name, 0)

    def run(*args: Any) -> Tensor:
        paired = [(args[2 * n], args[2 * n + 1]) for n in range(pairs)]
        return function(*paired, *args[2 * pairs :])

    return run


def operators(process: StrictDeepGemm, namespace: str) -> tuple[Any, torch.library.Library]:
    """The process as operators of ``torch.ops``: the namespace, and the library that owns it."""
    library = torch.library.Library(namespace, "DEF")
    for name, function in process.functions.items():
        library.define(name + SCHEMAS[name])
        library.impl(name, _flat(name, function), "CompositeExplicitAutograd")
    return getattr(torch.ops, namespace), library
