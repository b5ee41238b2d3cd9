"""Compilers see exactly what each kernel writes to.

What they take for written to without reason, and what a launch both reads and writes, they copy; a
broadcast argument would even come back changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WRITTEN = {
    "block_max_kernel": {"out"},
    "columns_kernel": {"out"},
    "expand_kernel": {"flags", "blocks", "end"},
    "finish": {"survivors", "values", "index"},
    "flags_kernel": {"words"},
    "group_kernel": {"out"},
    "remap_kernel": {"out", "index", "scratch"},
    "select": {"survivors"},
    "stored_kernel": {"out"},
}
KEEPING_MAXIMA = {"sparse_kernel", "dense_scores"}
# Each with and without bounds, split rows, kept maxima, and columns that become positions.
CALLS = "sparse-bfloat16 sparse-float16-options dense-bfloat16 topk-split topk choice-sparse "
CALLS += "choice-dense dense-wide remap expand bounds stored"


def test_only_results_are_written_to() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("find_writes.py")
    done = subprocess.run(
        [sys.executable, "-P", str(program), *CALLS.split()],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["kernel"] for launch in launches} == {*WRITTEN, *KEEPING_MAXIMA}
    kept: set[str] = set()
    for launch in launches:
        assert launch["read_too"] == [], launch
        if launch["kernel"] in KEEPING_MAXIMA:
            assert set(launch["written"]) in ({"out"}, {"out", "maxima"}), launch
            kept.update({launch["kernel"]} if "maxima" in launch["written"] else ())
        else:
            assert set(launch["written"]) == WRITTEN[launch["kernel"]], launch
    assert kept == KEEPING_MAXIMA
