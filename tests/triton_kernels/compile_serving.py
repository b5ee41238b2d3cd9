"""Compiles the kernels of the serving ops for given GPUs on a machine without one.

    python compile_serving.py sm_90 queries-fp8 paged-mxfp4 ...    -> one JSON object a kernel

See ``compile_ptx``, whose recorder catches the launches.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def _recorder() -> Any:
    spec = importlib.util.spec_from_file_location(
        "compile_ptx", Path(__file__).with_name("compile_ptx.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _angles(rows: tuple[int, ...]) -> dict[str, Any]:
    table = _meta(4096, 32, dtype=torch.bfloat16)
    return {"cos": table, "sin": table, "positions": _int32(*rows)}


def queries(rows: int, heads: int, quant: str, rope: str = "half") -> None:
    from dsa_compile.kernels.triton_fused_q import fused_indexer_q

    fused_indexer_q(
        _meta(1, rows, heads, 128, dtype=torch.bfloat16),
        _meta(1, rows, heads),
        **_angles((1, rows)),
        rope=rope,
        hadamard=True,
        quant=quant,
        bf16_weights=True,
    )


def _cache(quant: str, page: int) -> Tensor:
    return _meta(8192, page, 132 if quant == "fp8" else 68, dtype=torch.uint8)


def keys(quant: str, page: int = 64) -> None:
    from dsa_compile.kernels.triton_key_cache import indexer_k_quant_and_cache

    indexer_k_quant_and_cache(
        _meta(4096, 128, dtype=torch.bfloat16),
        _cache(quant, page),
        _meta(4096, dtype=torch.int64),
        norm="layer",
        norm_weight=_meta(128),
        norm_bias=_meta(128),
        quant=quant,
        rope="interleaved",
        hadamard=True,
        **_angles((4096,)),
    )


def gather(quant: str) -> None:
    from dsa_compile.kernels.triton_gather import gather_indexer_k

    gather_indexer_k(_cache(quant, 64), _int32(8, 512), _int32(9), num_tokens=65536, quant=quant)


def _queries(dtype: torch.dtype, heads: int) -> tuple[Tensor, dict[str, Any]]:
    if dtype != torch.uint8:
        return _meta(64, 1, heads, 128, dtype=dtype), {}
    q = _meta(64, 1, heads, 64, dtype=torch.uint8)
    return q, {"q_scale": _meta(64, 1, heads, 4, dtype=torch.uint8)}


def paged(quant: str, dtype: torch.dtype, heads: int = 32, page: int = 64) -> None:
    from dsa_compile.kernels.triton_stored_ops import paged_sparse_mqa_logits

    q, more = _queries(dtype, heads)
    paged_sparse_mqa_logits(
        q,
        _cache(quant, page),
        _meta(64, 1, heads),
        _int32(64, 1, 2048),
        _int32(64, 1),
        _int32(64, 16384),
        sparse_block=8,
        quant=quant,
        row_end=_int32(64, 1),
        **more,
    )


def paged_all(quant: str, dtype: torch.dtype, heads: int = 64) -> None:
    from dsa_compile.kernels.triton_stored_ops import paged_mqa_logits

    q, more = _queries(dtype, heads)
    paged_mqa_logits(
        q,
        _cache(quant, 64),
        _meta(64, 1, heads),
        _int32(64, 1),
        _int32(64, 2048),
        num_positions=131072,
        quant=quant,
        **more,
    )


def packed(dtype: torch.dtype) -> None:
    from dsa_compile.kernels.triton_stored_ops import mxfp4_sparse_mqa_logits

    q, more = _queries(dtype, 32)
    mxfp4_sparse_mqa_logits(
        q,
        _meta(1, 131072, 64, dtype=torch.uint8),
        _meta(1, 131072, 4, dtype=torch.uint8),
        _meta(64, 1, 32),
        _int32(64, 1, 2048),
        _int32(64, 1),
        sparse_block=8,
        row_start=_int32(64, 1),
        anchored=True,
        **more,
    )


CALLS: dict[str, Callable[[], None]] = {
    "queries-none": lambda: queries(64, 64, "none"),
    "queries-fp8": lambda: queries(4096, 64, "fp8"),
    "queries-mxfp4": lambda: queries(1, 32, "mxfp4", "interleaved"),
    "keys-fp8": lambda: keys("fp8"),
    "keys-mxfp4": lambda: keys("mxfp4", 16),
    "gather-fp8": lambda: gather("fp8"),
    "gather-mxfp4": lambda: gather("mxfp4"),
    "paged-fp8": lambda: paged("fp8", FP8),
    "paged-fp8-bfloat16": lambda: paged("fp8", torch.bfloat16, page=16),
    "paged-all-fp8": lambda: paged_all("fp8", FP8),
    "paged-mxfp4": lambda: paged("mxfp4", torch.uint8),
    "paged-mxfp4-fp8": lambda: paged("mxfp4", FP8, 64),
    "paged-mxfp4-float32": lambda: paged("mxfp4", torch.float32),
    "paged-all-mxfp4": lambda: paged_all("mxfp4", torch.bfloat16),
    "packed-mxfp4": lambda: packed(torch.uint8),
}


def main(arch: int, labels: list[str]) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    from dsa_compile.kernels import (
        triton_fused_q,
        triton_gather,
        triton_key_cache,
        triton_stored,
    )

    tools = _recorder()
    CUDABackend.make_cubin = lambda *args: b""
    for label in labels or CALLS:
        for module in (triton_fused_q, triton_gather, triton_key_cache, triton_stored):
            module.wrap_triton = lambda kernel, label=label: tools.Recorder(kernel, label, arch)
            if hasattr(module, "rounds_by_integers"):
                module.rounds_by_integers = lambda index: arch < 89
            if hasattr(module, "fp8_products"):
                module.fp8_products = lambda index: arch >= 89
            if hasattr(module, "operands_by_lane"):
                module.operands_by_lane = lambda index: arch // 10 not in (10, 11)
            if hasattr(module, "shared_memory"):
                module.shared_memory = lambda index: tools.SHARED[arch]
        CALLS[label]()


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("sm_")), sys.argv[2:])
