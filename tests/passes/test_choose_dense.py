"""Sparse logits and their selection become one op that may score densely, where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_models import BLOCK, BLOCKS, DIM, HEADS, TwoLevel, calls, captured, hidden, same_sets

from dsa_compile.kernels import reference_sparse
from dsa_compile.passes import choose_dense, fuse_remap
from dsa_compile.passes.context import PassContext, Recorder
from dsa_compile.passes.pipeline import run_pipeline

SPACE = "dsa_choice_in_a_test"
LIBRARY = torch.library.Library(SPACE, "DEF")
SELECTED = "bool anchored=False, float? fill=None, bool sorted=True) -> (Tensor, Tensor)"
LIBRARY.define(
    "topk_positions(Tensor logits, Tensor end, Tensor blocks, Tensor? row_start=None, *, "
    f"SymInt topk, SymInt num_positions, int sparse_block, {SELECTED}"
)
LIBRARY.define(
    "select_columns(Tensor q, Tensor k, Tensor weights, Tensor blocks, Tensor end, *, "
    "SymInt topk, int sparse_block, int dense_below, float scale=1.0, Tensor? key_scale=None, "
    f"Tensor? row_start=None, Tensor? row_end=None, {SELECTED}"
)


def topk_positions(  # type: ignore[no-untyped-def]
    logits, end, blocks, row_start=None, *, topk, sorted=True, **mapping
):
    values, columns = reference_sparse.topk(logits, end, topk=topk, sorted=sorted)
    return reference_sparse.topk_remap(values, columns, blocks, row_start, **mapping)


def select_columns(  # type: ignore[no-untyped-def]
    q, k, weights, blocks, end, *, topk, sparse_block, dense_below, fill=None, sorted=True, **rest
):
    logits = reference_sparse.sparse_mqa_logits(
        q, k, weights, blocks, end, sparse_block=sparse_block, **rest
    )
    mapping: Any = {"num_positions": k.shape[1], "sparse_block": sparse_block, "fill": fill}
    return topk_positions(
        logits, end, blocks, rest.get("row_start"), topk=topk, sorted=sorted, **mapping
    )


for name in ("topk", "topk_remap", "sparse_mqa_logits"):
    LIBRARY.define(name + str(getattr(torch.ops.dsa, name).default._schema).split(name, 1)[1])
    LIBRARY.impl(name, getattr(reference_sparse, name), "CompositeExplicitAutograd")
LIBRARY.impl("topk_positions", topk_positions, "CompositeExplicitAutograd")
LIBRARY.impl("select_columns", select_columns, "CompositeExplicitAutograd")


def lowered() -> tuple[torch.fx.GraphModule, Recorder]:
    """A source and a consumer on the ops of the library, top-k and remap fused."""
    result = run_pipeline(captured(TwoLevel(), hidden()), provider="reference")
    done = result.graph_module
    for name in ("topk", "topk_remap", "sparse_mqa_logits"):
        for node in calls(done, name):
            node.target = getattr(getattr(torch.ops, SPACE), name).default
    fuse_remap.run(done, PassContext())
    done.recompile()
    return done, Recorder(list(result.sites), list(result.pairs))


def test_the_crossover_is_asked_for_and_written_down() -> None:
    asked: list[tuple[int, int, int, int]] = []

    def crossover(*sizes: int) -> int:
        asked.append(sizes)
        return 99

    (done, recorder), x = lowered(), hidden()
    with torch.no_grad():
        want = done(x)
        assert choose_dense.run(done, PassContext(recorder=recorder, crossover=crossover)).changed
        done.recompile()
        assert same_sets(done(x), want)
    assert asked == [(BLOCKS * BLOCK, HEADS, DIM, 4)]
    (node,) = calls(done, "select_columns")
    assert node.kwargs["dense_below"] == 99
    notes = [any("fewer than 99 positions" in n for n in s.notes) for s in recorder.sites]
    assert notes == [s.status == "rewritten" for s in recorder.sites]
    assert [len(calls(done, n)) for n in ("sparse_mqa_logits", "topk_positions")] == [0, 0]


@pytest.mark.parametrize("spoil", ["no crossover", "another user", "a mask"])
def test_it_stays_two_calls(spoil: str) -> None:
    done, _ = lowered()
    (logits,) = calls(done, "sparse_mqa_logits")
    if spoil == "another user":
        (end,) = done.graph.find_nodes(op="output")
        end.args = ((*end.args[0], logits),)  # type: ignore[misc]
    if spoil == "a mask":
        logits.kwargs = {**logits.kwargs, "mask": logits.args[0]}
    context = PassContext(crossover=None if spoil == "no crossover" else lambda *sizes: 99)
    assert not choose_dense.run(done, context).changed
    assert len(calls(done, "topk_positions")) == 1
