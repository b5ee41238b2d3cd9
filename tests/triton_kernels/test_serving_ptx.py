"""The kernels of the serving ops compile for every GPU that they are meant for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Products of fp8 begin with sm_89; what sm_80 quantises to fp8 it does by integers.
CALLS = {
    "sm_80": "queries-fp8 keys-fp8 paged-mxfp4",
    "sm_89": "paged-fp8 paged-mxfp4-fp8 packed-mxfp4",
    "sm_90": "queries-none queries-fp8 queries-mxfp4 keys-fp8 keys-mxfp4 gather-fp8 paged-fp8 "
    "paged-fp8-bfloat16 paged-mxfp4 paged-all-mxfp4 packed-mxfp4",
    "sm_100": "keys-mxfp4 paged-all-fp8 paged-mxfp4",
    "sm_120": "queries-fp8 paged-fp8 packed-mxfp4",
}


@pytest.mark.parametrize("arch", CALLS)
def test_kernels_compile(arch: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A cache of its own: kernels without machine code must not be found by others.
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).with_name("compile_serving.py")
    done = subprocess.run(
        [sys.executable, "-P", str(program), arch, *CALLS[arch].split()],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["call"] for kernel in built] == CALLS[arch].split()
    for kernel in built:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["fp64"] == 0, kernel
        check(arch, kernel)


def check(arch: str, kernel: dict[str, Any]) -> None:
    """Matrix instructions of the right kind, and 16-byte asynchronous copies of keys."""
    if kernel["kernel"] in ("fused_q_kernel", "key_kernel"):
        # More would mean that the butterflies pass through shared memory.
        assert kernel["shared"] <= 8192, kernel
    if kernel["kernel"] != "stored_kernel" or "float32" in kernel["call"]:
        return
    wanted = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(arch, "mma")
    assert kernel[wanted] > 0, kernel
    assert kernel["async_copies"] > 0, kernel
    assert kernel["codes_together"], kernel
    if arch == "sm_90":
        # Those of the queries: codes of keys go from registers into products.
        assert kernel["e5m2_buffers"] <= 2, kernel
    if "bfloat16" not in kernel["call"]:
        assert kernel["wide_copies"] > 0, kernel
