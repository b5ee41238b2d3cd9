"""What PyTorch takes the kernels to write to, found on a machine without a GPU.

    python find_writes.py topk remap ...    -> one JSON object a launch of these calls

See ``compile_ptx``, whose calls these are, with ``bounds`` and ``stored`` for two more.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _calls() -> Any:
    spec = importlib.util.spec_from_file_location(
        "compile_ptx", Path(__file__).with_name("compile_ptx.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reader:
    """Stands in for a kernel: looks at what a launch would write instead of launching."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        from torch._higher_order_ops.triton_kernel_wrap import (
            get_mutated_tensors,
            kernel_side_table,
        )

        def launch(*args: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            given |= {name: value for name, value in named.items() if name in self.kernel.arg_names}
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            rest = {name: value for name, value in given.items() if name not in tensors}
            kernel = kernel_side_table.add_kernel(self.kernel)
            constants = kernel_side_table.add_constant_args(rest)
            written = get_mutated_tensors(kernel, constants, tensors, {})
            twice = [
                name
                for name, value in tensors.items()
                if name not in written and any(value is tensors[other] for other in written)
            ]
            found = {"kernel": self.kernel.__name__, "written": sorted(written), "read_too": twice}
            print(json.dumps(found), flush=True)

        return launch


def _bounds(tools: Any) -> None:
    """Rows that begin and end anywhere, which the calls of ``compile_ptx`` do not have."""
    from dsa_compile.kernels.triton_expand import candidate_expand
    from dsa_compile.kernels.triton_groups import group_maxima
    from dsa_compile.kernels.triton_indexer import indexer_publish
    from dsa_compile.kernels.triton_remap import topk_remap
    from dsa_compile.kernels.triton_topk import topk_positions

    def i32(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    start, blocks = i32(1, 64), i32(1, 64, 512)
    candidate_expand(blocks, start, start, num_positions=65536, block_size=16, sparse_block=8)
    scores = torch.empty(1, 64, 4096, device="meta")
    sizes: dict[str, Any] = {"num_positions": 65536, "sparse_block": 8, "anchored": True}
    topk_positions(scores, start, blocks, start, topk=256, **sizes)
    group_maxima(torch.empty(1, 64, 40000, device="meta"), 1024, start, start)
    topk_remap(scores[..., :32], blocks[..., :32], blocks, start, **sizes)
    q, k, weights = tools.scores(torch.bfloat16, 64, 32, 40000, 128)
    rows = {"row_start": start, "row_end": start}
    indexer_publish(q, k, weights, topk=1024, num_blocks=64, block_size=8, **rows)


def _stored() -> None:
    """Keys where they lie: all positions of pages, and candidate columns of packed keys."""
    from dsa_compile.kernels.triton_stored_ops import mxfp4_sparse_mqa_logits, paged_mqa_logits

    def meta(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, w = meta(4, 2, 32, 128, dtype=torch.bfloat16), meta(4, 2, 32, dtype=torch.float32)
    row, table = meta(4, 2, dtype=torch.int32), meta(4, 16, dtype=torch.int32)
    cache = meta(99, 64, 132, dtype=torch.uint8)
    paged_mqa_logits(q, cache, w, row[:, :1], table, num_positions=1024, requests=row)
    k, k_scale = (meta(1, 1024, n, dtype=torch.uint8) for n in (64, 4))
    blocks = meta(4, 2, 64, dtype=torch.int32)
    rows: dict[str, Any] = {"row_start": row, "row_end": row, "anchored": True}
    mxfp4_sparse_mqa_logits(q, k, k_scale, w, blocks, row, sparse_block=8, **rows)


def main(labels: list[str]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    import dsa_compile.kernels.triton  # noqa: F401 (imports every module with a kernel)

    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(driver)
    tools = _calls()
    for name, module in list(sys.modules.items()):
        if name.startswith("dsa_compile.kernels.triton_") and hasattr(module, "wrap_triton"):
            module.wrap_triton = Reader  # type: ignore[attr-defined]
    calls = {**tools.CALLS, "bounds": lambda: _bounds(tools), "stored": _stored}
    for label in labels:
        calls[label]()


if __name__ == "__main__":
    main(sys.argv[1:])
