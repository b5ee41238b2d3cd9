"""Time and peak memory of one consumer layer: each form in a process of its own.

``python -m dsa_compile.measuring`` is such a process; it prints what it found as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsa_compile.errors import DsaError

FORMS = ("dense", "compiled", "optimized")


class MeasurementError(DsaError, RuntimeError):
    """The process of a measurement failed."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        positions, rows: length of the context and number of its last positions that select.
        dtype: of the layer and its inputs.
        device: where they are.
        runs: number of timed calls, after one that is not.
        threads: CPU threads, None for PyTorch's own choice.
    """

    positions: int
    rows: int
    dtype: str = "float32"
    device: str = "cpu"
    runs: int = 3
    threads: int | None = None


@dataclass(frozen=True)
class Measured:
    """Median seconds of a call, peak bytes beyond model and inputs (None: cannot be read here),
    and a number that equal picks share."""

    seconds: float
    peak_bytes: int | None
    picks: int


def measure(case: Case, form: str) -> Measured:
    """One form of the layer, in a new process.

    Raises:
        MeasurementError: the process failed; holds the end of what it said.
    """
    given = json.dumps({**asdict(case), "form": form})
    done = subprocess.run(
        [sys.executable, "-m", "dsa_compile.measuring", given],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        told = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MeasurementError(
            f"measuring the {form} form failed: {told}; try fewer positions or rows"
        )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(case: Case, form: str) -> Measured:
    import torch

    from dsa_compile.demo_model import consumer_layer
    from dsa_compile.optimizer import optimize

    if case.threads is not None:
        torch.set_num_threads(case.threads)
    dtype = getattr(torch, case.dtype)
    layer, inputs = consumer_layer(case.positions, case.rows, dtype, case.device)
    call: Any = layer
    if form == "compiled":
        call = torch.compile(layer, dynamic=False, fullgraph=True)
    elif form == "optimized":
        call = optimize(layer, example_inputs=inputs, config={"require_match": 1})
    with torch.inference_mode():
        picks = call(*inputs).sort(-1).values
        number = int((picks * torch.arange(1, picks.shape[-1] + 1, device=picks.device)).sum())
        del picks
        seconds, peak = _cost(lambda: call(*inputs), case)
    return Measured(seconds, peak, number)


def _cost(call: Any, case: Case) -> tuple[float, int | None]:
    if case.device.startswith("cuda"):
        return _cost_on_gpu(call, case.runs)
    before, times = _start_peak(), []
    for _ in range(case.runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times), None if before is None else max(_status("VmHWM") - before, 0)


def _cost_on_gpu(call: Any, runs: int) -> tuple[float, int]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times), torch.cuda.max_memory_allocated() - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _start_peak() -> int | None:
    """Resets the high-water mark of resident memory, where the kernel lets it be reset."""
    import ctypes
    import gc

    gc.collect()
    try:
        # Memory that the allocator keeps for itself would hide that much of the peak.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def main() -> None:
    """The process of one measurement."""
    given = json.loads(sys.argv[1])
    form = given.pop("form")
    print(json.dumps(asdict(_measure_here(Case(**given), form))), flush=True)


if __name__ == "__main__":
    main()
