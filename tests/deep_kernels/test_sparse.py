"""DeepGEMM's sparse scores, called by contract, against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_compile.kernels import deep_plan
from dsa_compile.kernels.deep_binding import Package
from dsa_compile.kernels.deep_gemm import sparse_mqa_logits
from dsa_compile.kernels.deep_package import DeepGemm, bind_gemm
from dsa_compile.kernels.deep_plan import plan_sparse, score_plan

from .cases import Case, assert_scores_close, packed_scales, quantized, sparse_case
from .conftest import Binder, follow
from .strict_deep_gemm import StrictDeepGemm
from .strict_operands import FP4, FP8


def run(case: Case, package: DeepGemm, **options: Any) -> torch.Tensor:
    return sparse_mqa_logits(
        *case.operands, **case.options, **case.scales, package=package, **options
    )


def bind(process: StrictDeepGemm) -> DeepGemm:
    return bind_gemm(Package("deep_gemm", process.release, (process.module(),)))


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**20), dtype=st.sampled_from([FP8, FP8, FP4]))
def test_any_call_means_what_the_op_means(
    seed: int, dtype: torch.dtype, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    case = sparse_case(seed, dtype=dtype)
    assert_scores_close(run(case, gemm), case)


@pytest.mark.parametrize("seed", range(6))
def test_every_binding_style(seed: int, process: StrictDeepGemm, binder: Binder) -> None:
    case = sparse_case(seed, dtype=FP4 if seed == 5 else FP8)
    assert_scores_close(run(case, binder(process)), case)


@pytest.mark.parametrize("seed", range(6))
def test_the_release_that_takes_32_heads_only(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = StrictDeepGemm("2.8.0")
    follow(process, monkeypatch)
    case = sparse_case(seed, heads=(1, 5, 12, 31, 32, 4)[seed])
    assert_scores_close(run(case, bind(process)), case)


def one_row(blocks: list[int], end: int, positions: int, sparse_block: int = 8) -> Case:
    generator = torch.Generator().manual_seed(0)
    return Case(
        quantized(generator, (1, 1, 4, 128), FP8),
        quantized(generator, (1, positions, 128), FP8),
        torch.randn(1, 1, 4, generator=generator),
        torch.tensor([[blocks]], dtype=torch.int32),
        torch.tensor([[end]], dtype=torch.int32),
        {"sparse_block": sparse_block},
    )


def test_fewer_candidates_than_the_row_is_long(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """A row of 400 positions with two candidate blocks: the kernel would derive 5 of 5."""
    case = one_row([3, 17, 17, 17, 17], 16, 400)
    assert_scores_close(run(case, gemm), case)


def test_a_wrong_length_fails_in_the_stand_in(process: StrictDeepGemm) -> None:
    ids = torch.tensor([[3, 17, 17, 17]], dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="not ascending"):
        process.get_sparse_mqa_logits_metadata(start, start + 400, 400, ids, FP8, 8)


@pytest.mark.parametrize(
    ("blocks", "end", "positions"),
    [([0], 0, 5), ([0], 5, 5), ([125, 125], 3, 1003), ([0, 1, 2], 24, 24), ([], 0, 9)],
)
def test_edges_of_a_row(
    blocks: list[int], end: int, positions: int, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    case = one_row(blocks, end, positions)
    assert_scores_close(run(case, gemm), case)


def test_rows_that_see_nothing_run_beside_others(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([0], 0, 64)
    case.q = case.q.expand(1, 3, -1, -1)
    case.weights = case.weights.expand(1, 3, -1)
    case.blocks = torch.tensor([[[0, 0], [1, 7], [0, 0]]])
    case.end = torch.tensor([[0, 16, 0]])
    got = run(case, gemm)
    assert_scores_close(got, case)
    assert bool(got[0, [0, 2]].isneginf().all())


def test_nan_keys_stay_nan(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 2], 16, 32)
    case.k.view(torch.uint8)[0, 17] = 0x7F
    got = run(case, gemm)
    assert_scores_close(got, case)
    assert int(got.isnan().sum()) == 1


def test_junk_behind_the_last_block_is_never_read(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, -(2**31), 2**31 - 1, -1, 5], 8, 64)
    assert_scores_close(run(case, gemm), case)
    case.blocks = torch.tensor([[[1, 2**61, -(2**60) + 1, 2**61 + 2]]])
    case.scales["key_scale"] = torch.rand(1, 64)
    got = run(case, gemm)
    assert bool(got[..., :8].isfinite().all()) and bool(got[..., 8:].isneginf().all())


def test_an_end_beyond_the_row_or_the_keys(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """Columns that the kernel does not write must not count as valid."""
    for positions, end in ((13, 2**31 - 1), (64, 17), (13, 16)):
        case = one_row([0, 1], end, positions)
        assert_scores_close(run(case, gemm), case)


def test_tighter_bounds_than_those_of_the_candidates(
    process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    case = one_row([1, 5, 6], 24, 64)
    case.options |= {"row_start": torch.tensor([[11]]), "row_end": torch.tensor([[45]])}
    got = run(case, gemm)
    assert_scores_close(got, case)
    assert int(got.isfinite().sum()) == 10


def test_scales_of_any_strides(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 5, 6], 20, 64)
    generator = torch.Generator().manual_seed(3)
    case.scales["key_scale"] = packed_scales(generator, (1, 128))[:, ::2]
    case.scales["q_scale"] = packed_scales(generator, (4, 1, 1)).permute(1, 2, 0)
    assert_scores_close(run(case, gemm), case)


def test_operands_that_begin_anywhere(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """TMA loads begin at multiples of 16 bytes."""
    case = one_row([1, 5, 6], 20, 64)
    for name in ("q", "k"):
        whole = getattr(case, name)
        room = torch.zeros(whole.numel() + 4, dtype=torch.uint8)
        room[4:] = whole.view(torch.uint8).flatten()
        setattr(case, name, room[4:].view(FP8).view(whole.shape))
    case.scales["key_scale"] = packed_scales(torch.Generator().manual_seed(4), (1, 65))[:, 1:]
    assert_scores_close(run(case, gemm), case)


@pytest.mark.parametrize("positions", [64, 67])
@pytest.mark.parametrize("anchored", [False, True])
def test_batches_and_unaligned_rows(
    positions: int, anchored: bool, process: StrictDeepGemm, gemm: DeepGemm
) -> None:
    """Keys of all batches are one for the kernel; 67 positions put the second one off the grid."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[[4, 0, 2]], [[7, 8, 1]]])
    options = {"row_start": torch.tensor([[3], [5]]), "row_end": torch.tensor([[50], [positions]])}
    sizes = {"num_positions": positions, "block_size": 8, "sparse_block": 8}
    blocks, end = torch.ops.dsa.candidate_expand(
        ids, options["row_start"], options["row_end"], anchored=anchored, **sizes
    )
    case = Case(
        quantized(generator, (2, 2, 8, 128), FP8),
        quantized(generator, (2, positions, 128), FP8),
        torch.randn(2, 2, 8, generator=generator),
        blocks,
        end,
        {**options, "sparse_block": 8, "anchored": anchored},
        {"key_scale": torch.rand(2, positions, generator=generator) + 0.5},
    )
    assert_scores_close(run(case, gemm), case)


