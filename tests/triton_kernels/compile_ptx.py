"""Compiles the kernels of given calls for given GPUs on a machine without one.

Run as a program, since the interpreter and the compiler cannot serve one process. Launches are
caught where they happen, with tensors on the meta device, so that what is compiled is what the
hosts would launch: their tile sizes, their specialisations.

    python compile_ptx.py sm_90 sparse-bfloat16 remap ...    -> one JSON object a kernel

The assembler is left out: it takes as long as everything before it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one program may use."""


def scores(
    dtype: torch.dtype, rows: int, heads: int, positions: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(1, rows, heads, dim, dtype=dtype, device="meta")
    k = torch.empty(1, positions, dim, dtype=dtype, device="meta")
    return q, k, torch.empty(1, rows, heads, dtype=torch.float32, device="meta")


def _int32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device="meta")


def sparse(dtype: torch.dtype, heads: int, dim: int, full: bool = False) -> None:
    from dsa_compile.kernels.triton_sparse import sparse_mqa_logits

    q, k, w = scores(dtype, 2048, heads, 131072, dim)
    more: dict[str, Any] = (
        {"key_scale": torch.empty(1, 131072, device="meta")} if (dtype.itemsize == 1) else {}
    )
    if full:
        more["mask"] = torch.empty(1, 2048, 16384, dtype=torch.bool, device="meta")
        more["bias"] = torch.empty(1, 2048, 16384, device="meta")
        more["row_start"] = _int32(1, 2048)
        more["anchored"] = True
    end = _int32(1, 2048)
    sparse_mqa_logits(q, k, w, _int32(1, 2048, 2048), end, sparse_block=8, row_end=end, **more)


def dense(
    dtype: torch.dtype, heads: int, dim: int, rows: int = 256, positions: int = 16384
) -> None:
    from dsa_compile.kernels.triton_indexer import indexer_publish

    q, k, w = scores(dtype, rows, heads, positions, dim)
    more: dict[str, Any] = {"row_end": _int32(1, rows)}
    if dtype.itemsize == 1:
        more["key_scale"] = torch.empty(1, positions, device="meta")
    indexer_publish(q, k, w, topk=256, num_blocks=128, block_size=8, **more)


