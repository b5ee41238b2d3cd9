"""A DeepGEMM that runs on the CPU, asserts every line of its contract and computes by reference.

What the real package leaves undefined holds poison here, so that a wrong call fails in a test. One
object is one process with one GPU: it knows the device it plays, the current stream and whether
that is being captured. ``module`` dresses it as a package whose functions are Python functions or
pybind11 functions, ``operators`` as operators of ``torch.ops``.

Releases: ``"2.8.2"``; ``"2.8.0"`` takes exactly 32 heads in its sparse form, 512-byte pages, and
has the dense form whose columns are positions; ``"2.5"`` has that dense form alone, fp8 only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .strict_gemm_dense import StrictDense
from .strict_gemm_sparse import StrictSparse


class StrictDeepGemm(StrictSparse, StrictDense):
    """One DeepGEMM process: the functions of its release, and the ways to reach them."""

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