def test_more_rows_than_a_launch_takes(
    process: StrictDeepGemm, gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_plan, "MAX_ROWS", 4)
    process.max_rows = 4
    case = sparse_case(19)
    while case.q.shape[0] * case.q.shape[1] < 10:
        case = sparse_case(int(torch.randint(2**20, ())))
    assert_scores_close(run(case, gemm), case)
    assert process.calls.count("fp8_fp4_sparse_mqa_logits") > 1


def test_layers_share_a_plan(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 5, 6], 20, 64)
    shape = {"sparse_block": 8, "dtype": FP8, "package": gemm}
    plan = plan_sparse(case.blocks, case.end, rows=(1, 1), keys=(1, 64), **shape)
    for _ in range(2):
        assert_scores_close(run(case, gemm, plan=plan), case)
        case.q = case.q.flip(2)
    assert process.calls.count("get_sparse_mqa_logits_metadata") == 1


def test_a_plan_of_other_arguments_is_refused(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """The kernel would not notice."""
    case = one_row([1, 5, 6], 20, 64)
    shape = {"sparse_block": 8, "dtype": FP8, "package": gemm}
    plan = plan_sparse(case.blocks, case.end, rows=(1, 1), keys=(1, 64), **shape)
    longer = torch.cat([case.k.float(), case.k.float()], 1).to(FP8)
    with pytest.raises(ValueError, match="the plan is of"):
        score_plan(plan, case.q, longer, case.weights, package=gemm)
    case.blocks = case.blocks[..., :2]
    with pytest.raises(ValueError, match="the plan is of"):
        run(case, gemm, plan=plan)


def test_rows_of_the_result_are_padded(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """Nothing may take the width for the stride."""
    case = one_row([1, 5, 6], 20, 64)
    shape = {"sparse_block": 8, "dtype": FP8, "package": gemm}
    plan = plan_sparse(case.blocks, case.end, rows=(1, 2), keys=(1, 64), **shape)
    q, weights = case.q.expand(1, 2, -1, -1), case.weights.expand(1, 2, -1)
    scores = score_plan(plan, q, case.k, weights, package=gemm)
    assert scores.shape == (1, 2, 24) and scores.stride(1) == 512
    assert scores.dtype == torch.bfloat16


def test_query_scales_count_once(process: StrictDeepGemm, gemm: DeepGemm) -> None:
    """Given apart or folded into the weights, powers of two give the same scores."""
    case = one_row([1, 5, 6], 20, 64)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0])[None, None]
    apart = run(case, gemm, q_scale=scale)
    case.weights = case.weights.bfloat16() * scale.bfloat16()
    assert torch.equal(apart, run(case, gemm))


