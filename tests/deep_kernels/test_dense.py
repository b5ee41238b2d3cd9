"""DeepGEMM's dense scores: both column layouts, both generations, against the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsa_compile.kernels.deep_binding import Package
from dsa_compile.kernels.deep_dense import dense_mqa_logits
from dsa_compile.kernels.deep_package import DeepGemm, bind_gemm
from dsa_compile.kernels.reference import dense_scores, row_range, visible_positions

from .cases import packed_scales, quantized
from .conftest import Binder
from .strict_deep_gemm import StrictDeepGemm
from .strict_operands import FP4, FP8, dequantized

HOPPER, BLACKWELL = (9, 0), (10, 0)


def bind(release: str, capability: tuple[int, int]) -> tuple[StrictDeepGemm, DeepGemm]:
    process = StrictDeepGemm(release, capability)
    return process, bind_gemm(Package("deep_gemm", release, (process.module(),)))


def dense_case(seed: int, capability: tuple[int, int], dtype: torch.dtype = FP8) -> Any:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, rows, positions = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((1, 50, 130))
    hopper = capability == HOPPER
    heads = rng.choice((32, 64)) if hopper else rng.choice((1, 6, 64))
    dim = 128 if dtype == FP4 else rng.choice((32, 64, 128))
    key_batch = rng.choice((1, batch))
    options: dict[str, Any] = {}
    if dtype == FP4:
        options["q_scale"] = packed_scales(generator, (batch, rows, heads))
        options["key_scale"] = packed_scales(generator, (key_batch, positions))
    else:
        if rng.random() < 0.6:
            options["q_scale"] = torch.exp2(
                torch.randint(-3, 4, (batch, rows, heads), generator=generator).float()
            )
        if rng.random() < 0.7:
            options["key_scale"] = torch.rand(key_batch, positions, generator=generator) + 0.1
    if rng.random() < 0.7:
        options["row_start"] = torch.randint(-1, positions + 2, (batch, 1), generator=generator)
    if rng.random() < 0.7:
        options["row_end"] = torch.randint(0, positions + 2, (1, rows), generator=generator)
    if rng.random() < 0.4:
        options["mask"] = torch.rand(batch, 1, positions, generator=generator) > 0.3
    if rng.random() < 0.4:
        options["bias"] = torch.randn(1, rows, positions, generator=generator)
    options["scale"] = rng.choice((1.0, 0.125))
    operands = (
        quantized(generator, (batch, rows, heads, dim), dtype),
        quantized(generator, (key_batch, positions, dim), dtype),
        torch.randn(batch, rows, heads, generator=generator),
    )
    return operands, options


def check(got: torch.Tensor, case: Any, capability: tuple[int, int]) -> None:
    (q, k, weights), options = case
    rest = dict(options)
    scale, bias = rest.pop("scale"), rest.pop("bias", None)
    key_scale = rest.get("key_scale")
    packed = key_scale is not None and key_scale.dtype == torch.int32
    wide = weights.bfloat16().double() if capability == BLACKWELL else weights.double()
    q = dequantized(q, rest.get("q_scale"))
    keys = dequantized(k, key_scale if packed else None)
    plain = dense_scores(q, keys, wide, scale, None if packed else key_scale, None)
    want = plain if bias is None else plain + bias
    bounds = row_range(rest.get("row_start"), rest.get("row_end"), k.shape[1], q.device)
    seen = visible_positions(plain.shape, *bounds, rest.get("mask"))
    assert got.dtype == torch.float32 and torch.equal(got.isneginf(), ~seen)
    room = plain.abs() * (2**-8 if capability == BLACKWELL else 1e-5) + want.abs() * 1e-6 + 1e-5
    assert bool(((got.double() - want).abs() <= room)[seen].all())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("release", "capability"),
    [("2.8.2", HOPPER), ("2.8.2", BLACKWELL), ("2.8.0", HOPPER), ("2.5", HOPPER)],
)
def test_scores_by_position(release: str, capability: tuple[int, int], seed: int) -> None:
    """2.8.2 counts columns from a row's start, releases before it count positions."""
    process, gemm = bind(release, capability)
    case = dense_case(seed, capability)
    check(
        dense_mqa_logits(*case[0], **case[1], capability=capability, package=gemm), case, capability
    )
    assert set(process.calls) == {"fp8_mqa_logits" if release == "2.5" else "fp8_fp4_mqa_logits"}


@pytest.mark.parametrize("seed", range(4))
def test_mxfp4_on_sm100(seed: int) -> None:
    _, gemm = bind("2.8.2", BLACKWELL)
    case = dense_case(seed, BLACKWELL, FP4)
    check(
        dense_mqa_logits(*case[0], **case[1], capability=BLACKWELL, package=gemm), case, BLACKWELL
    )


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_every_binding_style(capability: tuple[int, int], binder: Binder) -> None:
    gemm = binder(StrictDeepGemm("2.8.2", capability))
    case = dense_case(7, capability)
    check(
        dense_mqa_logits(*case[0], **case[1], capability=capability, package=gemm), case, capability
    )


def test_faults_are_listed_before_any_call() -> None:
    process, gemm = bind("2.8.2", HOPPER)
    generator = torch.Generator().manual_seed(0)
    q, k = quantized(generator, (1, 1, 20, 96), FP8), quantized(generator, (1, 8, 96), FP8)
    scale = packed_scales(generator, (1, 8))
    with pytest.raises(ValueError) as error:
        dense_mqa_logits(
            q, k, torch.ones(1, 1, 20), key_scale=scale, capability=HOPPER, package=gemm
        )
    for fault in ("20 heads", "head dim 96", "one float32 scale a key"):
        assert fault in str(error.value)
    assert not process.calls


def test_an_old_release_on_sm100_is_refused() -> None:
    _, gemm = bind("2.8.0", BLACKWELL)
    case = dense_case(0, BLACKWELL)
    with pytest.raises(ValueError, match="install DeepGEMM 2.8.2"):
        dense_mqa_logits(*case[0], **case[1], capability=BLACKWELL, package=gemm)
