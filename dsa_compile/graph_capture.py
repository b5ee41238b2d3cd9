"""Recording work on a device once and replaying it: CUDA graphs behind a small interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Capture(Protocol):
    """Records what a function launches, for replay on the same memory."""

    def active(self) -> bool:
        """Whether somebody records at this moment."""
        ...

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Run once where the recording will run, so that first-call work is done."""
        ...

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a run: what replays it, and its results, which each replay writes anew."""
        ...

    def free(self) -> None:
        """Drop all recordings and the memory that they hold."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool and replay in the order of their recording.

    Raises:
        RuntimeError: there is no GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        current = torch.device("cuda", torch.cuda.current_device())
        self.device = current if device is None else device
        self._stream = torch.cuda.Stream(self.device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def active(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Callable[[], Any]) -> Any:
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = run()
        here.wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        self._graphs.append(graph)
        return graph.replay, result

    def free(self) -> None:
        torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
