"""Faults that others met, as small models: each must come out right after optimising."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from .bare import Attention, Single, StaticCache, draw, exact_selection, sets
from .hosts import HOSTS, Run, describe, run
from .masks import INF


def single(got: Run, status: str = "fused") -> None:
    assert [s.status for s in got.sites] == [status], describe(got.sites)


def call(module: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return module(*inputs)


@pytest.mark.parametrize("host", HOSTS)
def test_the_future_never_wins(host: str) -> None:
    """Scores grow with the position, so that a row without its own bound picks the last ones."""
    rows, heads, dim = 16, 2, 4
    q = torch.ones(1, rows, heads, dim)
    k = torch.arange(1.0, rows + 1).view(1, rows, 1).expand(1, rows, dim).contiguous()
    w = torch.ones(1, rows, heads)
    ends = torch.arange(1, rows + 1).unsqueeze(0)
    got = run(Single(4), (q, k, w, ends), host)
    single(got)
    picked = sets(got.outputs)[0]
    assert picked[3] == {0, 1, 2, 3} and picked[8] == {5, 6, 7, 8}
    assert all(max(row) == t for t, row in enumerate(picked))


@pytest.mark.parametrize("host", HOSTS)
def test_a_static_cache_is_longer_than_what_is_filled(host: str) -> None:
    """Three tokens go behind ten; unwritten slots score zero and are hidden by position alone."""
    q, new, w = draw(3, 1, 3, 3)
    cache = torch.zeros(1, 64, 8)
    cache[:, :10] = draw(4, 1, 1, 10)[1]
    got = run(StaticCache(16), (q, new, w, cache, torch.tensor([10, 11, 12])), host)
    single(got)
    picked, keys = got.outputs
    assert (picked >= 0).sum(-1).tolist() == [[11, 12, 13]]
    assert (picked == -1).sum(-1).tolist() == [[5, 4, 3]]
    assert picked.max() < 13
    assert torch.equal(keys[:, :10], cache[:, :10])


def test_later_chunks_see_the_earlier_ones() -> None:
    """A planted key wins in every chunk; the length before the chunk changes between calls."""
    q, k, w = draw(5, 1, 96, 96)
    q, w = q.abs(), w.abs()
    k[:, 5] = 50.0
    got = run(Single(4), (q[:, 32:64], k[:, :64], w[:, 32:64], torch.arange(33, 65)[None]),
              "compiled", dynamic=True)  # fmt: skip
    single(got)
    for start in (0, 32, 64):
        end = start + 32
        ends = torch.arange(start + 1, end + 1)[None]
        picked = call(got.module, q[:, start:end], k[:, :end], w[:, start:end], ends)
        for t, row in enumerate(sets(picked)[0], start):
            assert t < 5 or 5 in row
            assert row <= set(range(t + 1))
    single(got)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("length", "rows", "ends"), [(2, 4, [0, 0, 1, 2]), (1, 6, [0, 0, 0, 0, 0, 1])]
)
def test_rows_before_the_sequence_select_nothing(
    length: int, rows: int, ends: list[int], host: str
) -> None:
    """length - rows + row + 1 is negative for padded rows: they see nothing."""

    class Padded(Single):
        def forward(self, q: Tensor, k: Tensor, w: Tensor, length: Tensor) -> Tensor:
            row = torch.arange(1, q.shape[1] + 1)
            return super().forward(q, k, w, length.unsqueeze(-1) - q.shape[1] + row)

    q, k, w = draw(6, 1, rows, 8)
    got = run(Padded(4), (q, k, w, torch.tensor([length], dtype=torch.int32)), host)
    single(got)
    assert sets(got.outputs)[0] == [set(range(end)) for end in ends]
    assert got.outputs.min() >= -1


def test_nothing_changes_where_the_context_crosses_k() -> None:
    """Below k the selection is everything visible; above, what the rule says and no more."""
    topk = 32
    model = Attention(topk)
    inputs = {t: (*draw(t, 1, t, t), draw(100 + t, 1, 1, t)[1]) for t in (31, 32, 33, 64)}
    got = run(model, inputs[33], "compiled", dynamic=True)
    for t, (q, k, w, v) in inputs.items():
        out = call(got.module, q, k, w, v)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        picked = exact_selection(q, k, w, causal, topk)[0]
        mask = torch.tensor([[s in row for s in range(t)] for row in picked])
        torch.testing.assert_close(out, call(model, q, k, w, v))
        for allowed in (mask, causal) if t <= topk else (mask,):
            bias = torch.zeros(t, t).masked_fill(~allowed, -INF)
            dense = ((v @ v.mT) * 8**-0.5 + bias).softmax(-1) @ v
            torch.testing.assert_close(out, dense)
    assert {s.status for s in got.sites} == {"fused"}, describe(got.sites)
