"""The threads that share a kernel's tiles: settings, modes, errors and forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from dsa_compile.kernels import cpu_threads
from dsa_compile.kernels.cpu_threads import for_each, share_of_threads

ENOUGH = cpu_threads._MIN_OPERATIONS


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def record(seen: list[object], what: Callable[[], object]) -> Callable[[], Callable[[int], None]]:
    return lambda: lambda item: seen.append((item, what()))


def test_every_item_is_done_once() -> None:
    seen: list[object] = []
    for_each(range(500), record(seen, lambda: None), ENOUGH)
    assert sorted(item for item, _ in seen) == list(range(500))


def test_small_work_stays_in_the_calling_thread() -> None:
    seen: list[object] = []
    for_each(range(3), record(seen, threading.get_ident), ENOUGH - 1)
    assert {name for _, name in seen} == {threading.get_ident()}


def test_settings_of_the_caller_and_of_new_threads_are_kept() -> None:
    inside: list[object] = []
    for_each(range(20), record(inside, torch.get_num_threads), ENOUGH)
    assert {count for _, count in inside} == {share_of_threads()}
    assert torch.get_num_threads() == 3
    outside: list[int] = []
    thread = threading.Thread(target=lambda: outside.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert outside == [3]


def test_pool_follows_the_setting() -> None:
    torch.set_num_threads(17)
    seen: list[object] = []
    for_each(range(40), record(seen, torch.get_num_threads), ENOUGH)
    assert {count for _, count in seen} == {17 // cpu_threads._MAX_WORKERS}
    torch.set_num_threads(1)
    for_each(range(2), record(seen, threading.get_ident), ENOUGH)
    assert seen[-1][1] == threading.get_ident()


@pytest.mark.parametrize("inference", [False, True])
def test_modes_follow_the_caller(inference: bool) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    seen: list[object] = []
    with torch.inference_mode(inference):
        for_each(range(20), record(seen, modes), ENOUGH)
    assert {mode for _, mode in seen} == {(inference, False)}


def test_an_error_reaches_the_caller_after_all_threads_stopped() -> None:
    running: list[int] = []

    def worker() -> Callable[[int], None]:
        def run(item: int) -> None:
            if item == 3:
                raise ValueError("tile 3")
            running.append(item)

        return run

    with pytest.raises(ValueError, match="tile 3"):
        for_each(range(60), worker, ENOUGH)
    count = len(running)
    for_each(range(4, 6), worker, ENOUGH)
    assert len(running) == count + 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_its_own_pool() -> None:
    for_each(range(9), record([], lambda: None), ENOUGH)
    child = os.fork()
    if child == 0:
        seen: list[object] = []
        for_each(range(9), record(seen, lambda: None), ENOUGH)
        os._exit(0 if len(seen) == 9 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_large_selection_is_the_same_in_any_number_of_threads() -> None:
    q, k, weights = torch.randn(1, 64, 16, 32), torch.randn(1, 40000, 32), torch.rand(1, 64, 16)
    ids = torch.stack([torch.randperm(5000)[:600] for _ in range(64)])[None]
    calls = (
        lambda: torch.ops.dsa_cpu.indexer_select(q, k, weights, topk=64),
        lambda: torch.ops.dsa_cpu.indexer_select(
            q, k, weights, topk=64, block_ids=ids, block_size=8
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_threads, "_MIN_OPERATIONS", 1 << 20)
        shared = [call() for call in calls]
    torch.set_num_threads(1)
    for got, call in zip(shared, calls, strict=True):
        torch.testing.assert_close(got[0], call()[0])
        torch.testing.assert_close(got[0], call()[0])
