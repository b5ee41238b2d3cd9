"""Every kernel compiles for every GPU it is meant for, to the instructions that make it fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS = {
    "sm_80": "choice-dense dense-bfloat16 dense-wide remap expand sparse-bfloat16 sparse-float32",
    "sm_89": "sparse-fp8 dense-fp8 dense-one-row",
    "sm_90": "choice-sparse choice-dense topk topk-wide remap expand sparse-bfloat16 "
    "sparse-float16-options sparse-fp8 sparse-largest sparse-float32 dense-bfloat16 dense-fp8 "
    "dense-one-row dense-wide",
    "sm_100": "dense-fp8 dense-wide remap expand sparse-fp8",
    "sm_120": "dense-fp8 topk-wide remap expand sparse-largest",
}
EVERY = {"sparse_kernel", "dense_scores", "select", "finish", "remap_kernel", "expand_kernel"}


@pytest.mark.parametrize("arch", CALLS)
def test_kernels_compile(arch: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A cache of its own: kernels without machine code must not be found by others.
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).with_name("compile_ptx.py")
    done = subprocess.run(
        [sys.executable, "-P", str(program), arch, *CALLS[arch].split()],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    if arch != "sm_89":
        assert EVERY <= {kernel["kernel"] for kernel in built}
    for kernel in built:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["fp64"] == 0, kernel
        check(arch, kernel)


def check(arch: str, kernel: dict[str, Any]) -> None:
    """Matrix instructions of the right kind, and 16-byte asynchronous copies of keys."""
    if kernel["kernel"] == "group_kernel":
        assert kernel["wide_loads"] > 0, kernel
    if kernel["kernel"] == "select":
        # More would mean that scores move between threads: see ``_places``.
        assert kernel["shared"] <= 16384, kernel
    if kernel["kernel"] not in ("sparse_kernel", "dense_scores"):
        return
    if "float32" in kernel["call"]:
        # IEEE products: the matrix units have none.
        assert kernel["wgmma"] == kernel["mma"] == kernel["tcgen05"] == 0, kernel
        return
    wanted = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(arch, "mma")
    assert kernel[wanted] > 0, kernel
    if arch == "sm_90":
        assert kernel["mma"] == 0 and kernel["wide_copies"] > 0, kernel
