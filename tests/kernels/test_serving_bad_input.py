"""Every bad argument of a serving op is refused by its name, by kernels and fakes alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from .samples import Call
from .serving_samples import serving_calls

SAMPLES = {call.name: call for call in serving_calls()}
F, L, U = torch.float32, torch.int64, torch.uint8
Q, K = "fused_indexer_q", "indexer_k_quant"
W, G = "indexer_k_quant_and_cache", "gather_indexer_k"
S, D, M = "paged_sparse_mqa_logits", "paged_mqa_logits", "mxfp4_sparse_mqa_logits"


def zeros(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


# op and sample, argument (position or name), bad value, error, pattern
BAD: list[tuple[str, str, int | str, Any, type[Exception], str]] = [
    (Q, "few", 0, zeros(2, 5, 64), ValueError, r"q must be \[B, S, H, D\]"),
    (Q, "few", 0, zeros(2, 5, 3, 64, dtype=L), TypeError, "q must be one of"),
    (Q, "few", 1, zeros(2, 5, 4), ValueError, "weights must be .*dim 2 is 4, expected 3"),
    (Q, "few", "positions", zeros(2, 5, dtype=L), ValueError, "positions need cos and sin"),
    (Q, "few", "cos", zeros(2, 5, 8), ValueError, "sin is missing"),
    (Q, "few", "quant", "int8", ValueError, "quant must be one of none, fp8, mxfp4, got 'int8'"),
    (Q, "few", "weights_out_dtype", torch.float16, TypeError, "weights_out_dtype must be float32"),
    (Q, "fp8", "cos", zeros(50, 15), ValueError, "sin must be like cos"),
    (Q, "fp8", "sin", zeros(50, 16).bool(), TypeError, "sin must be one of"),
    (Q, "fp8", "positions", zeros(2, 4, dtype=L), ValueError, "positions must be .* 5 or 1"),
    (Q, "fp8", "positions", zeros(2, 5), TypeError, "positions must be one of int32, int64"),
    (Q, "fp8", "rope", "spiral", ValueError, "rope must be one of half, interleaved"),
    (Q, "fp8", "rope_start", 33, ValueError, r"rope_start \+ R = 33 \+ 32 exceeds the head dim 64"),
    (Q, "fp8", "rope_start", -1, ValueError, "rope_start must be at least 0"),
    (Q, "fp8", "floor", 0.0, ValueError, "floor must be positive, got 0.0"),
    (Q, "fp8", "floor", float("nan"), ValueError, "floor must be positive, got nan"),
    (Q, "mxfp4", "rope_start", 3, ValueError, "rope_start must be even for interleaved"),
    (Q, "mxfp4", "cos", zeros(2, 4, 4), ValueError, r"cos must be \[B\|1, S\|1, R/2\]"),
    (K, "fp8", 0, zeros(29, 64, 1), ValueError, r"k must be \[N, D\]"),
    (K, "fp8", "norm", "batch", ValueError, "norm must be one of none, layer, rms"),
    (K, "fp8", "norm", "none", ValueError, "norm_weight and norm_bias need norm"),
    (K, "fp8", "norm_weight", zeros(63), ValueError, r"norm_weight must be \[D\]"),
    (K, "fp8", "eps", -1.0, ValueError, "eps must not be negative"),
    (K, "fp8", "quant", "none", ValueError, "quant must be one of fp8, mxfp4, got 'none'"),
    (W, "fp8", 1, zeros(5, 16, 67, dtype=U), ValueError, "cache must be .*68.*, expected 68"),
    (W, "fp8", 1, zeros(5, 16, 68), TypeError, "cache must be one of uint8"),
    (W, "fp8", 1, zeros(5, 68, 16, dtype=U).mT, ValueError, "a page of cache must be contiguous"),
    (W, "fp8", 1, zeros(9, 16, 68, dtype=U)[::2].as_strided((4, 16, 68), (1090, 68, 1)), ValueError,
     "cache has a page stride of 1090 bytes; fp32 scales need a multiple of 4"),
    (W, "fp8", 1, zeros(9, 16, 68, dtype=U).as_strided((4, 16, 68), (68, 68, 1)), ValueError,
     "pages of cache overlap"),
    (W, "mxfp4", 1, zeros(5, 0, 34, dtype=U), ValueError, "cache: tokens of a page must"),
    (W, "mxfp4", 2, zeros(28, dtype=L), ValueError, "slots must be"),
    (W, "mxfp4", 2, zeros(29), TypeError, "slots must be one of int32, int64"),
    (G, "fp8", 2, zeros(4, dtype=L), ValueError, r"starts must be \[Q \+ 1\]"),
    (G, "fp8", "num_tokens", -1, ValueError, "num_tokens must be at least 0"),
    (G, "mxfp4", 0, zeros(5, 16, 33, dtype=U), ValueError, "cache has 33 bytes a token"),
    (G, "mxfp4", 1, zeros(2, 2), TypeError, "block_table must be one of int32, int64"),
    (S, "fp8", 0, zeros(2, 5, 3, 64), ValueError, "q_scale belongs to packed MXFP4"),
    (S, "fp8", "q_scale", None, ValueError, "q is packed MXFP4 and needs q_scale"),
    (S, "fp8", "q_scale", zeros(2, 5, 3, 1, dtype=U), ValueError, "q_scale must be"),
    (S, "fp8", "requests", zeros(2, 5), TypeError, "requests must be one of int32, int64"),
    (S, "fp8", "requests", zeros(2, 4, dtype=L), ValueError, "requests must be"),
    (S, "fp8", "sparse_block", 0, ValueError, "sparse_block must be at least 1"),
    (S, "fp8", "row_end", zeros(2, 4, dtype=L), ValueError, "row_end must be"),
    (S, "fp8", "quant", "mxfp4", ValueError, "cache must be"),
    (S, "mxfp4", 3, zeros(2, 4, 3, dtype=L), ValueError, "blocks must be"),
    (S, "mxfp4", 4, zeros(2, 5), TypeError, "end must be one of int32, int64"),
    (D, "fp8", 4, zeros(3, 2, dtype=L), ValueError, "block_table has 3 lines, q 2 batch items"),
    (D, "fp8", "num_positions", 33, ValueError, "num_positions = 33 exceeds .* block_table = 32"),
    (D, "mxfp4", 3, zeros(2, 5), TypeError, "row_end must be one of int32, int64"),
    (M, "", 1, zeros(2, 29, 31, dtype=U), ValueError, r"k must be \[B\|1, T, D/2\]"),
    (M, "", 1, zeros(1, 29, 32), TypeError, "k must be one of uint8"),
    (M, "", 2, zeros(1, 29, 1, dtype=U), ValueError, "k_scale must be"),
    (M, "", "row_start", zeros(3, 1, dtype=L), ValueError, "row_start must be"),
]  # fmt: skip


def spoilt(call: Call, where: int | str, value: Any) -> Call:
    args, kwargs = list(call.args), dict(call.kwargs)
    if isinstance(where, int):
        args[where] = value
    else:
        kwargs[where] = value
    return Call(call.op, tuple(args), kwargs)


@pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])
@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
@pytest.mark.parametrize("op, label, where, value, error, pattern", BAD)
def test_bad_argument_is_named(
    provider: str,
    fake: bool,
    op: str,
    label: str,
    where: int | str,
    value: Any,
    error: type[Exception],
    pattern: str,
) -> None:
    call = spoilt(SAMPLES[f"{op}-{label}" if label else op], where, value)
    run = getattr(getattr(torch.ops, provider), call.op)
    with pytest.raises(error, match=f"^{op}: {pattern}"):
        if fake:
            with FakeTensorMode() as mode:
                given = (call.args, call.kwargs)
                args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, given)
                run(*args, **kwargs)
        else:
            run(*call.args, **call.kwargs)


@pytest.mark.parametrize(
    "quant, dim, pattern",
    [
        ("fp8", 132, "fp8 has one scale for at most 128 dims, the head dim is 132"),
        ("fp8", 30, "fp8 needs a head dim that is a multiple of 4, got 30"),
        ("mxfp4", 48, "mxfp4 needs a head dim that is a multiple of 32, got 48"),
    ],
)
def test_head_dims_of_formats(quant: str, dim: int, pattern: str) -> None:
    q, weights = zeros(1, 1, 2, dim), zeros(1, 1, 2)
    with pytest.raises(ValueError, match=f"fused_indexer_q: {pattern}"):
        torch.ops.dsa.fused_indexer_q(q, weights, quant=quant)
    with pytest.raises(ValueError, match=f"indexer_k_quant: {pattern}"):
        torch.ops.dsa.indexer_k_quant(zeros(3, dim), quant=quant)


def test_hadamard_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="hadamard needs a power of two of dims, got 96"):
        torch.ops.dsa.indexer_k_quant(zeros(3, 96), quant="mxfp4", hadamard=True)


def test_tensors_of_two_devices_are_refused() -> None:
    call = SAMPLES["indexer_k_quant_and_cache-fp8"]
    bad = spoilt(call, 2, call.args[2].to("meta"))
    with pytest.raises(ValueError, match="slots is on meta"):
        torch.ops.dsa.indexer_k_quant_and_cache(*bad.args, **bad.kwargs)
