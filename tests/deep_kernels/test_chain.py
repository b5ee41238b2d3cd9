"""A consumer layer's selection through both stand-ins, as one call and as a chain of ops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_compile.kernels.deep_chain import select_candidates
from dsa_compile.kernels.deep_gemm import sparse_mqa_logits
from dsa_compile.kernels.deep_package import DeepGemm

from .cases import sparse_case
from .strict_deep_gemm import StrictDeepGemm
from .strict_deep_select import StrictDeepSelect
from .strict_operands import FP4, FP8
from .test_select import bind
from .test_sparse import one_row


@settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([FP8, FP4]), plain=st.booleans())
def test_one_call_is_the_chain(
    seed: int, dtype: torch.dtype, plain: bool, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    """The chain is the provider's scores, then the reference's selection on them."""
    case = sparse_case(seed, dtype=dtype)
    if plain:
        for name in ("mask", "bias"):
            case.options.pop(name, None)
        if dtype == FP8:
            case.scales.pop("key_scale", None)
    given_ = {**case.options, **case.scales}
    scores = sparse_mqa_logits(*case.operands, **given_, package=gemm)
    positions = case.k.shape[1]
    topk = min(positions, 1 + seed % 40)
    strict = StrictDeepSelect()
    values, index = select_candidates(
        *case.operands, **given_, topk=topk, gemm=gemm, select=bind(strict)
    )
    want, columns = torch.ops.dsa.topk(scores, case.end, topk=topk)
    sizes = {n: case.options[n] for n in ("sparse_block", "anchored")}
    mapping = (case.blocks, case.options.get("row_start"))
    want, _ = torch.ops.dsa.topk_remap(want, columns, *mapping, num_positions=positions, **sizes)
    assert torch.equal(values, want)
    place = torch.ops.dsa.candidate_columns(*mapping, num_positions=positions, **sizes)
    by_position = torch.full((*scores.shape[:2], positions), float("-inf"))
    by_position.scatter_reduce_(-1, place.expand(scores.shape), scores, "amax")
    assert torch.equal(by_position.gather(-1, index), want)
    assert all(len(row.unique()) == topk for row in index.flatten(0, 1))


def test_scores_are_read_as_they_were_written(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 5, 6], 20, 64)
    strict = StrictDeepSelect()
    select_candidates(
        *case.operands, **case.options, topk=8, scale=1 / 64, gemm=gemm, select=bind(strict)
    )
    assert strict.calls == [(1, 24, torch.bfloat16)]
    bias = torch.zeros(1, 1, 24)
    select_candidates(
        *case.operands, **case.options, topk=8, bias=bias, gemm=gemm, select=bind(strict)
    )
    assert strict.calls[1:] == [(1, 24, torch.float32)]


@pytest.mark.parametrize(
    ("blocks", "end"), [([1, 5, 6, 6, 6], 24), ([1, 5, 0, 0], 16), ([1, 5, -1, 2**30], 16)]
)
def test_a_tighter_end_of_the_row(
    blocks: list[int], end: int, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    case = one_row(blocks, end, 64)
    _, index = select_candidates(
        *case.operands,
        **case.options,
        row_end=torch.tensor([[43]]),
        topk=11,
        gemm=gemm,
        select=bind(StrictDeepSelect()),
    )
    assert sorted(index.flatten().tolist()) == [*range(8, 16), 40, 41, 42]


def test_faults_come_before_any_call(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 5, 6], 20, 64)
    case.q = torch.randn(case.q.shape)
    with pytest.raises(ValueError, match="queries are float32"):
        select_candidates(*case.operands, **case.options, topk=8, gemm=gemm)
    assert not process.calls
