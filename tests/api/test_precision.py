"""``precision="fp8"`` and ``"mxfp4"`` on models that have neither."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dsa_compile
from dsa_compile import Config, ProviderError
from dsa_compile.capture import export_graph
from dsa_compile.pass_runner import PassSettings, run_passes
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

HEADS, HIDDEN, BLOCK, BLOCKS, TOPK = 16, 24, 8, 3, 6


class Quantisable(nn.Module):
    """A source and a consumer over the same keys: x [B, S, HIDDEN] to the picks of both.

    Args:
        dim: head dim.
        rotary: whether queries and keys are rotated, half-split, in their first 16 dims.
    """

    def __init__(self, dim: int = 32, *, rotary: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.rotary = dim, rotary
        self.wq = nn.ModuleList(nn.Linear(HIDDEN, HEADS * dim, bias=False) for _ in "ab")
        self.ww = nn.ModuleList(nn.Linear(HIDDEN, HEADS, bias=False) for _ in "ab")
        self.wk = nn.Linear(HIDDEN, dim, bias=False)
        self.register_buffer("freqs", 1e2 ** -torch.linspace(0, 1, 8))

    def turned(self, x: Tensor) -> Tensor:
        """Rotates [B, S, .., D] by the positions of its rows."""
        if not self.rotary:
            return x
        angle = torch.arange(x.shape[1], device=x.device)[:, None].float() * self.freqs
        if x.dim() == 4:
            angle = angle[:, None]
        cos, sin = angle.cos(), angle.sin()
        first, second, rest = torch.split(x, [8, 8, self.dim - 16], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def keys(self, x: Tensor) -> Tensor:
        return self.turned(self.wk(x))

    def queries(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        q = self.turned(self.wq[layer](x).unflatten(-1, (HEADS, self.dim)))
        return q, self.ww[layer](x)

    def scores(self, x: Tensor, k: Tensor, layer: int) -> Tensor:
        q, w = self.queries(x, layer)
        s = torch.einsum("bshd,btd->bsht", q, k).relu()
        return (s * w.unsqueeze(-1)).sum(2)

    def picks(self, masked: Tensor) -> Tensor:
        values, indices = masked.topk(TOPK, -1)
        return indices.masked_fill(values == -torch.inf, -1)

    def select(self, scores: Any, length: int) -> tuple[Tensor, Tensor]:
        """The picks of both layers by their scores [B, S, S]."""
        at = torch.arange(length)
        seen = at <= at[:, None]
        own = scores(0).masked_fill(~seen, -torch.inf)
        blocks = F.pad(own, (0, -length % BLOCK), value=-torch.inf)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
        newest = torch.arange(blocks.shape[-1]) == (at // BLOCK)[:, None]
        best = blocks.masked_fill(newest, torch.inf).topk(BLOCKS, -1)
        table = torch.zeros_like(blocks, dtype=torch.bool)
        table = table.scatter(-1, best.indices, best.values > -torch.inf)
        keep = table.repeat_interleave(BLOCK, -1)[..., :length]
        return self.picks(own), self.picks(scores(1).masked_fill(~(seen & keep), -torch.inf))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.keys(x)
        return self.select(lambda layer: self.scores(x, k, layer), x.shape[1])


def round_trip(x: Tensor, precision: str) -> Tensor:
    """Through fp8 or MXFP4 and back, in fp64, by torch's own casts or by the grid of e2m1."""
    if precision == "fp8":
        scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(1e-4) / 448))
        return (x / scale).to(torch.float8_e4m3fn).double() * scale
    groups = x.unflatten(-1, (-1, 32))
    scale = 2.0 ** torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6))
    y = groups.double() / scale
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    return ((y / step).round() * step * scale).flatten(-2)


