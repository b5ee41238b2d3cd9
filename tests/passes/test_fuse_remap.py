"""A top-k and its remap become one op where a provider has one, and stay two elsewhere."""

from __future__ import annotations

import torch
from pass_models import TwoLevel, calls, captured, hidden, same_sets

from dsa_compile.kernels import reference_sparse
from dsa_compile.passes import fuse_remap
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.pipeline import run_pipeline

LIBRARY = torch.library.Library("dsa_fused_in_a_test", "DEF")
LIBRARY.define(
    "topk_positions(Tensor logits, Tensor end, Tensor blocks, Tensor? row_start=None, *, "
    "SymInt topk, SymInt num_positions, int sparse_block, bool anchored=False, float? fill=None, "
    "bool sorted=True) -> (Tensor values, Tensor indices)"
)


def topk_positions(logits, end, blocks, row_start=None, *, topk, sorted=True, **mapping):  # type: ignore[no-untyped-def]
    values, columns = reference_sparse.topk(logits, end, topk=topk, sorted=sorted)
    return reference_sparse.topk_remap(values, columns, blocks, row_start, **mapping)


for name in ("topk", "topk_remap"):
    LIBRARY.define(name + str(getattr(torch.ops.dsa, name).default._schema).split(name, 1)[1])
    LIBRARY.impl(name, getattr(reference_sparse, name), "CompositeExplicitAutograd")
LIBRARY.impl("topk_positions", topk_positions, "CompositeExplicitAutograd")


def test_the_two_become_one() -> None:
    x = hidden()
    done = run_pipeline(captured(TwoLevel(), x), provider="reference").graph_module
    with torch.no_grad():
        want = done(x)
    for name in ("topk", "topk_remap"):
        for node in calls(done, name):
            node.target = getattr(torch.ops.dsa_fused_in_a_test, name).default
    result = fuse_remap.run(done, PassContext())
    done.recompile()
    assert result.changed
    assert [len(calls(done, n)) for n in ("topk", "topk_remap", "topk_positions")] == [0, 0, 1]
    with torch.no_grad():
        assert same_sets(done(x), want)


def test_a_provider_without_it_keeps_both() -> None:
    done = run_pipeline(captured(TwoLevel(), hidden()), provider="cpu").graph_module
    assert not fuse_remap.run(done, PassContext()).changed
    assert [len(calls(done, n)) for n in ("topk", "topk_remap")] == [1, 1]
