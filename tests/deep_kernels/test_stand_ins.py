"""The stand-ins refuse what the real packages do: one wrong call for each line of a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .strict_deep_gemm import StrictDeepGemm
from .strict_deep_select import NAN_MARK, StrictDeepSelect
from .strict_operands import FP8

Change = Callable[[dict[str, Any]], None]


def put(name: str, value: Any) -> Change:
    """A change of one argument: a value, or a function of the right one."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value(arguments[name]) if callable(value) else value

    return change


def metadata_arguments() -> dict[str, Any]:
    return {
        "cu_seq_len_k_start": torch.zeros(2, dtype=torch.int32),
        "cu_seq_len_k_end": torch.tensor([20, 32], dtype=torch.int32),
        "num_kv_tokens": 64,
        "sparse_kv_block_indices": torch.tensor([[0, 2, 7, 7], [0, 1, 3, 5]], dtype=torch.int32),
        "qk_dtype": FP8,
        "sparse_block_kv": 8,
    }


def logits_arguments(process: StrictDeepGemm, heads: int = 32) -> dict[str, Any]:
    metadata = process.get_sparse_mqa_logits_metadata(**metadata_arguments())
    q, k = torch.randn(2, heads, 128).to(FP8), torch.randn(64, 128).to(FP8)
    unit = 0x7F7F7F7F
    return {
        "q": (q, torch.full((2, heads), unit, dtype=torch.int32)),
        "kv": (k, torch.full((64,), unit, dtype=torch.int32)),
        "weights": torch.randn(2, heads).bfloat16(),
        "metadata": metadata,
        "num_max_sparse_blocks": 4,
        "sparse_block_kv": 8,
    }


