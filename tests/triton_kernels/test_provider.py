"""Whole models on the Triton kernels: what is rewritten, which ops run, and what comes out."""

from __future__ import annotations

import pytest
import torch
from pass_models import TwoLevel, calls, captured, hidden, same_sets

import dsa_compile
from dsa_compile.cost import crossover_on
from dsa_compile.passes.pipeline import run_pipeline
from dsa_compile.target import Target


def test_a_consumer_is_three_calls() -> None:
    result = run_pipeline(captured(TwoLevel(), hidden()), provider="triton")
    after = {n: c for n, c in result.op_counts_after.items() if n.startswith("dsa")}
    assert after.pop("dsa_triton.candidate_expand.default") == 1
    assert after.pop("dsa_triton.sparse_mqa_logits.default") >= 1
    assert after.pop("dsa_triton.topk_positions.default") >= 1
    assert not [n for n in after if "topk" in n] and set(n.split(".")[0] for n in after) <= {
        "dsa_triton"
    }


@pytest.mark.parametrize("host", ["exported", "compiled"])
def test_a_model_gives_what_it_gave(host: str, device: str) -> None:
    # Interpreted kernels take seconds even at this size.
    model, x = TwoLevel().eval().to(device), hidden(9, 1).to(device)
    given = (x,) if host == "exported" else None
    config = {"provider": "triton", "require_match": True}
    optimized = dsa_compile.optimize(model, example_inputs=given, config=config)
    with torch.no_grad():
        got, want = optimized(x), model(x)
    assert same_sets(got, want)
    assert {s.provider for s in optimized.report.matched} == {"triton"}


def test_the_crossover_of_a_gpu_is_written_into_the_graph(device: str) -> None:
    """The pipeline as a GPU would run it: one op that holds both forms, and a note at the site."""
    crossover = crossover_on(Target("sm90"), "triton")
    model, x = TwoLevel().to(device), hidden(9, 1).to(device)
    result = run_pipeline(captured(model, x), provider="triton", crossover=crossover)
    (both,) = calls(result.graph_module, "select_columns")
    assert type(both.kwargs["dense_below"]) is int
    (site,) = [s for s in result.sites if s.status == "rewritten"]
    (note,) = [n for n in site.notes if "scored densely" in n]
    assert f"{both.kwargs['dense_below']:,} positions" in note and "4 rows or fewer" in note
    with torch.no_grad():
        assert same_sets(result.graph_module(x), captured(model, x)(x))
