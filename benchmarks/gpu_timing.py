"""Time of a call on a GPU, replayed from a CUDA graph, and the memory that it takes."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import Cost  # noqa: E402


def replay_seconds(call: Callable[[], object], *, runs: int = 30, warmup: int = 3) -> float:
    """Median seconds of a replay of ``call``, by device events around each.

    Replays leave out what the host does, which a serving engine hides the same way.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(warmup):
        graph.replay()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(runs)
    ]
    for start, stop in pairs:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(stop) for start, stop in pairs) / 1000


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call replayed as a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    with torch.no_grad():
        return float(do_bench_cudagraph(run, rep=20, return_mode="median"))


def milliseconds_in_turns(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of three times of each call, taken in turns: what comes first finds a slower card."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
    return {name: median(several) for name, several in times.items()}


def rested_milliseconds(run: Callable[[], Any], pause: float = 0.4) -> float:
    """Median time of a few calls after a pause, before the card's power limit lowers its clocks.

    Only for calls that take longer than their launch.
    """
    run()
    torch.cuda.synchronize()
    time.sleep(pause)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    with torch.no_grad():
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
    torch.cuda.synchronize()
    # During the first ones the clocks still rise.
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(events[2:]))


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that a call holds beyond what is allocated when it begins."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def gpu_cost(call: Callable[[], object], *, runs: int = 30) -> Cost:
    """Median seconds of a graph replay of ``call``, and the peak memory of a plain call."""
    call()
    return Cost(replay_seconds(call, runs=runs), peak_bytes(call))
