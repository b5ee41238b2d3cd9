"""DeepSelect's top-k, called by contract, and columns back to positions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_compile.kernels import deep_select
from dsa_compile.kernels.deep_binding import Package
from dsa_compile.kernels.deep_select import (
    DeepSelect,
    bind_select,
    topk,
    topk_positions,
    topk_remap,
)

from .cases import random_ids
from .strict_deep_select import KernelTrap, StrictDeepSelect

SPECIALS = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0])


def bind(process: StrictDeepSelect) -> DeepSelect:
    found = bind_select(Package("deep_select", "1.0.0", (process.module(),)))
    assert isinstance(found, DeepSelect)
    return found


def random_logits(seed: int, dtype: torch.dtype, special: float) -> tuple[Tensor, Tensor]:
    """Strided logits [B, S, W], distinct but for a share of special values, and ends."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, rows = rng.choice((1, 2)), rng.choice((1, 3, 4))
    width = rng.choice((1, 5, 24, 100, 600))
    values = torch.randperm(batch * rows * 640, generator=generator)[: batch * rows * width]
    logits = (values.float() / 8 - 100).bfloat16().to(dtype).view(batch, rows, width)
    pick = torch.randint(0, len(SPECIALS), logits.shape, generator=generator)
    odd = torch.rand(logits.shape, generator=generator) < special
    logits = torch.where(odd, SPECIALS[pick].to(dtype), logits)
    layout = rng.randrange(3)
    if layout == 1:
        room = torch.full((batch, rows, width + 512), 7e4).to(dtype)
        room[..., 3 : width + 3] = logits
        logits = room[..., 3 : width + 3]
    elif layout == 2:
        logits = logits.transpose(1, 2).contiguous().transpose(1, 2)
    end = torch.randint(-1, width + 3, (rng.choice((1, batch)), rng.choice((1, rows))))
    return logits, end.to(rng.choice((torch.int32, torch.int64)))


def assert_same_selection(got: tuple[Tensor, Tensor], logits: Tensor, end: Tensor) -> None:
    """Same scores as the reference, slot by slot; columns hold them, each once."""
    values, columns = got
    count = values.shape[-1]
    want, _ = torch.ops.dsa.topk(logits.double(), end, topk=count)
    assert values.dtype == torch.float32 and columns.dtype == torch.int32
    assert torch.allclose(values.double(), want, rtol=0, atol=0, equal_nan=True)
    found = columns >= 0
    assert torch.equal(found, ~want.isneginf())
    held = logits.gather(-1, columns.clamp(min=0).long()).float()
    assert torch.allclose(held[found], values[found], rtol=0, atol=0, equal_nan=True)
    assert bool((columns < end.clamp(max=logits.shape[-1])[..., None]).logical_or(~found).all())
    for row in columns.flatten(0, 1):
        kept = row[row >= 0]
        assert len(kept.unique()) == len(kept)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    count=st.sampled_from([0, 1, 3, 8, 64, 700]),
    special=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_rows(seed: int, dtype: torch.dtype, count: int, special: float) -> None:
    process = StrictDeepSelect()
    logits, end = random_logits(seed, dtype, special)
    got = topk(logits, end, topk=count, package=bind(process))
    assert_same_selection(got, logits, end)
    values, columns = got
    tied = (values[..., 1:] == values[..., :-1]) | (values[..., 1:].isnan())
    both = tied & (columns[..., 1:] >= 0)
    assert bool((columns[..., 1:] > columns[..., :-1])[both].all()), "ties stand by column"


@pytest.mark.parametrize("seed", range(8))
def test_unsorted_rows_hold_the_same_set(seed: int) -> None:
    logits, end = random_logits(seed, torch.bfloat16, 0.2)
    values, columns = topk(logits, end, topk=16, sorted=False, package=bind(StrictDeepSelect()))
    empty = columns < 0
    assert bool((empty[..., 1:] >= empty[..., :-1]).all()), "empty slots come last"
    order = values.sort(dim=-1, descending=True, stable=True)
    sorted_columns = columns.gather(-1, order.indices)
    assert_same_selection((order.values, sorted_columns), logits, end)


def test_hidden_columns_of_an_unsorted_row_leave_no_gap() -> None:
    logits = torch.tensor([[[1.0, float("-inf"), 2.0, 3.0]]])
    ends = torch.full((1, 1), 3)
    values, columns = topk(logits, ends, topk=4, sorted=False, package=bind(StrictDeepSelect()))
    assert columns.tolist() == [[[0, 2, -1, -1]]]
    assert values.tolist() == [[[1.0, 2.0, float("-inf"), float("-inf")]]]