def expected(model: Quantisable, x: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Picks by scores of quantised operands in fp64."""

    def scores(layer: int) -> Tensor:
        q, w = model.queries(x, layer)
        q, k = round_trip(q, precision), round_trip(model.keys(x), precision)
        return (torch.einsum("bshd,btd->bsht", q, k).relu() * w.double().unsqueeze(-1)).sum(2)

    with torch.no_grad():
        return model.select(scores, x.shape[1])


def hidden(length: int = 61, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1))


@cache
def captured(rotary: bool = False) -> fx.GraphModule:
    return export_graph(Quantisable(rotary=rotary).eval(), (hidden(),), dynamic=False)


def calls(result: PipelineResult) -> dict[str, int]:
    """Calls of our ops by name, without namespace and overload."""
    counts = result.op_counts_after.items()
    return {name.split(".")[1]: n for name, n in counts if name.startswith("dsa")}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("precision", ["fp8", "mxfp4"])
def test_picks_are_those_of_quantised_operands(precision: str, provider: str, rotary: bool) -> None:
    model, x = Quantisable(rotary=rotary), hidden()
    result = run_pipeline(captured(rotary), precision=precision, provider=provider)
    with torch.no_grad():
        got = result.graph_module(x)
    for mine, want in zip(got, expected(model, x, precision), strict=True):
        assert torch.equal(mine.sort(-1).values, want.sort(-1).values)


@pytest.mark.parametrize("precision", ["fp8", "mxfp4"])
def test_the_ops_of_a_precision(precision: str) -> None:
    """Queries in the fused op, keys once for both layers, sparse scores of packed keys as such."""
    result = run_pipeline(captured(rotary=True), precision=precision)
    counts = calls(result)
    assert counts["fused_indexer_q"] == 2 and counts["indexer_k_quant"] == 1
    sparse, other = "mxfp4_sparse_mqa_logits", "sparse_mqa_logits"
    if precision == "fp8":
        sparse, other = other, sparse
    assert counts[sparse] == 1 and other not in counts
    assert [site.status for site in result.sites] == ["fused", "rewritten"]
    for site in result.sites:
        assert any(f"precision={precision!r}" in note for note in site.notes)
        assert any("half rotation" in note for note in site.notes)


def test_preserve_quantises_nothing() -> None:
    counts = calls(run_pipeline(captured()))
    assert counts["sparse_mqa_logits"] == 1 and not any("quant" in name for name in counts)


def test_verify_reports_the_change_in_picks() -> None:
    precision = "mxfp4"
    model, x = Quantisable(rotary=True).eval(), hidden()
    fast = dsa_compile.optimize(model, config={"require_match": 2, "precision": precision})
    found = dsa_compile.verify(model, fast, x)
    source, consumer = found.sites
    assert source.rows == consumer.rows == 2 * x.shape[1]
    # The rows of the first TOPK positions select all that they see.
    assert 2 * TOPK <= source.same_rows < source.rows
    with torch.no_grad():
        size = float(model.scores(x, model.keys(x), 0).abs().max())
    assert 0 < source.largest_score_difference < 0.5 * size


def test_rounding_of_the_model_itself_is_kept() -> None:
    """What is fp8 already is not quantised again."""

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        return (x / scale).to(torch.float8_e4m3fn).float(), scale.squeeze(-1)

    class Quantised(Quantisable):
        def keys(self, x: Tensor) -> Tensor:
            return rounded(super().keys(x))[0]

        def queries(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            q, w = super().queries(x, layer)
            codes, scale = rounded(q)
            return codes, w * scale

    model, x = Quantised().eval(), hidden()
    graph_module = export_graph(model, (x,), dynamic=False)
    result = run_pipeline(graph_module, precision="fp8")
    assert "indexer_k_quant" not in calls(result)
    with torch.no_grad():
        for got, want in zip(result.graph_module(x), model(x), strict=True):
            assert torch.equal(got.sort(-1).values, want.sort(-1).values)


@pytest.mark.parametrize(
    ("precision", "dim", "wants"), [("mxfp4", 24, "multiple of 32"), ("fp8", 132, "up to 128")]
)
def test_a_head_dim_that_does_not_fit_is_one_error(precision: str, dim: int, wants: str) -> None:
    model = Quantisable(dim).eval()
    settings = PassSettings.for_model(Config(precision=precision), model)
    with pytest.raises(ProviderError, match=wants) as caught:
        run_passes(export_graph(model, (hidden(29),), dynamic=False), settings)
    for need in caught.value.needs:
        assert f"head dim of {dim}" in need.what and "precision='preserve'" in need.mend


def test_triton_reads_fp8_operands_as_they_are() -> None:
    pytest.importorskip("triton")
    result = run_pipeline(captured(rotary=True), provider="triton", precision="fp8")
    wanted = ("dsa_triton.indexer_", "dsa_triton.sparse_mqa_logits")
    scorers = [
        n
        for n in result.graph_module.graph.nodes
        if str(n.target).startswith(wanted) and "quant" not in str(n.target)
    ]
    assert len(scorers) == 2
    for node in scorers:
        held = [a.meta["val"].dtype for a in node.args[:3]]
        assert held == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32]
        assert node.kwargs["key_scale"].meta["val"].dtype == torch.float32


def test_triton_reads_packed_operands_as_they_are() -> None:
    pytest.importorskip("triton")
    counts = calls(run_pipeline(captured(), provider="triton", precision="mxfp4"))
    assert counts["mxfp4_sparse_mqa_logits"] == 1 and "sparse_mqa_logits" not in counts
