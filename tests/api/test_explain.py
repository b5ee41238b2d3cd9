"""``explain`` gives the report of ``optimize`` and runs only the model as it is."""

from __future__ import annotations

import warnings

import pytest

import dsa_compile
from dsa_compile import ConfigError

from .models import ByKeyword, NoIndexer, TwoLevel, WithBreak, inputs

STATIC = {"dynamic": False}


def test_the_report_is_the_one_of_optimize() -> None:
    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    optimized(inputs())
    assert dsa_compile.explain(model, inputs(), config=STATIC) == optimized.report


def test_the_rewritten_graphs_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_compile import pass_runner
    from dsa_compile.passes.pipeline import run_pipeline

    def broken(*args, **kwargs):
        result = run_pipeline(*args, **kwargs)
        for node in result.graph_module.graph.find_nodes(op="output"):
            node.args = ((),)
        result.graph_module.recompile()
        return result

    monkeypatch.setattr(pass_runner, "run_pipeline", broken)
    report = dsa_compile.explain(WithBreak().eval(), inputs(), config=STATIC)
    assert report.graphs >= 2 and len(report.matched) == 2


def test_keywords_are_the_models_own() -> None:
    report = dsa_compile.explain(ByKeyword().eval(), x=inputs(), gain=2.0, config=STATIC)
    assert [site.status for site in report.sites] == ["fused", "rewritten"]


def test_required_matches_are_not_enforced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = dsa_compile.explain(
            NoIndexer().eval(), inputs(), config={**STATIC, "require_match": True}
        )
    assert report.matched == () and report.nearest_miss is not None
    assert "nearest miss" in str(report)


def test_an_optimised_module_is_explained_by_its_original() -> None:
    model = TwoLevel().eval()
    optimized = dsa_compile.optimize(model, config=STATIC)
    assert len(dsa_compile.explain(optimized, inputs(), config=STATIC).matched) == 2
    assert optimized.report.graphs == 0


def test_bad_requests_are_refused() -> None:
    with pytest.raises(TypeError, match="torch.nn.Module"):
        dsa_compile.explain(len, inputs())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'provider'"):
        dsa_compile.explain(NoIndexer().eval(), inputs(), config={"providr": "cpu"})