def test_nan_first_in_a_row_longer_than_k() -> None:
    """The kernel would trap, or leave its mark and an unwritten row."""
    logits = torch.arange(40.0).view(1, 2, 20)
    logits[0, 0, [3, 7]] = float("nan")
    logits[0, 0, 5] = float("inf")
    end = torch.full((1, 1), 20)
    values, columns = topk(logits, end, topk=4, package=bind(StrictDeepSelect()))
    assert columns.tolist() == [[[3, 7, 5, 19], [19, 18, 17, 16]]]
    assert values.isnan().tolist() == [[[True, True, False, False], [False] * 4]]


def test_the_stand_in_does_trap_at_nan() -> None:
    rows = torch.full((1, 256), float("nan"))
    with pytest.raises(KernelTrap):
        StrictDeepSelect().topk(rows, 4)


def test_columns_from_the_end_on_hold_anything() -> None:
    logits = torch.full((1, 3, 300), float("nan"), dtype=torch.bfloat16)
    logits[..., :9] = torch.arange(9.0).bfloat16()
    end = torch.tensor([[9, 0, 2]])
    values, columns = topk(logits, end, topk=3, package=bind(StrictDeepSelect()))
    assert columns.tolist() == [[[8, 7, 6], [-1] * 3, [1, 0, -1]]]
    assert not values.isnan().any()


def test_refusals_are_listed_before_any_call() -> None:
    process = StrictDeepSelect()
    logits = torch.empty(1, 1, 2**23, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError) as error:
        topk(logits, torch.zeros(1, 1), topk=5000, package=bind(process))
    for fault in ("scores are float64", "topk = 5000", "rows of 8388608 columns"):
        assert fault in str(error.value)
    assert not process.calls


def test_the_largest_k() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randperm(2 * 5000, generator=generator).float().view(1, 2, 5000)
    end = torch.tensor([[5000, 4096]])
    got = topk(logits, end, topk=4096, package=bind(StrictDeepSelect()))
    assert_same_selection(got, logits, end)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_remap_is_that_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    positions = rng.choice((1, 9, 64, 131))
    sparse_block = rng.choice((1, 8, 16))
    block_size = sparse_block * rng.choice((1, 2))
    anchored = rng.random() < 0.5
    batch, rows = rng.choice((1, 2)), rng.choice((1, 3))
    start = torch.randint(0, positions, (batch, 1), generator=generator)
    ids = random_ids(generator, (1, rows, rng.choice((1, 6))), -(-positions // block_size))
    sizes = {"num_positions": positions, "sparse_block": sparse_block, "anchored": anchored}
    blocks, end = torch.ops.dsa.candidate_expand(ids, start, block_size=block_size, **sizes)
    logits = torch.randn(batch, rows, blocks.shape[2] * sparse_block, generator=generator)
    count = rng.randint(0, positions)
    values, columns = torch.ops.dsa.topk(logits, end, topk=count)
    fill = rng.choice((None, -1e9))
    want = torch.ops.dsa.topk_remap(values, columns, blocks, start, fill=fill, **sizes)
    got = topk_remap(values, columns, blocks, start, fill=fill, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    both = topk_positions(
        logits, end, blocks, start, topk=count, fill=fill, package=bind(StrictDeepSelect()), **sizes
    )
    assert all(torch.equal(a, b) for a, b in zip(both, want, strict=True))


def test_remap_memory_does_not_grow_with_positions() -> None:
    """A table over 2**30 positions would be a gigabyte."""
    values = torch.tensor([[[1.0, float("-inf"), float("-inf")]]])
    columns = torch.tensor([[[0, -1, -1]]], dtype=torch.int32)
    blocks = torch.tensor([[[2**27 - 1]]], dtype=torch.int32)
    _, index = topk_remap(values, columns, blocks, num_positions=2**30, sparse_block=8)
    assert index.tolist() == [[[2**30 - 8, 2**30 - 1, 2**30 - 2]]]


def test_a_package_without_strides_is_a_need() -> None:
    package = StrictDeepSelect().module()
    del package.get_stride_requirement
    found = bind_select(Package("deep_select", "0.1", (package,)))
    assert not isinstance(found, DeepSelect) and "get_stride_requirement" in found.what
    assert found in deep_select.needs(deep_select.TopkRequest((10, 0), torch.float32, 8), found)
