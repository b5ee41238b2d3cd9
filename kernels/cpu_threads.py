"""Runs the tiles of a large kernel in a few Python threads, each with its own share of the cores.

ATen splits every operation over all cores and waits for all of them at its end. With tiles that
fit a cache that means thousands of waits, each as long as the slowest core takes, which on a
machine that does anything else besides is a scheduler's time slice. Here a thread takes a whole
tile through all its operations, and the kernel waits once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")

_MAX_WORKERS = 8
_MIN_OPERATIONS = 1 << 27

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


class _Here(threading.local):
    """What a thread of the pool knows of the call that it works for."""

    workers = 0


_here = _Here()


@cache
def _threads_can_be_limited() -> bool:
    """Whether threads can have their own number of cores: other backends have one for all."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def workers() -> int:
    """Threads that share a large kernel, also as seen by one of them."""
    if _here.workers:
        return _here.workers
    return min(torch.get_num_threads(), _MAX_WORKERS) if _threads_can_be_limited() else 1


def inside_pool() -> bool:
    """Whether this is one of the sharing threads: what it does is not shared again."""
    return _here.workers > 0


def share_of_threads() -> int:
    """Cores that work on one tile: tiles are sized for as many."""
    threads = torch.get_num_threads()
    return threads if inside_pool() else max(1, threads // workers())


def _executor(threads: int) -> ThreadPoolExecutor:
    """The pool for a setting of ``torch.set_num_threads``, made on first use."""
    with _lock:
        if threads in _pools:
            return _pools[threads]
        count, share = workers(), share_of_threads()
        executor = ThreadPoolExecutor(count, thread_name_prefix="dsa_cpu")
        ready = threading.Barrier(count)

        def limit() -> None:
            # A new thread takes the common setting when it first asks, and would do so later.
            torch.get_num_threads()
            torch.set_num_threads(share)
            ready.wait()

        for started in [executor.submit(limit) for _ in range(count)]:
            started.result()
        # The setting is each thread's own, but it is also what new threads begin with.
        torch.set_num_threads(threads)
        _pools[threads] = executor
        return executor


def _forget_pools() -> None:
    """A forked child has the pools' memory but none of their threads."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def _draw(left: deque[Item]) -> Iterator[Item]:
    while True:
        try:
            item = left.popleft()
        except IndexError:
            return
        yield item


def for_each(
    items: Sequence[Item], worker: Callable[[], Callable[[Item], None]], operations: int
) -> None:
    """Calls a worker on every item, in several threads when that is worth it.

    Args:
        items: Pieces of work that write to different places.
        worker: Makes a function of one item; called once a thread, so that it can own buffers.
        operations: Multiplications and additions in all.
    """
    count = workers()
    if inside_pool() or count == 1 or len(items) < count or operations < _MIN_OPERATIONS:
        run = worker()
        for item in items:
            run(item)
        return
    inference = torch.is_inference_mode_enabled()
    left = deque(items)

    def work() -> None:
        _here.workers = count
        try:
            # Modes are a thread's own: nothing here is recorded, as in the calling thread.
            with torch.inference_mode(inference), torch.no_grad():
                run = worker()
                for item in _draw(left):
                    run(item)
        finally:
            _here.workers = 0

    executor = _executor(torch.get_num_threads())
    started = [executor.submit(work) for _ in range(count)]
    wait(started)
    for future in started:
        future.result()
