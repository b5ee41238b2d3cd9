"""One expansion for equal ids, and no merging beyond what feeds it."""

import torch
from pass_models import TwoLevel, calls, captured, hidden
from torch import Tensor, nn

from dsa_compile.passes import share_candidates
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.pipeline import run_pipeline


def test_consumers_of_the_same_ids_share_one_expansion() -> None:
    result = run_pipeline(captured(TwoLevel(consumers=3), hidden(), dynamic=True))
    assert [s.status for s in result.sites] == ["fused", "rewritten", "rewritten", "rewritten"]
    assert len(calls(result.graph_module, "candidate_expand")) == 1
    assert len(calls(result.graph_module, "sparse_mqa_logits")) == 3


def test_numbers_that_compare_equal_are_not_merged() -> None:
    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x * 2, x * 2.0, torch.rand(3), torch.rand(3)

    graph_module = captured(Numbers(), torch.arange(4))
    before = len(graph_module.graph.nodes)
    result = share_candidates.run(graph_module, PassContext())
    assert not result.changed and len(result.graph_module.graph.nodes) == before
