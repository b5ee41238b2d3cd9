"""DeepGEMM's paged sparse scores, called by contract, against the contiguous reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_compile.kernels import deep_plan
from dsa_compile.kernels.deep_binding import Package
from dsa_compile.kernels.deep_package import DeepGemm, bind_gemm
from dsa_compile.kernels.deep_paged import paged_sparse_mqa_logits, plan_paged

from .cases import Case, assert_scores_close, packed_scales, quantized, random_ids
from .conftest import Binder, follow
from .strict_deep_gemm import StrictDeepGemm
from .strict_operands import FP4, FP8


def fill_cache(cache: Tensor, page: int, keys: Tensor, scales: Tensor) -> None:
    """Writes a page: all keys of it, then all scales."""
    whole = torch.cat([keys.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()])
    cache[page] = whole.view(cache.shape[1:])


def new_cache(pages: int, page: int, key_bytes: int, step: int = 512) -> Tensor:
    """uint8 [pages, page, 1, D + 4] whose pages lie a multiple of ``step`` bytes apart."""
    size = page * (key_bytes + 4)
    stride = -(-size // step) * step
    room = torch.randint(0, 256, (pages, stride), dtype=torch.uint8)
    return room[:, :size].unflatten(1, (page, 1, key_bytes + 4))


@dataclass
class Paged:
    """A paged call, and the same rows as contiguous cases of one row each."""

    arguments: tuple[Tensor, ...]
    options: dict[str, Any]
    rows: list[Case]


def paged_case(seed: int, dtype: torch.dtype = FP8, heads: int | None = None) -> Paged:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sparse_block, page = rng.choice(((8, 8), (8, 32), (16, 64), (8, 64)))
    block_size = sparse_block * rng.choice((1, 2))
    heads = heads or rng.choice((1, 4, 7, 32))
    requests = rng.choice((1, 3))
    lengths = [rng.choice((0, 1, 8, 63, 90)) for _ in range(requests)]
    pages_each = 12 if page == 8 else 4
    key_bytes = 64 if dtype == FP4 else 128
    cache = new_cache(requests * pages_each, page, key_bytes)
    order = torch.randperm(requests * pages_each, generator=generator).view(requests, pages_each)
    queries, weights, scales, all_blocks, ends, owners, rows = [], [], [], [], [], [], []
    candidates = rng.choice((1, 3, 9))
    for owner, length in enumerate(lengths):
        capacity = pages_each * page
        keys = quantized(generator, (capacity, 128), dtype)
        key_scale = packed_scales(generator, (capacity,))
        for at in range(pages_each):
            part = slice(at * page, (at + 1) * page)
            fill_cache(cache, int(order[owner, at]), keys[part], key_scale[part])
        for _ in range(rng.choice((1, 2, 3))):
            ids = random_ids(generator, (1, 1, candidates), -(-capacity // block_size))
            sizes = {"block_size": block_size, "sparse_block": sparse_block}
            bounds = (None, torch.tensor([[length]]))
            blocks, end = torch.ops.dsa.candidate_expand(
                ids, *bounds, num_positions=capacity, **sizes
            )
            q = quantized(generator, (1, 1, heads, 128), dtype)
            weight = torch.randn(1, 1, heads, generator=generator)
            q_scale = packed_scales(generator, (1, 1, heads))
            options = {"sparse_block": sparse_block, "row_end": bounds[1]}
            given = {"q_scale": q_scale, "key_scale": key_scale[None]}
            rows.append(Case(q, keys[None], weight, blocks, end, options, given))
            queries.append(q[0])
            weights.append(weight[0])
            scales.append(q_scale[0])
            all_blocks.append(blocks[0])
            ends.append(end[0])
            owners.append(owner)
    own = torch.tensor(owners)
    arguments = (
        torch.cat([q.view(torch.uint8) for q in queries]).view(dtype),
        cache,
        torch.cat(weights),
        torch.cat(all_blocks),
        torch.cat(ends),
        order.to(torch.int32)[own],
        own,
    )
    return Paged(arguments, {"sparse_block": sparse_block, "q_scale": torch.cat(scales)}, rows)


def check(case: Paged, package: DeepGemm) -> None:
    got = paged_sparse_mqa_logits(*case.arguments, **case.options, package=package)
    for row, single in enumerate(case.rows):
        assert_scores_close(got[row][None, None], single)


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([FP8, FP4]))
def test_any_paged_call(
    seed: int, dtype: torch.dtype, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    check(paged_case(seed, dtype), gemm)


@pytest.mark.parametrize("seed", range(3))
def test_every_binding_style(seed: int, process: StrictDeepGemm, binder: Binder) -> None:
    check(paged_case(seed), binder(process))


def test_the_release_with_512_byte_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    process = StrictDeepGemm("2.8.0")
    follow(process, monkeypatch)
    check(paged_case(3), bind_gemm(Package("deep_gemm", "2.8.0", (process.module(),))))


def test_more_rows_than_a_launch_takes(
    process: StrictDeepGemm, gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in map(paged_case, range(99)) if len(c.rows) > 4)
    monkeypatch.setattr(deep_plan, "MAX_ROWS", 2)
    process.max_rows = 2
    check(case, gemm)
    assert process.calls.count("fp8_fp4_paged_sparse_mqa_logits") > 2


def test_scale_bias_and_mask_at_columns(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = next(c for c in map(paged_case, range(99)) if int(c.arguments[4].max()) > 8)
    width = case.arguments[3].shape[1] * case.options["sparse_block"]
    mask, bias = torch.rand(1, width) > 0.4, torch.randn(1, width)
    case.options |= {"mask": mask, "bias": bias, "scale": 0.25}
    for single in case.rows:
        single.options |= {"mask": mask[None], "bias": bias[None], "scale": 0.25}
    check(case, gemm)


def test_a_plan_of_other_pages_is_refused(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = paged_case(1)
    _, cache, _, blocks, end, table, own = case.arguments
    block = case.options["sparse_block"]
    plan = plan_paged(
        blocks,
        end,
        table,
        own,
        page=cache.shape[1] * 2,
        sparse_block=block,
        dtype=FP8,
        package=gemm,
    )
    with pytest.raises(ValueError, match="plan was made for"):
        paged_sparse_mqa_logits(*case.arguments, **case.options, plan=plan, package=gemm)


def test_a_cache_that_does_not_fit_names_every_fault(
    process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    case = paged_case(1)
    room = torch.zeros(4 * 20 * 132 + 3, dtype=torch.uint8)
    odd = room[3:].view(4, 20, 1, 132)
    arguments = (case.arguments[0], odd, *case.arguments[2:])
    with pytest.raises(ValueError) as error:
        paged_sparse_mqa_logits(*arguments, **case.options, package=gemm)
    for fault in ("pages of 20 tokens", "2640 bytes", "2688 bytes apart", "multiple of 16 bytes"):
        assert fault in str(error.value)
    assert not process.calls


def test_first_call_inside_a_capture_is_refused(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    process.capturing = True
    with pytest.raises(RuntimeError, match="before a CUDA-graph capture"):
        check(paged_case(1), gemm)
