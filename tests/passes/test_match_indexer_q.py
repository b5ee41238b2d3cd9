"""The query side of an indexer becomes one op: every spelling, whole models, near-misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_models import calls, captured
from query_models import (
    DIM,
    HADAMARDS,
    HEADS,
    NEG,
    ROTARY,
    ROTATIONS,
    QueryModel,
    Released,
    hidden,
    lines,
)
from query_near_misses import NEAR_MISSES
from torch import Tensor, fx

import dsa_compile
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline


def fused_ops(model: QueryModel, x: Tensor, **options: Any) -> tuple[PipelineResult, list[fx.Node]]:
    result = run_pipeline(captured(model, x, **options))
    return result, calls(result.graph_module, "fused_indexer_q")


def check(model: QueryModel, result: PipelineResult, *inputs: Tensor, exact: bool = False) -> None:
    """Values and picks of the model and of the rewritten graph."""
    with torch.no_grad():
        for x in inputs:
            values, picks = model(x)
            new_values, new_picks = result.graph_module(x)
            assert torch.equal(picks.sort(-1).values, new_picks.sort(-1).values)
            close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(new_values, values, **close)


def option(node: fx.Node, name: str) -> Any:
    given = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    return node.kwargs.get(name, given[name])


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name: str) -> None:
    last = name in ("complex", "rotate half", "even into halves")
    model, x = QueryModel(name, last=last), hidden()
    result, (op,) = fused_ops(model, x)
    assert option(op, "rope") == ROTATIONS[name][1]
    assert option(op, "rope_start") == (DIM - ROTARY if last else 0)
    assert not option(op, "hadamard") and option(op, "quant") == "none"
    check(model, result, x)
    text = f"{ROTATIONS[name][1]} rotation from dim {DIM - ROTARY if last else 0}"
    assert f"the query side is one op: {text}" in result.sites[0].notes


@pytest.mark.parametrize("name", HADAMARDS)
def test_hadamard_transforms(name: str) -> None:
    model, x = QueryModel("complex", name), hidden()
    result, (op,) = fused_ops(model, x)
    assert option(op, "hadamard") and option(op, "rope") == "interleaved"
    check(model, result, x)


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("form", ["fp8", "fake fp8"])
def test_fp8(form: str, pow2: bool) -> None:
    rotation = None if pow2 else "rotate half"
    model, x = QueryModel(rotation, None, form, pow2=pow2, floor=1e-10), hidden()
    result, (op,) = fused_ops(model, x)
    assert option(op, "quant") == "fp8" and option(op, "pow2_scale") == pow2
    assert option(op, "floor") == 1e-10 and option(op, "fold_scale")
    assert option(op, "cos") is None or rotation
    check(model, result, x)


def test_mxfp4_there_and_back() -> None:
    model, x = QueryModel("even and odd", "butterflies", "fake mxfp4"), hidden()
    result, (op,) = fused_ops(model, x)
    assert option(op, "quant") == "mxfp4" and option(op, "hadamard")
    check(model, result, x)


def test_weights_only_scaled_are_left_to_the_scorer() -> None:
    model, x = QueryModel(None), hidden()
    result, ops = fused_ops(model, x)
    assert not ops and result.sites[0].status == "fused" and not result.sites[0].notes


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_released_form(dynamic: bool) -> None:
    """RoPE of non-interleaved pairs, Hadamard, fp8 of q and k, folded scales, in bf16."""
    model, x = Released(), hidden(dtype=torch.bfloat16)
    result, (op,) = fused_ops(model, x, dynamic=dynamic)
    assert [s.status for s in result.sites] == ["fused"]
    assert option(op, "rope") == "half" and option(op, "hadamard")
    assert option(op, "quant") == "fp8" and option(op, "pow2_scale") and option(op, "fold_scale")
    scales = {option(op, "softmax_scale"), option(op, "head_scale")}
    assert scales == {HEADS**-0.5, DIM**-0.5}
    lengths = (13, 7, 29) if dynamic else (13,)
    check(model, result, *(hidden(n, dtype=torch.bfloat16) for n in lengths))


def test_the_released_form_through_optimize() -> None:
    model, x = Released().eval(), hidden(21, dtype=torch.bfloat16)
    optimized = dsa_compile.optimize(model, config={"require_match": 1, "provider": "cpu"})
    with torch.no_grad():
        values, picks = optimized(x)
        want_values, want_picks = model(x)
    assert torch.equal(picks.sort(-1).values, want_picks.sort(-1).values)
    torch.testing.assert_close(values, want_values, rtol=1e-5, atol=1e-6)
    assert optimized.report.op_counts_after["dsa_cpu.fused_indexer_q.default"] == 1
    found = dsa_compile.verify(model, optimized, x)
    assert found.same_rows == found.rows and found.largest_score_difference == 0


def test_layers_that_are_alike_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_compile.passes import match_indexer_q

    class Two(QueryModel):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), super().forward(x.flip(1))

    fits: list[object] = []
    fit = match_indexer_q.QueryFitter.fit
    monkeypatch.setattr(
        match_indexer_q.QueryFitter, "fit", lambda self: fits.append(self) or fit(self)
    )
    _, ops = fused_ops(Two(), hidden())
    assert len(ops) == 2 and len(fits) == 1


class Cached(QueryModel):
    """Rotates from where a cache ends, and keeps more positions than any small size has."""

    def forward(self, x: Tensor, cache: Tensor) -> Any:  # type: ignore[override]
        start, total = cache.shape[1], cache.shape[1] + x.shape[1]
        rows, positions = torch.arange(start, total), torch.arange(total)
        q = self.turn(self.wq(x).view(*x.shape[:2], HEADS, DIM), lines(rows, self.freqs))
        s = torch.einsum("bshd,btd->bsht", q, torch.cat((cache, self.wk(x)), 1)).relu()
        s = (s * self.ww(x).unsqueeze(-1)).sum(2)
        values, indices = s.masked_fill(positions > rows[:, None], NEG).topk(150, dim=-1)
        return values, indices.masked_fill(values == NEG, -1)


def test_rows_behind_a_cache_that_must_be_long() -> None:
    def inputs(length: int, rows: int) -> tuple[Tensor, Tensor]:
        return hidden(rows), torch.randn(2, length, DIM)

    model = Cached("even and odd", last=True)
    result = run_pipeline(captured(model, *inputs(170, 13), dynamic=True))
    (op,) = calls(result.graph_module, "fused_indexer_q")
    assert option(op, "rope_start") == DIM - ROTARY
    with torch.no_grad():
        for given in (inputs(170, 13), inputs(149, 2), inputs(300, 31)):
            values, picks = model(*given)
            new_values, new_picks = result.graph_module(*given)
            assert torch.equal(picks.sort(-1).values, new_picks.sort(-1).values)
            torch.testing.assert_close(new_values, values, rtol=1e-5, atol=1e-6)


class Gain(QueryModel):
    """A tensor of the model, which may change, scales the weights before the constants do."""

    def __init__(self, form: str = "none") -> None:
        super().__init__(form=form)
        self.register_buffer("gain", torch.tensor(0.7))

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return super().formatted(q, w * self.gain)


def test_weights_are_read_below_the_last_tensor_that_scales_them() -> None:
    model, x = Gain(), hidden()
    result, (op,) = fused_ops(model, x)
    product = option(op, "softmax_scale") * option(op, "head_scale")
    assert product == pytest.approx(DIM**-0.5 * HEADS**-0.5)
    check(model, result, x)
    result.graph_module.get_buffer("gain").fill_(-1.3)
    model.gain.fill_(-1.3)
    check(model, result, x)


class GainAfterTheScale(Gain):
    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        q, w = QueryModel.formatted(self, q, w)
        return q, w * self.gain


def test_data_below_the_scale_of_the_queries_is_named() -> None:
    model, x = GainAfterTheScale("fp8"), hidden()
    result, ops = fused_ops(model, x)
    assert not ops
    assert any("the head weights meet other data" in n for n in result.sites[0].notes)
    check(model, result, x)


@pytest.mark.parametrize("model", NEAR_MISSES, ids=lambda m: m.__name__)
def test_near_misses_stay_as_they_are(model: type[QueryModel]) -> None:
    made, x = model(), hidden()
    result, ops = fused_ops(made, x)
    assert not ops
    (site,) = result.sites
    assert site.status == "fused" and any("query side is left" in n for n in site.notes)
    check(made, result, x)
