"""Values, whole sets and reasons of the matcher on the plainest spelling."""

import pytest
import torch
from pass_models import BLOCK, DIM, HEADS, TOPK, TwoLevel, calls, captured, hidden, same_sets
from torch import Tensor, nn

from dsa_compile.capture import export_graph
from dsa_compile.passes.pipeline import run_pipeline


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("provider", ["reference", "cpu"])
def test_source_and_consumer_are_matched(dynamic: bool, provider: str) -> None:
    model, x = TwoLevel(), hidden()
    result = run_pipeline(captured(model, x, dynamic=dynamic), provider=provider)
    assert [(s.kind, s.status) for s in result.sites] == [
        ("source", "fused"),
        ("consumer", "rewritten"),
    ]
    for site in result.sites:
        assert (site.heads, site.head_dim, site.block_size, site.k) == (HEADS, DIM, BLOCK, TOPK)
        assert site.provider == provider and site.reason is None and site.counterexample is None
        assert site.where.rsplit(":", 1)[0].endswith("pass_models.py")
    with torch.no_grad():
        for length in (29, 17, 41) if dynamic else (29,):
            other = hidden(length)
            assert same_sets(model(other), result.graph_module(other))


def test_the_input_graph_is_left_as_it_was() -> None:
    graph_module = captured(TwoLevel(), hidden())
    before = str(graph_module.graph)
    run_pipeline(graph_module)
    assert str(graph_module.graph) == before


class Single(nn.Module):
    """One selection whose scores come out of ``spell``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.ww, self.wk = nn.Linear(16, 32), nn.Linear(16, 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (4, 8))
        s = self.spell(torch.einsum("bshd,btd->bsht", q, self.wk(x)))
        return (s * self.ww(x).unsqueeze(-1)).sum(2).topk(5).indices

    def spell(self, s: Tensor) -> Tensor:
        return s.relu()


class NoRelu(Single):
    def spell(self, s: Tensor) -> Tensor:
        return s * 1.5


class Sigmoid(Single):
    def spell(self, s: Tensor) -> Tensor:
        return s.sigmoid()


class Bias(Single):
    def spell(self, s: Tensor) -> Tensor:
        return (s + 0.25).relu()


@pytest.mark.parametrize(
    ("model", "reason"),
    [(NoRelu(), "no relu"), (Sigmoid(), "sigmoid stands where"), (Bias(), "bias is added inside")],
)
def test_a_near_miss_is_kept_with_its_reason(model: nn.Module, reason: str) -> None:
    x = hidden()
    graph_module = captured(model, x)
    result = run_pipeline(graph_module)
    (site,) = result.sites
    assert site.status == "kept" and site.reason is not None and reason in site.reason
    assert not calls(result.graph_module, "indexer_select")
    with torch.no_grad():
        assert torch.equal(graph_module(x)[0], result.graph_module(x)[0])


class HeadLoop(Single):
    """A Python loop over heads; ``shift`` pairs head h with the weight of head h + shift."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        q, w, k = self.wq(x).unflatten(-1, (4, 8)), self.ww(x), self.wk(x).mT
        total = 0
        for h in range(4):
            total = total + (q[:, :, h] @ k).relu() * w[:, :, (h + self.shift) % 4, None]
        return total.topk(5).indices


def test_heads_in_a_loop_are_one_indexer_only_if_paired_rightly() -> None:
    x = hidden()
    (right,) = run_pipeline(captured(HeadLoop(0), x)).sites
    (wrong,) = run_pipeline(captured(HeadLoop(1), x)).sites
    assert (right.status, right.heads) == ("fused", 4)
    assert wrong.status == "kept" and wrong.counterexample is not None


class Budget(Single):
    """The number of picks is an argument."""

    def forward(self, x: Tensor, k: int) -> Tensor:  # type: ignore[override]
        q = self.wq(x).unflatten(-1, (4, 8))
        s = self.spell(torch.einsum("bshd,btd->bsht", q, self.wk(x)))
        return (s * self.ww(x).unsqueeze(-1)).sum(2).topk(k).indices


def test_a_budget_that_no_size_gives_is_named() -> None:
    model = Budget().eval()
    graph_module = export_graph(model, (hidden(), 5), dynamic=True)
    result = run_pipeline(graph_module)
    (site,) = result.sites
    assert site.status == "kept" and "that no size of the part gives" in str(site.reason)
    for k in (5, 7):
        assert same_sets(model(hidden(), k), result.graph_module(hidden(), k)[0])
