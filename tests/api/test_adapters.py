"""Models that call opaque ops enter at the canonical ops through declared adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsa_compile

from .opaque_ops import PAGED, dense_adapter, empty_registry  # noqa: F401 - a fixture

ENGINE = torch.ops.dsa_test_engine
FP8 = torch.float8_e4m3fn
HEADS, DIM, TOPK, BLOCK, BLOCKS = 16, 32, 6, 4, 3
NEG = float("-inf")
STATIC = {"dynamic": False}


class Engine(nn.Module):
    """One layer: opaque dense logits over M rows and T packed keys, then a selection."""

    def __init__(self, op: str = "mqa_logits", clean: bool = True) -> None:
        super().__init__()
        self.op, self.clean = getattr(ENGINE, op), clean

    def forward(
        self, q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor
    ) -> Tensor:
        logits = self.op(q.to(FP8), [k.to(FP8), k_scale], weights, ks, ke, self.clean)
        if not self.clean:
            position = torch.arange(logits.shape[1])
            inside = (position >= ks[:, None]) & (position < ke[:, None])
            logits = logits.masked_fill(~inside, NEG)
        return self.select(logits)

    def select(self, logits: Tensor) -> Tensor:
        values, places = logits.topk(min(TOPK, logits.shape[-1]), dim=-1)
        return places.masked_fill(values == NEG, -1)


class Opaque(Engine):
    """The top-k is opaque too."""

    def select(self, logits: Tensor) -> Tensor:
        return ENGINE.topk(logits, TOPK)[0]


class Consumer(Engine):
    """A consumer whose candidate mask and top-k are opaque."""

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        q, k, k_scale, weights, ks, ke, ids = inputs
        logits = self.op(q.to(FP8), [k.to(FP8), k_scale], weights, ks, ke)
        hidden = ENGINE.candidate_mask(ids, ke, k.shape[0], BLOCK)
        return ENGINE.topk(logits.masked_fill(hidden, NEG), TOPK)[0]


def inputs(rows: int = 9, positions: int = 41, seed: int = 1) -> tuple[Tensor, ...]:
    """q, k, k_scale, weights, ks, ke of M rows over T positions."""
    made = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 3, (rows,), generator=made)
    return (
        torch.randn(rows, HEADS, DIM, generator=made),
        torch.randn(positions, DIM, generator=made),
        torch.rand(positions, generator=made) + 0.5,
        torch.randn(rows, HEADS, generator=made),
        start,
        start + torch.randint(0, positions - 3, (rows,), generator=made),
    )


def exact(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
    """Scores [M, T] in float64 from the rounded queries and keys, -inf outside of the range."""
    wide = [t.to(FP8).double() for t in (q, k)]
    product = torch.einsum("mhd,td->mht", *wide).relu()
    scores = torch.einsum("mht,mh->mt", product, weights.double()) * k_scale
    position = torch.arange(k.shape[0])
    return scores.masked_fill((position < ks[:, None]) | (position >= ke[:, None]), NEG)


def same_sets(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.long().sort(-1).values, b.long().sort(-1).values)


def best_of(scores: Tensor) -> Tensor:
    values, places = scores.topk(TOPK, dim=-1)
    return places.masked_fill(values == NEG, -1)


def counts(model: Any) -> dict[str, int]:
    return dict(model.report.op_counts_after)


@pytest.mark.parametrize(("dynamic", "clean"), [(False, True), (False, False), (True, False)])
def test_opaque_logits_enter_and_are_proven(dynamic: bool, clean: bool) -> None:
    dense_adapter(masked=NEG if clean else "unwritten")
    model = Engine(clean=clean).eval()
    fast = dsa_compile.optimize(
        model, example_inputs=inputs(), config={"dynamic": dynamic, "require_match": 1}
    )
    (site,) = fast.report.sites
    assert (site.status, site.k) == ("fused", TOPK)
    assert dynamic or (site.heads, site.head_dim) == (HEADS, DIM)
    assert any("compared with its plain form" in note for note in site.notes)
    assert not any("mqa_logits" in name and "dsa_test" in name for name in counts(fast))
    for given in [inputs(), inputs(seed=2)] + ([inputs(5, 53, 3)] if dynamic else []):
        assert same_sets(fast(*given), model(*given))
        assert same_sets(fast(*given), best_of(exact(*given)))
    found = dsa_compile.verify(model, fast, *inputs())
    assert found.same_rows == found.rows == 9


def test_an_opaque_top_k_enters_too() -> None:
    dense_adapter()
    dsa_compile.register_adapter(
        "dsa_test_engine::topk",
        "topk",
        {"logits": "logits", "topk": "k"},
        outputs=("indices", "values"),
    )
    model = Opaque().eval()
    fast = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC)
    assert [s.status for s in fast.report.sites] == ["fused"]
    assert len([n for n in fast.report.sites[0].notes if "adapter" in n]) == 2
    assert not any("dsa_test" in name for name in counts(fast))
    assert same_sets(fast(*inputs()), model(*inputs()))
    found = dsa_compile.verify(model, fast, *inputs())
    assert found.same_rows == found.rows == 9
    # A width below k: the rest is -1.
    narrow = dsa_compile.optimize(model, example_inputs=inputs(positions=8), config=STATIC)
    assert same_sets(narrow(*inputs(positions=8)), model(*inputs(positions=8)))


def test_an_opaque_candidate_mask_makes_a_consumer() -> None:
    dense_adapter()
    dsa_compile.register_adapter(
        "dsa_test_engine::candidate_mask",
        "candidate_mask",
        {"block_ids": "ids", "row_end": "ke"},
        block_size="block",
        shows="hidden",
    )
    dsa_compile.register_adapter(
        "dsa_test_engine::topk",
        "topk",
        {"logits": "logits", "topk": "k"},
        outputs=("indices", "values"),
    )
    model = Consumer().eval()
    given = inputs()
    ids = torch.stack([torch.randperm(10)[:BLOCKS] for _ in range(9)]).masked_fill(
        torch.rand(9, BLOCKS) < 0.2, -1
    )
    fast = dsa_compile.optimize(model, example_inputs=(*given, ids), config=STATIC)
    (site,) = fast.report.sites
    assert (site.kind, site.status, site.block_size) == ("consumer", "rewritten", BLOCK)
    assert not any("dsa_test" in name for name in counts(fast))
    scores = exact(*given)
    inside = (ids[..., None] == torch.arange(41) // BLOCK).any(-2)
    got = fast(*given, ids)
    assert same_sets(got, model(*given, ids))
    assert same_sets(got, best_of(scores.masked_fill(~inside, NEG)))


class PagedEngine(nn.Module):
    """Opaque paged logits of S rows a request, with or without candidates, then a selection."""

    def __init__(self, candidates: bool) -> None:
        super().__init__()
        self.candidates = candidates

    def forward(
        self, q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor, ids: Tensor
    ) -> Tensor:
        width = table.shape[1] * cache.shape[1]
        plan = torch.zeros(4, dtype=torch.int32)
        logits = ENGINE.paged_mqa_logits(q, cache, weights, lens, table, plan, width)
        if self.candidates:
            block = torch.arange(width) // 8
            logits = logits.masked_fill(~(ids[..., None] == block).any(-2), NEG)
        values, places = logits.topk(TOPK, dim=-1)
        return places.masked_fill(values == NEG, -1)


@pytest.mark.parametrize("candidates", [True, False])
def test_opaque_paged_logits_never_gather_keys(candidates: bool) -> None:
    dsa_compile.register_adapter(
        "dsa_test_engine::paged_mqa_logits", "paged_logits", PAGED, ignored=("plan",)
    )
    pages, page, requests, rows = 12, 16, 3, 2
    cache = torch.zeros(pages, page, DIM + 4, dtype=torch.uint8)
    keys = torch.randn(pages * page, DIM)
    torch.ops.dsa.indexer_k_quant_and_cache(keys, cache, torch.arange(pages * page))
    table = torch.randint(0, pages, (requests, 4))
    lens = torch.tensor([60, 18, 3])
    table = torch.where(torch.arange(4) * page < lens[:, None], table, -1)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(requests * rows)])
    ids[:, 0] = 0
    q = torch.randn(requests, rows, HEADS, DIM)
    given = (q, cache.unsqueeze(2), torch.randn(requests * rows, HEADS), lens, table, ids)
    model = PagedEngine(candidates).eval()
    fast = dsa_compile.optimize(model, example_inputs=given, config=STATIC)
    (site,) = fast.report.sites
    assert site.kind == ("consumer" if candidates else "single")
    assert any("compared with its plain form" in note for note in site.notes)
    assert any("never gathered" in note for note in site.notes)
    scorer = "paged_sparse_mqa_logits" if candidates else "paged_mqa_logits"
    assert counts(fast)[f"dsa_cpu.{scorer}.default"] == 1
    assert not any("gather_indexer_k" in name or "dsa_test" in name for name in counts(fast))
    assert same_sets(fast(*given), model(*given))


@pytest.mark.parametrize("op", ["unsigned_logits", "cut_logits"])
def test_a_wrong_declaration_is_found_and_the_op_stays(op: str) -> None:
    dense_adapter(op)
    model = Engine(op).eval()
    with pytest.warns(dsa_compile.NoMatchWarning):
        fast = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC)
    site = fast.report.sites[0]
    assert site.status == "kept" and "not what its adapter declares" in site.reason
    assert "the op gives" in site.counterexample
    assert torch.equal(fast(*inputs()), model(*inputs()))


def test_masked_columns_that_hold_something_else_are_found() -> None:
    dense_adapter()
    model = Engine(clean=False).eval()
    with pytest.warns(dsa_compile.NoMatchWarning):
        fast = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC)
    assert "hidden columns" in fast.report.sites[0].reason
    assert torch.equal(fast(*inputs()), model(*inputs()))


def test_a_wrong_top_k_is_found() -> None:
    dsa_compile.register_adapter(
        "dsa_test_engine::worst",
        "topk",
        {"logits": "logits", "topk": "k"},
        outputs=("indices", "values"),
    )

    class Worst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ENGINE.worst(x, 3)[0]

    x = torch.randn(4, 20)
    with pytest.warns(dsa_compile.NoMatchWarning):
        report = dsa_compile.optimize(Worst().eval(), example_inputs=(x,), config=STATIC).report
    (site,) = report.sites
    assert site.status == "kept" and "not the best ones" in site.reason


class Untouched(Engine):
    """The logits leave the model, so nothing may take the op away."""

    def select(self, logits: Tensor) -> Any:
        return super().select(logits), logits


def test_an_op_whose_site_is_kept_comes_back() -> None:
    dense_adapter()
    model = Untouched().eval()
    with pytest.warns(dsa_compile.NoMatchWarning):
        fast = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC)
    assert counts(fast)["dsa_test_engine.mqa_logits.default"] == 1
    assert not any("einsum" in name for name in counts(fast))
    for a, b in zip(fast(*inputs()), model(*inputs()), strict=True):
        assert torch.equal(a, b)


def test_an_op_without_a_cpu_kernel_enters_by_contract() -> None:
    dense_adapter("gpu_logits")
    model = Engine("gpu_logits").eval()
    fast = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC)
    (site,) = fast.report.sites
    assert site.status == "fused"
    assert any("by declared contract" in n and "no kernel for the CPU" in n for n in site.notes)
    assert same_sets(fast(*inputs()), best_of(exact(*inputs())))


def test_an_op_that_fails_on_the_cpu_needs_a_word() -> None:
    dense_adapter("raising_logits")
    model = Engine("raising_logits").eval()
    with pytest.warns(dsa_compile.NoMatchWarning):
        report = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC).report
    assert "contract=True" in report.sites[0].reason
    assert "wants a GPU" in report.sites[0].reason
    dsa_compile.remove_adapter("dsa_test_engine::raising_logits")
    dense_adapter("raising_logits", contract=True)
    (site,) = dsa_compile.optimize(model, example_inputs=inputs(), config=STATIC).report.sites
    assert site.status == "fused"
    assert any("by declared contract" in n and "wants a GPU" in n for n in site.notes)


def test_the_registry_is_read_at_each_compilation() -> None:
    dense_adapter()
    model = Engine().eval()
    assert dsa_compile.explain(model, *inputs()).sites[0].status == "fused"
    dsa_compile.remove_adapter("dsa_test_engine::mqa_logits")
    assert dsa_compile.explain(model, *inputs()).sites[0].status == "kept"