BAD_METADATA: dict[str, Change] = {
    "int64 ids": put("sparse_kv_block_indices", lambda t: t.long()),
    "strided ids": put("sparse_kv_block_indices", lambda t: t.repeat(1, 2)[:, ::2]),
    "5 ids": put("sparse_kv_block_indices", lambda t: torch.cat([t, t[:, -1:]], 1)),
    "int64 starts": put("cu_seq_len_k_start", lambda t: t.long()),
    "strided ends": put("cu_seq_len_k_end", lambda t: t.repeat_interleave(2)[::2]),
    "too few ends": put("cu_seq_len_k_end", lambda t: t[:1]),
    "block of 32": put("sparse_block_kv", 32),
    "bf16 operands": put("qk_dtype", torch.bfloat16),
    "real length": put("cu_seq_len_k_end", torch.full((2,), 64, dtype=torch.int32)),
    "descending ids": put("sparse_kv_block_indices", lambda t: t.flip(1).contiguous()),
    "holes": put("sparse_kv_block_indices", lambda t: t - 1),
    "ids out of range": put("sparse_kv_block_indices", lambda t: t + 6),
    "unaligned start": put("cu_seq_len_k_start", lambda t: t + 3),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata(name: str) -> None:
    arguments = metadata_arguments()
    StrictDeepGemm().get_sparse_mqa_logits_metadata(**arguments)
    BAD_METADATA[name](arguments)
    with pytest.raises(AssertionError):
        StrictDeepGemm().get_sparse_mqa_logits_metadata(**arguments)


BAD_LOGITS: dict[str, Change] = {
    "no query scales": put("q", lambda q: (q[0], None)),
    "float query scales": put("q", lambda q: (q[0], q[1].float())),
    "bf16 queries": put("q", lambda q: (q[0].bfloat16(), q[1])),
    "strided queries": put(
        "q", lambda q: (q[0].transpose(0, 1).contiguous().transpose(0, 1), q[1])
    ),
    "fp32 weights": put("weights", lambda w: w.float()),
    "weights off 16 bytes": put(
        "weights", lambda w: torch.nn.functional.pad(w, (0, 1))[:, : w.shape[1]]
    ),
    "float key scales": put("kv", lambda kv: (kv[0], kv[1].float())),
    "other keys": put("kv", lambda kv: (kv[0][:56], kv[1][:56])),
    "other number of blocks": put("num_max_sparse_blocks", 8),
    "other block": put("sparse_block_kv", 16),
    "other alignment": put("use_unaligned_ks", True),
    "fewer rows": put("q", lambda q: (q[0][:1], q[1][:1])),
}


@pytest.mark.parametrize("name", BAD_LOGITS)
def test_bad_logits(name: str) -> None:
    process = StrictDeepGemm()
    arguments = logits_arguments(process)
    process.fp8_fp4_sparse_mqa_logits(**arguments)
    changed = {"use_unaligned_ks": False} | arguments
    BAD_LOGITS[name](changed)
    with pytest.raises(AssertionError):
        process.fp8_fp4_sparse_mqa_logits(**changed)


def test_heads_of_each_release() -> None:
    for release, heads, legal in (("2.8.2", 4, True), ("2.8.2", 6, False), ("2.8.0", 4, False)):
        process = StrictDeepGemm(release)
        arguments = logits_arguments(process, heads)
        room = torch.zeros(2, 8, dtype=torch.bfloat16)
        arguments["weights"] = room[:, :heads]
        if legal:
            process.fp8_fp4_sparse_mqa_logits(**arguments)
        else:
            with pytest.raises(AssertionError):
                process.fp8_fp4_sparse_mqa_logits(**arguments)


def test_no_sparse_scores_before_sm100() -> None:
    with pytest.raises(AssertionError, match="arch 10"):
        StrictDeepGemm(capability=(9, 0)).get_sparse_mqa_logits_metadata(**metadata_arguments())


def test_undefined_columns_are_poison_and_rows_are_padded() -> None:
    process = StrictDeepGemm()
    out = process.fp8_fp4_sparse_mqa_logits(**logits_arguments(process))
    assert out.shape == (2, 32) and out.stride() == (512, 1)
    tail = out[0, 20:].float()
    assert bool((tail.isnan() | tail.isinf() | (tail.abs() > 1e4)).all())
    assert bool((out[0, :20].float().abs() < 1e4).all())


BAD_TOPK: dict[str, Change] = {
    "float16": put("input", lambda t: t.half()),
    "stride off": put("input", lambda t: t[:, :300].contiguous()),
    "columns apart": put("input", lambda t: t.repeat_interleave(2, 1)[:, ::2]),
    "k of 0": put("topk", 0),
    "k of 5000": put("topk", 5000),
    "int64 ends": put("end", lambda t: t.long()),
    "strided ends": put("end", lambda t: t.repeat_interleave(2)[::2]),
    "end beyond the row": put("end", lambda t: t + 512),
    "end below zero": put("end", lambda t: -t),
    "sorted twice": put("sorted_index", True),
    "sorted without values": put("return_value", False),
}


@pytest.mark.parametrize("name", BAD_TOPK)
def test_bad_topk(name: str) -> None:
    arguments = {
        "input": torch.randn(2, 512),
        "topk": 4,
        "sorted": True,
        "end": torch.tensor([512, 3], dtype=torch.int32),
        "sorted_index": False,
        "return_value": True,
    }
    StrictDeepSelect().topk(**arguments)
    BAD_TOPK[name](arguments)
    with pytest.raises(AssertionError):
        StrictDeepSelect().topk(**arguments)


def test_a_nan_leaves_a_mark_and_an_unwritten_row() -> None:
    rows = torch.randn(2, 256)
    rows[0, 200] = float("nan")
    _, index = StrictDeepSelect().topk(rows, 4, abort_when_nan_found=False)
    assert int(index[0, 0]) == NAN_MARK and int(index[0, 1]) >= 256
    _, short = StrictDeepSelect().topk(rows, 256, abort_when_nan_found=False)
    assert sorted(short[0].tolist()) == list(range(256)), "rows up to k are not checked"
