"""Every bad argument is refused by its name, by the kernels and by the fakes alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from .samples import Call, calls

SAMPLES = {call.name: call for call in calls()}
F, L = torch.float32, torch.int64


def zeros(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


# sample, argument (position or name), bad value, error, pattern
BAD: list[tuple[str, int | str, Any, type[Exception], str]] = [
    ("indexer_select-few", 0, zeros(2, 5, 8), ValueError, r"q must be \[B, S, H, D\]"),
    ("indexer_select-few", 0, zeros(2, 5, 3, 8, dtype=L), TypeError, "q must be one of"),
    ("indexer_select-few", 1, zeros(2, 29, 9), ValueError, "k must be .*dim 2 is 9, expected 8"),
    ("indexer_select-few", 1, zeros(3, 29, 8), ValueError, "k must be .* expected 2 or 1"),
    ("indexer_select-few", 1, zeros(2, 29, 8).bool(), TypeError, "k must be one of"),
    ("indexer_select-few", 2, zeros(2, 5, 4), ValueError, "weights must be .*dim 2 is 4"),
    ("indexer_select-few", 2, zeros(1, 5, 3), ValueError, "weights must be"),
    ("indexer_select-few", "topk", 30, ValueError, "topk = 30 exceeds .* T = 29"),
    ("indexer_select-few", "topk", -1, ValueError, "topk must be at least 0, got -1"),
    ("indexer_select-few", "key_scale", zeros(2, 28), ValueError, "key_scale must be"),
    ("indexer_select-few", "key_scale", zeros(2, 29, dtype=L), TypeError, "key_scale must be"),
    ("indexer_select-few", "row_start", zeros(2, 4, dtype=L), ValueError, "row_start must be"),
    ("indexer_select-few", "row_start", zeros(2, 5), TypeError, "row_start must be one of int32"),
    ("indexer_select-few", "row_end", zeros(5, dtype=L), ValueError, "row_end must be"),
    ("indexer_select-few", "row_end", zeros(2, 5).bool(), TypeError, "row_end must be one of"),
    ("indexer_select-few", "mask", zeros(2, 5, 29), TypeError, "mask must be one of bool"),
    ("indexer_select-few", "mask", zeros(2, 5, 28).bool(), ValueError, "mask must be"),
    ("indexer_select-few", "bias", zeros(2, 3, 29), ValueError, "bias must be .* 5 or 1"),
    ("indexer_select-few", "bias", zeros(2, 5, 29, dtype=L), TypeError, "bias must be one of"),
    ("indexer_select-candidates", "block_size", 0, ValueError, "block_size must be at least 1"),
    ("indexer_select-candidates", "block_ids", zeros(2, 5, 3), TypeError, "block_ids must be"),
    ("indexer_select-candidates", "block_ids", zeros(2, 3, dtype=L), ValueError, "block_ids must"),
    ("indexer_publish", "topk", 30, ValueError, "topk = 30 exceeds"),
    ("indexer_publish", "block_size", 0, ValueError, "block_size must be at least 1"),
    ("indexer_publish", "num_blocks", 9, ValueError, "num_blocks = 9 exceeds .* = 8"),
    ("indexer_publish", "num_blocks", -1, ValueError, "num_blocks must be at least 0"),
    ("indexer_block_max", "block_size", -4, ValueError, "block_size must be at least 1"),
    ("candidate_expand", 0, zeros(2, 5, 3), TypeError, "block_ids must be one of int32, int64"),
    ("candidate_expand", 1, zeros(2, 4, dtype=L), ValueError, "row_start dim 1 is 4, expected 5"),
    ("candidate_expand", 2, zeros(3, 5, dtype=L), ValueError, "row_end dim 0 is 3, expected 2"),
    ("candidate_expand", "sparse_block", 3, ValueError, "sparse_block = 3 does not divide"),
    ("candidate_expand", "sparse_block", 0, ValueError, "sparse_block must be at least 1"),
    ("candidate_expand", "num_positions", -1, ValueError, "num_positions must be at least 0"),
    ("candidate_columns", 0, zeros(2, 5, dtype=L), ValueError, "blocks must be"),
    ("candidate_columns", "sparse_block", 0, ValueError, "sparse_block must be at least 1"),
    ("sparse_mqa_logits", 3, zeros(2, 4, 6, dtype=L), ValueError, "blocks must be"),
    ("sparse_mqa_logits", 4, zeros(2, 5), TypeError, "end must be one of int32, int64"),
    ("sparse_mqa_logits", 4, zeros(2, 5, 1, dtype=L), ValueError, "end must be"),
    ("sparse_mqa_logits", "mask", zeros(2, 5, 29).bool(), ValueError, r"mask must be .*W\]"),
    ("sparse_mqa_logits", "sparse_block", 0, ValueError, "sparse_block must be at least 1"),
    ("topk", 0, zeros(2, 5, 12, dtype=L), TypeError, "logits must be one of"),
    ("topk", 1, zeros(2, 4, dtype=L), ValueError, "end must be"),
    ("topk", "topk", -1, ValueError, "topk must be at least 0"),
    ("topk_remap", 1, zeros(2, 5, 7, dtype=L), ValueError, "columns must be .*dim 2 is 7"),
    ("topk_remap", 1, zeros(2, 5, 6), TypeError, "columns must be one of"),
    ("topk_remap", 2, zeros(2, 3, 6, dtype=L), ValueError, "blocks must be"),
    ("topk_remap", "num_positions", 5, ValueError, "values: top-k = 6 exceeds num_positions = 5"),
]


def spoilt(call: Call, where: int | str, value: Any) -> Call:
    args, kwargs = list(call.args), dict(call.kwargs)
    if isinstance(where, int):
        args[where] = value
    else:
        kwargs[where] = value
    return Call(call.op, tuple(args), kwargs)


@pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])
@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
@pytest.mark.parametrize("name, where, value, error, pattern", BAD)
def test_bad_argument_is_named(
    provider: str,
    fake: bool,
    name: str,
    where: int | str,
    value: Any,
    error: type[Exception],
    pattern: str,
) -> None:
    call = spoilt(SAMPLES[name], where, value)
    op = getattr(getattr(torch.ops, provider), call.op)
    with pytest.raises(error, match=f"{call.op}: {pattern}"):
        if fake:
            with FakeTensorMode() as mode:
                given = (call.args, call.kwargs)
                args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, given)
                op(*args, **kwargs)
        else:
            op(*call.args, **call.kwargs)


def test_tensors_of_two_devices_are_refused() -> None:
    call = spoilt(SAMPLES["indexer_select-few"], "row_end", zeros(2, 5, dtype=L).to("meta"))
    with pytest.raises(ValueError, match="row_end is on meta"):
        torch.ops.dsa.indexer_select(*call.args, **call.kwargs)
