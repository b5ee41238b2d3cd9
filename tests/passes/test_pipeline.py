"""The pipeline works on a copy: what it is given stays, and what it need not touch stays alike."""

from __future__ import annotations

import torch
from pass_models import TwoLevel, captured, hidden
from torch import Tensor, nn

from dsa_compile.passes.pipeline import run_pipeline


class Plain(nn.Module):
    """No indexer; arguments of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (x @ self.weight).split([1, 3], dim=-1)
        joined = torch.cat([second, first.to(torch.float64)], dim=-1)
        return joined.amax(dim=(0, -1), keepdim=True), x[1:, None]


def test_a_graph_without_indexers_is_copied_node_by_node() -> None:
    given = captured(Plain(), torch.randn(3, 4))
    made = run_pipeline(given).graph_module
    assert made.graph is not given.graph
    for old, new in zip(given.graph.nodes, made.graph.nodes, strict=True):
        assert new is not old and (new.op, new.name, new.target) == (old.op, old.name, old.target)
        assert (str(new.args), str(new.kwargs)) == (str(old.args), str(old.kwargs))
        assert new.meta == old.meta and new.meta is not old.meta and new.type == old.type
        assert {u.name for u in new.users} == {u.name for u in old.users}
    x = torch.randn(3, 4)
    for one, other in zip(made(x), given(x), strict=True):
        assert torch.equal(one, other)


def test_the_given_graph_is_left_unchanged() -> None:
    given = captured(TwoLevel(), hidden())
    before = str(given.graph), [dict(n.meta) for n in given.graph.nodes]
    result = run_pipeline(given)
    assert (str(given.graph), [dict(n.meta) for n in given.graph.nodes]) == before
    assert str(result.graph_module.graph) != before[0]
