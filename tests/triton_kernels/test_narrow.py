"""MXFP4 keys as e5m2: the form for GPUs that multiply fp8, with its instructions spelled in Triton.

On a GPU the tests of stored keys take this form by themselves; the interpreter has no instructions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels import triton_paged, triton_stored
from dsa_compile.kernels.quantise import FP8, dequantise_mxfp4, quantise_mxfp4
from dsa_compile.kernels.triton_mxfp4 import widen_relative
from dsa_compile.kernels.triton_stored_ops import mxfp4_sparse_mqa_logits

from .conftest import ON_GPU
from .values import assert_scores_close

pytestmark = pytest.mark.skipif(ON_GPU, reason="the instructions themselves are tested there")


@triton.jit
def _byte_of(word, turn):
    return (word >> (turn * 8)) & 255


@triton.jit
def _widen_relative(packed, step):
    return widen_relative(packed, step, step * 0)


def _narrow_type(q: Tensor, keys: Any, dim: int) -> Any:
    return {FP8: tl.float8e4nv, torch.uint8: tl.float8e5}[q.dtype]


@pytest.fixture(autouse=True)
def spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "byte_of", _byte_of)
    monkeypatch.setattr(triton_paged, "widen_relative_fast", _widen_relative)
    monkeypatch.setattr(triton_stored, "narrow_type", _narrow_type)


@pytest.mark.parametrize("by_lane", [True, False])
@pytest.mark.parametrize("heads", [32, 5])
@pytest.mark.parametrize("packed", [True, False])
def test_scores_equal_those_of_the_numbers(
    packed: bool, heads: int, by_lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dims of a key and of a query that have nothing in common, so that each must meet its own."""
    monkeypatch.setattr(triton_stored, "operands_by_lane", lambda index: by_lane)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(1, 3, heads, 128, generator=generator)
    k = torch.randn(1, 150, 128, generator=generator)
    # Groups of 32 dims whose scales lie powers of two apart, other ones in every key.
    k *= torch.exp2(torch.randint(-6, 7, (1, 150, 4), generator=generator)).repeat_interleave(32, 2)
    weights = torch.randn(1, 3, heads, generator=generator)
    ids = torch.stack([torch.randperm(19, generator=generator)[:9] for _ in range(3)])[None]
    blocks, end = ids.int(), torch.tensor([[72, 51, 0]])
    keys, scales = quantise_mxfp4(k)
    more: dict[str, Any] = {}
    stored: Tensor = q.to(FP8)
    numbers = stored.double()
    if packed:
        stored, more["q_scale"] = quantise_mxfp4(q)
        numbers = dequantise_mxfp4(stored, more["q_scale"]).double()
    got = mxfp4_sparse_mqa_logits(
        stored, keys, scales, weights, blocks, end, sparse_block=8, **more
    )
    want = torch.ops.dsa.sparse_mqa_logits(
        numbers,
        dequantise_mxfp4(keys, scales).double(),
        weights.double(),
        blocks,
        end,
        sparse_block=8,
    )
    assert_scores_close(got, want, 1e-6)
