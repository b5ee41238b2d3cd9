"""A query side that decides something by its rows stays as it is, however few rows a proof has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_models import calls
from query_models import HEADS, QueryModel, hidden
from torch import Tensor

from dsa_compile.capture import export_graph
from dsa_compile.passes.pipeline import run_pipeline

Rule = Callable[[Tensor, Tensor], Tensor]


class ByRow(QueryModel):
    """A rule on the queries of rows far out, behind the rotation."""

    def __init__(self, rule: Rule) -> None:
        super().__init__("rotate half", None)
        self.rule = rule

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        turned = super().turn(x, angle)
        rows = torch.arange(x.shape[1])[None, :, None, None]
        return self.rule(turned, rows) if x.shape[2] == HEADS else turned


@pytest.mark.parametrize(
    "rule",
    [
        lambda q, row: torch.where(row > 200, -q, q),
        lambda q, row: q * (1 - 2 * (row > 200).to(q.dtype)),
        lambda q, row: q.masked_fill(row.float() > 200.5, 0.0),
    ],
)
def test_rules_by_row_stay(rule: Rule) -> None:
    model = ByRow(rule).eval()
    result = run_pipeline(export_graph(model, (hidden(),), dynamic=True))
    assert not calls(result.graph_module, "fused_indexer_q")
    (site,) = result.sites
    assert any("chosen by positions or rows" in note for note in site.notes)
    x = hidden(300, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], result.graph_module(x)[0])
