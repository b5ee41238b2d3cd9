"""Time and peak memory of a call, each variant in a process of its own.

Peak memory is the high-water mark of the process's resident set during the last run, less what was
resident when that run began (the interpreter, the model and its inputs). On Linux the kernel's own
mark is reset for it (`/proc/self/clear_refs`); elsewhere the resident set cannot be read without
another package, and the peak is left out.
"""

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """Median seconds of a run and peak bytes above what was resident before it (None: unknown)."""

    seconds: float
    peak_bytes: int | None

    @property
    def peak(self) -> str:
        return "unknown" if self.peak_bytes is None else f"{self.peak_bytes / MIB:,.0f} MiB"


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _return_free_memory() -> None:
    # Memory that the allocator keeps for itself would hide that much of the next run's peak.
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _start_peak() -> int | None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def cost(call: Callable[[], object], *, runs: int = 2, warmup: int = 0) -> Cost:
    """Run `call` and return its median time and the peak memory of its last run."""
    for _ in range(warmup):
        call()
    times, before = [], None
    for run in range(runs):
        if run == runs - 1:
            _return_free_memory()
            before = _start_peak()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    peak = None if before is None else max(_status("VmHWM") - before, 0)
    return Cost(median(times), peak)


def report_to_parent(result: Cost) -> None:
    """Called by the child of `in_own_process`, as the last thing it prints."""
    print(json.dumps(asdict(result)), flush=True)


def in_own_process(script: str, arguments: Sequence[str]) -> Cost:
    """Run `script` with the arguments in a new interpreter and return the cost it reports."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))
