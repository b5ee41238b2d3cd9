"""What the CPU kernels hold at a time: the budget, and nothing of rows x positions besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_compile.kernels import cpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What other threads allocate is not followed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Allocations(TorchDispatchMode):
    """Follows the storages made inside: the most bytes alive at once, and every tensor's size."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in tree_leaves(given) if _is_tensor(x)}
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0
        self.sizes: set[tuple[torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        for x in tree_leaves(out):
            if not _is_tensor(x) or x.untyped_storage()._cdata in self.known:
                continue
            self.alive[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
            self.sizes.add((x.dtype, x.untyped_storage().nbytes() // x.element_size()))
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def measure(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Allocations]:
    with Allocations((args, kwargs)) as seen, torch.no_grad():
        out = kernel(*args, **kwargs)
    return out, seen


def scores(rows: int, n: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, rows, heads, dim), torch.randn(1, n, dim), torch.randn(1, rows, heads)


def candidates(rows: int, n: int, count: int) -> Tensor:
    blocks = n // 8
    return torch.stack([torch.randperm(blocks)[:count] for _ in range(rows)])[None].int()


def test_consumer_is_sized_by_its_candidates() -> None:
    """Scores of the candidates take 8 MiB, of the context they would take 64 MiB."""
    rows, n, count = 512, 32768, 512
    q, k, weights = scores(rows, n, 2, 8)
    ids = candidates(rows, n, count)
    shape = {"sparse_block": 8}
    (blocks, end), seen = measure(cpu.candidate_expand, ids, num_positions=n, block_size=8, **shape)
    assert seen.peak <= 20 * MIB
    logits, seen = measure(cpu.sparse_mqa_logits, q, k, weights, blocks, end, **shape)
    assert logits.numel() * 4 == 8 * MIB and seen.peak <= 24 * MIB
    assert max(size for _, size in seen.sizes) <= logits.numel()
    _, seen = measure(cpu.topk, logits, end, topk=512)
    assert seen.peak <= 20 * MIB
    _, seen = measure(cpu.indexer_select, q, k, weights, topk=512, block_ids=ids, block_size=8)
    assert seen.peak <= cpu.working_set()
    assert not any(size >= rows * n for _, size in seen.sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_source_never_holds_rows_by_heads_by_positions(dtype: torch.dtype) -> None:
    rows, n, heads = 192, 40000, 4
    q, k, weights = (x.to(dtype) for x in scores(rows, n, heads, 8))
    args: dict[str, Any] = {"topk": 64, "num_blocks": 32, "block_size": 8}
    out, seen = measure(cpu.indexer_publish, q, k, weights, **args)
    results = sum(x.numel() * x.element_size() for x in out) + rows * n // 8 * 4
    assert seen.peak <= cpu.working_set() // 2 + 2 * results + 8 * MIB
    assert not any(size >= rows * n * heads for _, size in seen.sizes)


@pytest.mark.parametrize("rows, size", [(512, 8 * MIB), (512, 2 * MIB), (3, 1)])
def test_budget_bounds_memory_and_changes_no_bit(rows: int, size: int) -> None:
    n = 16384
    q, k, weights = scores(rows, n, 8, 8)
    want = cpu.indexer_select(q, k, weights, topk=16)
    with cpu.limit_working_set(size):
        got, seen = measure(cpu.indexer_select, q, k, weights, topk=16)
    results = sum(x.numel() * x.element_size() for x in got)
    one_row = 4 * (n + 8 * 8) + 8 * MIB
    assert seen.peak <= max(size * 1.1, one_row) + results
    if size > 1:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    else:
        torch.testing.assert_close(got[0], want[0])


def test_budget_is_restored_and_checked() -> None:
    before = cpu.working_set()
    with pytest.raises(RuntimeError, match="stop"), cpu.limit_working_set(5):
        assert cpu.working_set() == 5
        raise RuntimeError("stop")
    assert cpu.working_set() == before
    with pytest.raises(ValueError, match="size must be at least 1"), cpu.limit_working_set(0):
        pass


def test_work_follows_the_context_and_not_the_cache() -> None:
    """A cache of a million positions with a hundred filled costs what a hundred cost."""
    q, k, weights = scores(4, 1 << 20, 2, 4)
    end = torch.full((1, 4), 100)
    out, seen = measure(
        cpu.indexer_publish, q, k, weights, topk=8, num_blocks=4, block_size=4096, row_end=end
    )
    assert seen.peak <= MIB
    assert out[1].max() < 100


def test_dense_form_is_chosen_while_it_is_cheaper() -> None:
    ratios = [cpu.dense_crossover(heads, 128) for heads in (1, 8, 32, 64)]
    assert ratios == sorted(ratios, reverse=True) and 1.0 < ratios[-1] < ratios[0]
    assert cpu.dense_crossover(32, 128) < 2.0
