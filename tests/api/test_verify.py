"""``verify`` finds that optimised models agree, and finds the ones that do not."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import dsa_compile
from dsa_compile import OptimizedModule

from .models import NoIndexer, TwoLevel, WithBreak, inputs

STATIC = {"dynamic": False}
HOSTS = ["first call", "examples"]


def optimized_by(host: str, model: torch.nn.Module) -> OptimizedModule:
    examples = None if host == "first call" else (inputs(),)
    return dsa_compile.optimize(model, example_inputs=examples, config=STATIC)


@pytest.mark.parametrize("host", HOSTS)
def test_every_row_of_every_selection_agrees(host: str) -> None:
    model = TwoLevel().eval()
    result = dsa_compile.verify(model, optimized_by(host, model), inputs())
    assert [(s.site.kind, s.rows, s.same_rows) for s in result.sites] == [
        ("source", 58, 58),
        ("consumer", 58, 58),
    ]
    assert (result.rows, result.same_rows) == (116, 116)
    assert result.largest_score_difference == 0.0
    assert result.outputs == 3 and result.largest_output_difference < 1e-5
    text = str(result)
    assert "58 of 58" in text and "models.py" in text


def test_graphs_around_a_break_are_compared_too() -> None:
    model = WithBreak().eval()
    optimized = optimized_by("first call", model)
    optimized(inputs())
    result = dsa_compile.verify(model, optimized, inputs())
    assert {entry.site.kind for entry in result.sites} == {"source", "consumer"}
    assert result.rows == result.same_rows == 116


@pytest.mark.parametrize("host", HOSTS)
def test_a_wrong_rewrite_is_found(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_compile import pass_runner
    from dsa_compile.passes.pipeline import run_pipeline

    def corrupted(*args, **kwargs):
        result = run_pipeline(*args, **kwargs)
        graph = result.graph_module.graph
        for pair in result.pairs:
            if result.sites[pair.site].kind != "consumer":
                continue
            (node,) = (n for n in graph.nodes if n.name == pair.new_indices)
            # The worst pick of each row is replaced by the position after its best one.
            with graph.inserting_after(node):
                bad = graph.call_function(torch.roll, (node, 1, -1))
            with graph.inserting_after(bad):
                moved = graph.call_function(torch.add, (bad, 1))
            with graph.inserting_after(moved):
                kept = graph.call_function(torch.remainder, (moved, 29))
            pairs.append(dataclasses.replace(pair, new_indices=kept.name))
        graph.lint()
        result.graph_module.recompile()
        fresh = tuple(p for p in result.pairs if p.site not in {q.site for q in pairs})
        return dataclasses.replace(result, pairs=(*fresh, *pairs))

    pairs: list = []
    monkeypatch.setattr(pass_runner, "run_pipeline", corrupted)
    model = TwoLevel().eval()
    result = dsa_compile.verify(model, optimized_by(host, model), inputs())
    agreement = {entry.site.kind: entry for entry in result.sites}
    assert agreement["source"].same_rows == 58
    assert agreement["consumer"].same_rows < 58
    assert agreement["consumer"].largest_score_difference > 0


def test_another_original_gives_a_difference_of_outputs() -> None:
    model = TwoLevel(0).eval()
    optimized = optimized_by("first call", model)
    result = dsa_compile.verify(TwoLevel(1).eval(), optimized, inputs())
    assert result.largest_output_difference > 0.1 and result.differing_outputs > 0
    assert result.same_rows == result.rows


def test_a_copy_of_the_original_serves() -> None:
    model = TwoLevel().eval()
    optimized = optimized_by("examples", model)
    result = dsa_compile.verify(copy.deepcopy(model), optimized, inputs())
    assert result.same_rows == result.rows == 116


@pytest.mark.filterwarnings("ignore::dsa_compile.NoMatchWarning")
def test_nothing_to_compare_is_said() -> None:
    model = NoIndexer().eval()
    result = dsa_compile.verify(model, optimized_by("first call", model), inputs())
    assert result.sites == () and result.differing_outputs == 0
    assert "no rewritten selection" in str(result)


def test_results_are_frozen_plain_data() -> None:
    model = TwoLevel().eval()
    result = dsa_compile.verify(model, optimized_by("examples", model), inputs())
    data = result.to_dict()
    assert data["sites"][1]["site"]["kind"] == "consumer" and data["outputs"] == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.outputs = 0  # type: ignore[misc]


def test_what_is_not_optimised_is_refused() -> None:
    model = TwoLevel().eval()
    with pytest.raises(TypeError, match="optimized must come from dsa_compile.optimize"):
        dsa_compile.verify(model, model, inputs())
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        dsa_compile.verify(3, model, inputs())  # type: ignore[arg-type]
