"""Whole graphs on DeepGEMM and DeepSelect, through both stand-ins."""

from __future__ import annotations

from typing import Any

import pass_models
import pytest
import torch
from pass_models import captured, hidden
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dsa_compile
from dsa_compile import target
from dsa_compile.kernels.providers import uncapturable
from dsa_compile.passes.context import StageError, UnservedError
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

from .strict_deep_gemm import StrictDeepGemm

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that DeepGEMM takes."""
    for name, size in {"HEADS": 32, "DIM": 128, "BLOCK": 8}.items():
        monkeypatch.setattr(pass_models, name, size)


class Consumer(pass_models.TwoLevel):
    """x [B, S, 16] and published blocks [B, S, n] -> the picks of a consumer alone."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        n, size = x.shape[1], pass_models.BLOCK
        table = torch.zeros(x.shape[0], n, -(-n // size) + 1, dtype=torch.bool)
        table = table.scatter(-1, torch.where(ids < 0, -(-n // size), ids), True)[..., :-1]
        keep = table.repeat_interleave(size, dim=-1)[..., :n]
        return self.picks(self.scores(x, 1).masked_fill(~keep, -torch.inf))


def spaces(result: PipelineResult) -> dict[str, set[str]]:
    """Our ops in a graph, by namespace."""
    found: dict[str, set[str]] = {}
    for name in result.op_counts_after:
        space, _, op = name.partition(".")
        if space.startswith("dsa"):
            found.setdefault(space, set()).add(op.partition(".")[0])
    return found


def in_common(got: Any, want: Any) -> float:
    """Share of the picks of ``want`` that ``got`` has, too."""
    hits = total = 0
    for mine, theirs in zip(tree_leaves(got), tree_leaves(want), strict=True):
        for a, b in zip(mine.flatten(0, -2).tolist(), theirs.flatten(0, -2).tolist(), strict=True):
            hits += len({*a} & {*b})
            total += len({*b})
    return hits / total


def needs(model: nn.Module, *inputs: Tensor, precision: str) -> list[tuple[str, str]]:
    with pytest.raises(StageError) as caught:
        run_pipeline(captured(model, *inputs), provider="deepgemm", precision=precision)
    assert caught.value.stage == "check_kernels"
    fault = caught.value.__cause__
    assert isinstance(fault, UnservedError)
    return list(fault.needs)


@pytest.mark.parametrize("provider", ["deepgemm", "deepselect"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_layers_run_on_it(
    provider: str, dynamic: bool, sizes: None, process: StrictDeepGemm
) -> None:
    graph = captured(pass_models.TwoLevel(2), hidden(61), dynamic=dynamic)
    marked = uncapturable(provider)
    result = run_pipeline(graph, provider=provider, precision="fp8", uncapturable=marked)
    assert spaces(result) == {
        "dsa_deep": {"indexer_publish", "candidate_expand", "sparse_mqa_logits", "topk_positions"},
        # What DeepGEMM has no kernels for; Triton's on a GPU.
        "dsa_cpu": {"fused_indexer_q", "indexer_k_quant"},
    }
    names = ("sparse_mqa_logits", "indexer_publish")
    assert set(result.breaks) >= {f"dsa_deep::{name}.default" for name in names}
    want = run_pipeline(graph, provider="reference", precision="fp8").graph_module
    for length in (61, 45) if dynamic else (61,):
        x = hidden(length)
        # Its scores are rounded to bf16, which moves picks near the cut.
        assert in_common(result.graph_module(x), want(x)) > 0.95
    assert process.calls.count("fp8_fp4_sparse_mqa_logits") == (4 if dynamic else 2)


def test_packed_operands_of_consumers(sizes: None, process: StrictDeepGemm) -> None:
    ids = torch.tensor([0, 2, 5, -1, 7]).expand(2, 61, 5).contiguous()
    graph = captured(Consumer(), hidden(61), ids)
    result = run_pipeline(graph, provider="deepgemm", precision="mxfp4")
    assert "mxfp4_sparse_mqa_logits" in spaces(result)["dsa_deep"]
    want = run_pipeline(graph, provider="reference", precision="mxfp4").graph_module
    x = hidden(61)
    assert in_common(result.graph_module(x, ids), want(x, ids)) > 0.95
    assert process.calls.count("fp8_fp4_sparse_mqa_logits") == 1


def test_sources_of_packed_operands_are_one_error(sizes: None) -> None:
    ((what, mend),) = needs(pass_models.TwoLevel(), hidden(61), precision="mxfp4")
    assert "DeepGEMM multiplies float8_e4m3fn" in what and "precision='fp8'" in mend


def test_every_unmet_need_of_every_site_is_listed() -> None:
    """Heads of 8 dims and blocks of 4, and operands as they are."""
    found = needs(pass_models.TwoLevel(), hidden(61), precision="preserve")
    for layer in ("sparse", "dense"):
        assert any(f"head dim 8; DeepGEMM's {layer} scores" in what for what, _ in found)
    assert any("sparse blocks of 4 columns" in what for what, _ in found)
    assert sum("queries are float32" in what for what, _ in found) == 2
    assert all(what.startswith("the indexer at ") and mend for what, mend in found)


def test_a_user_asks_for_it_by_name(sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an SM100 machine with both packages: what is missing there is said by other tests."""
    monkeypatch.setattr(target.Target, "needs", lambda self, provider: ())
    monkeypatch.setitem(target.SERVED, "deepgemm", None)
    model, x = pass_models.TwoLevel().eval(), hidden(61)
    config = {"provider": "deepgemm", "precision": "fp8", "require_match": 2}
    mine = dsa_compile.optimize(model, example_inputs=(x,), config=config)
    theirs = dsa_compile.optimize(
        model, example_inputs=(x,), config={**config, "provider": "reference"}
    )
    assert in_common(mine(x), theirs(x)) > 0.95
    assert "provider deepgemm" in str(mine.report)
    with pytest.raises(dsa_compile.ProviderError, match="queries are float32") as caught:
        dsa_compile.optimize(model, example_inputs=(x,), config={"provider": "deepgemm"})
    assert len(caught.value.needs) == 2
