"""The four calls of a consumer, and masks that are read at candidate columns alone."""

import torch
from pass_models import NEG, TwoLevel, calls, captured, hidden, same_sets
from torch import Tensor

from dsa_compile.passes.expand_candidates import sparse_block
from dsa_compile.passes.graph_tools import is_tensor, value
from dsa_compile.passes.pipeline import run_pipeline


def test_the_four_calls_stand_in_the_graph_by_name() -> None:
    result = run_pipeline(captured(TwoLevel(), hidden()))
    for name in ("candidate_expand", "sparse_mqa_logits", "topk", "topk_remap"):
        assert len(calls(result.graph_module, name)) == 1, name
    assert result.op_counts_before["aten.topk.default"] == 3
    assert "aten.topk.default" not in result.op_counts_after


def test_no_mask_over_the_context_is_left() -> None:
    x = hidden(29)
    result = run_pipeline(captured(TwoLevel(), x))
    wide = [
        n
        for n in result.graph_module.graph.nodes
        if is_tensor(n) and tuple(value(n).shape[-2:]) == (29, 29)
    ]
    assert not wide


def test_a_mask_and_its_transpose_are_gathered_apart() -> None:
    class Plain(TwoLevel):
        def forward(self, x: Tensor, linked: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return self.masked(x, linked | linked.mT)

        def masked(self, x: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
            ids = self.picks(self.scores(x, 0)).clamp(min=0) % 8
            table = torch.zeros(*ids.shape[:2], 8, dtype=torch.bool).scatter(-1, ids, True)
            keep = table.repeat_interleave(4, -1)[..., : x.shape[1]]
            scores = self.scores(x, 1).masked_fill(~shown, NEG).masked_fill(~keep, NEG)
            return (self.picks(scores),)

    x = hidden(29)
    linked = torch.rand(29, 29, generator=torch.Generator().manual_seed(2)) < 0.4
    model = Plain()
    result = run_pipeline(captured(model, x, linked))
    with torch.no_grad():
        assert same_sets(model(x, linked), result.graph_module(x, linked))


def test_sparse_blocks_divide_candidate_blocks() -> None:
    assert [sparse_block(n) for n in (8, 16, 32, 24, 4, 12, 64)] == [8, 16, 16, 8, 4, 12, 16]