@pytest.mark.parametrize("kind", ["float32", "e8m0", "packed"])
def test_key_scales_of_every_kind(kind: str, process: StrictDeepGemm, gemm: DeepGemm) -> None:
    case = one_row([1, 5, 6], 20, 64)
    powers = torch.exp2(torch.randint(-6, 6, (1, 64)).float())
    if kind == "packed":
        case.scales["key_scale"] = packed_scales(torch.Generator().manual_seed(2), (1, 64))
    else:
        e8m0 = powers.to(torch.float8_e8m0fnu)
        case.scales["key_scale"] = powers if kind == "float32" else e8m0
    assert_scores_close(run(case, gemm), case)


class TestCapture:
    """The workspace of a stream is made outside of any capture."""

    def test_first_call_inside_a_capture_is_refused(
        self, process: StrictDeepGemm, gemm: DeepGemm
    ) -> None:
        process.capturing = True
        with pytest.raises(RuntimeError, match="warm_up"):
            run(one_row([1], 8, 64), gemm)

    def test_warm_up_makes_it(self, process: StrictDeepGemm, gemm: DeepGemm) -> None:
        from dsa_compile.kernels.deep_gemm import warm_up

        case = one_row([1, 3], 16, 64)
        warm_up("cpu", gemm)
        process.capturing = True
        with pytest.raises(RuntimeError, match="make the call once ahead"):
            run(case, gemm)
        process.capturing = False
        run(one_row([0], 8, 9), gemm)
        process.capturing = True
        assert_scores_close(run(case, gemm), case)
        process.stream = "other"
        with pytest.raises(RuntimeError, match="on that stream"):
            run(case, gemm)


class TestRefusals:
    """What the kernel does not take is an error that lists it all, before any call of it."""

    def test_all_faults_in_one_error(self, process: StrictDeepGemm, gemm: DeepGemm) -> None:
        generator = torch.Generator().manual_seed(0)
        case = one_row([1], 8, 64, 4)
        case.q = quantized(generator, (1, 1, 64, 64), FP8)
        case.k = torch.randn(1, 64, 64)
        with pytest.raises(ValueError) as error:
            run(case, gemm)
        for fault in ("64 heads", "head dim 64", "blocks of 4 columns", "keys float32"):
            assert fault in str(error.value)
        assert not process.calls

    def test_too_many_blocks(self, process: StrictDeepGemm, gemm: DeepGemm) -> None:
        case = one_row([0], 0, 64)
        case.blocks = torch.zeros(1, 1, 4097, dtype=torch.int32)
        with pytest.raises(ValueError, match="4097 sparse blocks a row"):
            run(case, gemm)

    def test_mxfp4_without_scales(self, process: StrictDeepGemm, gemm: DeepGemm) -> None:
        case = sparse_case(5, dtype=FP4)
        case.scales.clear()
        with pytest.raises(ValueError, match="MXFP4 operands come with scales"):
            run(case, gemm)
