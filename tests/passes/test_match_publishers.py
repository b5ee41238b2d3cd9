"""Block maxima and best blocks come out of the source's own op, or the source is kept."""

import pytest
import torch
from pass_models import BLOCK, NEG, TwoLevel, calls, captured, hidden, same_sets
from torch import Tensor

from dsa_compile.passes.pipeline import run_pipeline


@pytest.mark.parametrize("batch", [1, 2])
def test_the_source_publishes_in_one_op(batch: int) -> None:
    model, x = TwoLevel(), hidden(batch=batch)
    result = run_pipeline(captured(model, x))
    with torch.no_grad():
        assert same_sets(model(x), result.graph_module(x))
    (call,) = calls(result.graph_module, "indexer_publish")
    assert call.kwargs["block_size"] == BLOCK and call.kwargs["pin_newest"] is True
    ranks = [n for n in result.graph_module.graph.nodes if str(n.target) == "aten.topk.default"]
    assert not ranks, "no dense selection is left"


class Maxima(TwoLevel):
    """The block maxima themselves leave the model, so that the op must give them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x, 0)
        blocks = torch.nn.functional.pad(scores, (0, -x.shape[1] % BLOCK), value=NEG)
        return self.picks(scores), blocks.unflatten(-1, (-1, BLOCK)).amax(-1)


def test_maxima_with_another_use_come_out_whole() -> None:
    model, x = Maxima(), hidden()
    result = run_pipeline(captured(model, x))
    assert len(calls(result.graph_module, "indexer_block_max")) == 1
    with torch.no_grad():
        expected, got = model(x), result.graph_module(x)
    assert same_sets(expected[:1], got[:1])
    torch.testing.assert_close(got[1], expected[1])


class Mean(TwoLevel):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x, 0)
        return self.picks(scores), scores.mean(-1)


class RowMax(TwoLevel):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(x, 0)
        return self.picks(scores), scores.amax(-1)


@pytest.mark.parametrize("model", [Mean(), RowMax()])
def test_other_uses_of_the_scores_keep_the_source(model: TwoLevel) -> None:
    x = hidden(30)
    result = run_pipeline(captured(model, x, dynamic=True))
    (site,) = result.sites
    assert site.status in ("kept", "fused")
    with torch.no_grad():
        for length in (30, 50):
            expected, got = model(hidden(length)), result.graph_module(hidden(length))
            assert same_sets(expected[:1], got[:1])
            torch.testing.assert_close(got[1], expected[1])