def topk(dtype: torch.dtype, rows: int, width: int, k: int, sorted: bool) -> None:
    from dsa_compile.kernels.triton_topk import topk_positions

    topk_positions(
        torch.empty(1, rows, width, dtype=dtype, device="meta"),
        _int32(1, rows),
        _int32(1, rows, width // 8),
        topk=k,
        num_positions=2**20,
        sparse_block=8,
        sorted=sorted,
    )


def remap() -> None:
    from dsa_compile.kernels.triton_remap import topk_remap

    values = torch.empty(1, 64, 512, device="meta")
    topk_remap(values, _int32(1, 64, 512), _int32(1, 64, 64), num_positions=4096, sparse_block=8)


def expand() -> None:
    from dsa_compile.kernels.triton_columns import candidate_columns
    from dsa_compile.kernels.triton_expand import candidate_expand

    blocks, _ = candidate_expand(
        _int32(1, 64, 200), None, _int32(1, 64), num_positions=4096, block_size=16, sparse_block=8
    )
    candidate_columns(blocks, num_positions=4096, sparse_block=8)


def choice(dtype: torch.dtype, positions: int) -> None:
    from dsa_compile.kernels.triton_choice import select_columns

    q, k, w = scores(dtype, 2048, 32, positions, 128)
    blocks, end = _int32(1, 2048, 2048), _int32(1, 2048)
    select_columns(q, k, w, blocks, end, topk=512, sparse_block=8, dense_below=20000)


FP8 = torch.float8_e4m3fn
CALLS: dict[str, Callable[[], None]] = {
    "sparse-bfloat16": lambda: sparse(torch.bfloat16, 32, 128),
    "sparse-float16-options": lambda: sparse(torch.float16, 64, 128, full=True),
    "sparse-float32": lambda: sparse(torch.float32, 5, 48),
    "sparse-fp8": lambda: sparse(FP8, 64, 128),
    "sparse-largest": lambda: sparse(torch.bfloat16, 128, 256),
    "dense-bfloat16": lambda: dense(torch.bfloat16, 64, 128),
    "dense-fp8": lambda: dense(FP8, 64, 128),
    "dense-wide": lambda: dense(torch.bfloat16, 32, 128, 2048, 131072),
    "dense-one-row": lambda: dense(torch.bfloat16, 32, 128, 1),
    "topk-split": lambda: topk(torch.bfloat16, 1, 65536, 64, False),
    "topk": lambda: topk(torch.float32, 2048, 16384, 512, True),
    "topk-wide": lambda: topk(torch.float32, 2048, 131072, 2048, True),
    "choice-sparse": lambda: choice(torch.bfloat16, 131072),
    "choice-dense": lambda: choice(torch.bfloat16, 16384),
    "remap": remap,
    "expand": expand,
}


def codes_together(code: str) -> bool:
    """Whether threads hold four neighbours of a key, as the widening of four bytes takes it."""
    for layout in re.findall(r"elementwise_inline_asm.*?xi8, (#\w+)>.*f8E5M2", code):
        (shape,) = re.findall(rf"^{layout} = .*", code, re.MULTILINE)
        linear = re.search(r"register = \[\[0, 0, 1\], \[0, 0, 2\]", shape)
        blocked = re.search(r"sizePerThread = \[1, 1, (4|8|16)\].*order = \[2", shape)
        if linear is None and blocked is None:
            return False
    return True


class Recorder:
    """Stands in for a kernel: compiles instead of launching."""

    def __init__(self, kernel: Any, label: str, arch: int) -> None:
        self.kernel, self.label, self.arch = kernel, label, arch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        assert all(int(n) >= 1 for n in grid), grid
        assert all(int(n) <= 65535 for n in grid[1:]), grid

        def launch(
            *args: Any,
            num_warps: int = 4,
            num_stages: int = 3,
            maxnreg: int | None = None,
            **constants: Any,
        ) -> None:
            print(json.dumps(self.compile(args, constants, num_warps, num_stages)), flush=True)

        return launch

    def compile(
        self, args: tuple[Any, ...], constants: dict[str, Any], warps: int, stages: int
    ) -> dict[str, Any]:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        signature: dict[str, str] = {}
        fixed: dict[str, Any] = {}
        aligned: dict[tuple[int], Any] = {}
        for place, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, Tensor):
                signature[name] = (
                    "*"
                    + triton.runtime.jit.type_canonicalisation_dict[
                        str(value.dtype).removeprefix("torch.")
                    ]
                )
            elif isinstance(value, float):
                # As Inductor hands them over; Triton itself takes fp32.
                signature[name] = "fp64"
            elif value == 1:
                signature[name], fixed[name] = "constexpr", 1
            else:
                signature[name] = "i32" if value < 2**31 else "i64"
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        for name, value in constants.items():
            signature[name], fixed[name] = "constexpr", value
        source = ASTSource(self.kernel, signature, constexprs=fixed, attrs=aligned)
        target = GPUTarget("cuda", self.arch, 32)
        options = {"num_warps": warps, "num_stages": stages}
        built = triton.compile(source, target=target, options=options)
        ptx = built.asm["ptx"]
        return {
            "call": self.label,
            "kernel": self.kernel.__name__,
            "arch": self.arch,
            "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
            "mma": len(re.findall(r"\bmma\.sync", ptx)),
            "tcgen05": len(re.findall(r"tcgen05\.mma", ptx)),
            "async_copies": len(re.findall(r"cp\.async\.(ca|cg)", ptx)),
            "wide_copies": len(re.findall(r"cp\.async\.cg[^;]*0x10", ptx)),
            "codes_together": codes_together(built.asm["ttgir"]),
            "e5m2_buffers": len(re.findall(r"local_alloc[^\n]*f8E5M2", built.asm["ttgir"])),
            # What narrows a number that is an argument aside.
            "fp64": len(re.findall(r"\n\s(?!cvt\.rn\.f32\.f64)\S*\.f64", ptx)),
            "wide_loads": len(re.findall(r"ld\.global[^;]*\.v4\.b32", ptx)),
            "shared": built.metadata.shared,
            "limit": SHARED[self.arch],
        }


def main(arch: int, labels: list[str]) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    import dsa_compile.kernels.triton  # noqa: F401 (imports every module with a kernel)

    CUDABackend.make_cubin = lambda *args: b""
    ours = [m for name, m in sys.modules.items() if name.startswith("dsa_compile.kernels.triton_")]
    for label in labels or CALLS:
        for module in ours:
            if hasattr(module, "wrap_triton"):
                module.wrap_triton = lambda kernel, label=label: Recorder(kernel, label, arch)
            if hasattr(module, "shared_memory"):
                module.shared_memory = lambda index: SHARED[arch]
        CALLS[label]()


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("sm_")), sys.argv[2:])
