"""Whole indexers with a fused query side on the Triton kernels, where fp8 operands stay fp8."""

from __future__ import annotations

import pytest
import torch
from pass_models import calls, captured
from query_models import QueryModel, Released, hidden

from dsa_compile.passes.pipeline import run_pipeline

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("precision", ["preserve", "fp8"])
def test_fp8_operands_are_read_as_stored(precision: str, device: str) -> None:
    """The released form brings its own fp8; the other model is quantised by name."""
    own = precision == "preserve"
    model = (Released() if own else QueryModel("complex")).to(device)
    x = hidden(13, 1, torch.bfloat16 if own else torch.float32).to(device)
    graph_module = captured(model, x)
    result = run_pipeline(graph_module, provider="triton", precision=precision)
    (scorer,) = calls(result.graph_module, "indexer_select")
    assert [n.meta["val"].dtype for n in scorer.args[:2]] == [FP8, FP8]  # type: ignore[union-attr]
    plain = run_pipeline(graph_module, provider="reference", precision=precision)
    with torch.no_grad():
        want, got = (run.graph_module(x)[0] for run in (plain, result))
    # A number next to the point between two fp8 codes may become either.
    size = float(want[want.isfinite()].abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-2 * size)
