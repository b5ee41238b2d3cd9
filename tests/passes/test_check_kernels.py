"""Calls that a provider's kernels do not take are told together; see deep_kernels/test_pipeline."""

from __future__ import annotations

import pytest
from pass_models import TwoLevel, calls, captured, hidden

from dsa_compile.passes import check_kernels
from dsa_compile.passes.context import PassContext, StageError, UnservedError
from dsa_compile.passes.pipeline import run_pipeline


@pytest.mark.parametrize("provider", ["cpu", "reference"])
def test_kernels_that_take_everything_are_not_asked(provider: str) -> None:
    graph = run_pipeline(captured(TwoLevel(), hidden()), provider=provider).graph_module
    nodes = len(graph.graph.nodes)
    assert not check_kernels.run(graph, PassContext(provider=provider)).changed
    assert len(graph.graph.nodes) == nodes and calls(graph, "sparse_mqa_logits")


def test_a_package_that_is_missing_is_told_for_every_site() -> None:
    """As where the target was not looked at."""
    with pytest.raises(StageError) as caught:
        run_pipeline(captured(TwoLevel(), hidden()), provider="deepgemm", precision="fp8")
    fault = caught.value.__cause__
    assert caught.value.stage == "check_kernels" and isinstance(fault, UnservedError)
    sites = {what.partition(": ")[0] for what, _ in fault.needs}
    assert len(sites) == 2
    missing = [what for what, _ in fault.needs if "deep_gemm" in what]
    assert {what.partition(": ")[0] for what in missing} == sites
