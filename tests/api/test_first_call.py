"""Without example inputs: compiled at the first call, graph by graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile import NoMatchError, NoMatchWarning, OptimizedModule, SlowPathWarning

from .models import (
    DIM,
    HEAD_DIM,
    ByKeyword,
    CacheArgument,
    NoIndexer,
    TwoLevel,
    WithBreak,
    assert_same,
    inputs,
)

STATIC = {"dynamic": False}


def statuses(optimized: OptimizedModule) -> list[tuple[str, str]]:
    return [(site.kind, site.status) for site in optimized.report.sites]


def test_other_sizes_run_in_the_same_graph() -> None:
    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model)
    assert optimized.report.graphs == 0 and optimized.report.sites == ()
    for batch, rows in ((2, 29), (3, 40), (2, 12)):
        x = inputs(batch, rows)
        assert_same(optimized(x), model(x))
    assert optimized.report.graphs == 1
    assert statuses(optimized) == [("source", "fused"), ("consumer", "rewritten")]
    assert optimized.report.sites[1].where.split(":")[0].endswith("models.py")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode_gives_plain_results(mode) -> None:
    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    with mode():
        got = optimized(inputs())
    assert_same(got, model(inputs()))
    assert not got[0].requires_grad and optimized.report.matched


def test_keywords_nested_inputs_and_results() -> None:
    model = ByKeyword().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    shift = torch.full((DIM,), 0.1)
    got = optimized(inputs(), extra={"shift": shift}, gain=0.5)
    expected = model(inputs(), extra={"shift": shift}, gain=0.5)
    assert_same((got["y"], *got["picks"]), (expected["y"], *expected["picks"]))
    assert got["gain"] == 0.5 and got["none"] is None
    assert optimized.report.matched


def test_graphs_around_a_break_share_one_report() -> None:
    model = WithBreak().eval()
    optimized = dsa_compile.optimize(model, config={**STATIC, "require_match": 2})
    assert_same(optimized(inputs()), WithBreak().eval()(inputs()))
    report = optimized.report
    assert report.graphs >= 2
    assert {site.graph for site in report.matched} == {0, 1}
    assert {site.kind for site in report.sites} >= {"source", "consumer"}
    assert len(model.seen) == 1


def test_decoding_is_compiled_once_and_caches_are_written() -> None:
    model = CacheArgument().eval()
    optimized = dsa_compile.optimize(model)
    caches = [[torch.zeros(2, 40, HEAD_DIM), torch.zeros(2, 40, DIM)] for _ in range(2)]
    x = inputs(2, 20)
    start, graphs = 0, []
    for size in (12, 1, 1, 1, 1, 1):
        step = x[:, start : start + size]
        got = optimized(step, *caches[0], start)
        assert_same(got, model(step, *caches[1], start))
        graphs.append(optimized.report.graphs)
        start += size
    for mine, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graphs[-1] == graphs[2] and graphs[-1] <= 3
    assert all(site.status != "kept" for site in optimized.report.sites)


def test_the_kernels_keep_to_the_bytes_they_are_given() -> None:
    from dsa_compile.kernels.cpu import working_set

    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model, config={**STATIC, "chunk_bytes": 4096})
    assert_same(optimized(inputs()), model(inputs()))
    before, seen = working_set(), []
    (graph,) = optimized._dsa_engine.session.graphs

    def observe(_, args):
        seen.append(working_set())
        return graph.result.graph_module(*args)

    graph._session.observer = observe
    optimized(inputs())
    assert seen == [4096] and working_set() == before


def test_nothing_global_stays_changed() -> None:
    import torch._dynamo.config as dynamo

    before = dynamo.specialize_float, torch.is_grad_enabled()
    dsa_compile.optimize(TwoLevel().eval(), config=STATIC)(inputs())
    assert (dynamo.specialize_float, torch.is_grad_enabled()) == before


def test_nothing_matched_always_warns_with_the_nearest_miss() -> None:
    optimized = dsa_compile.optimize(NoIndexer().eval(), config=STATIC)
    with pytest.warns(NoMatchWarning, match="nearest miss: .*models.py:") as caught:
        optimized(inputs())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimized(inputs())
    with pytest.warns(NoMatchWarning, match="nearest miss"):
        optimized(inputs(3, 7))


def test_no_selection_at_all_is_said_too() -> None:
    optimized = dsa_compile.optimize(nn.Linear(DIM, 2).eval(), config=STATIC)
    with pytest.warns(NoMatchWarning, match="no top-k or sort was found"):
        optimized(inputs())


@pytest.mark.parametrize("required", [True, 1, 3])
def test_too_few_matches_are_an_error_at_every_call(required: bool | int) -> None:
    model = TwoLevel() if required == 3 else NoIndexer()
    optimized = dsa_compile.optimize(model.eval(), config={**STATIC, "require_match": required})
    for _ in range(2):
        with pytest.raises(NoMatchError, match=f"require_match={required}"):
            optimized(inputs())


def test_enough_matches_pass() -> None:
    optimized = dsa_compile.optimize(TwoLevel().eval(), config={**STATIC, "require_match": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoMatchWarning)
        optimized(inputs())


def test_a_call_without_any_graph_is_not_silent() -> None:
    class Hidden(TwoLevel):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x)

    optimized = dsa_compile.optimize(Hidden().eval(), config=STATIC)
    with pytest.warns(SlowPathWarning, match="unoptimised"):
        optimized(inputs())
    assert any("unoptimised" in note for note in optimized.report.notes)
