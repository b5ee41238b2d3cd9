"""Growing contexts: one compilation each for prefill and decoding, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_compile

from .models import DIM, HEAD_DIM, CacheBuffer, TwoLevel, assert_same, inputs, ops

Graphs = list[fx.GraphModule]


class Growing(TwoLevel):
    """Prefill and decoding behind a cache that grows: keys and values [B, T, ...] come in."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        start = keys.shape[1]
        keys = torch.cat([keys, self.wk(x)], dim=1)
        values = torch.cat([values, x], dim=1)
        return *self.layers(x, keys, values, start), keys, values


def counted(model: nn.Module) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("dsa")
    return torch.compile(model.eval(), backend=counter), counter


@torch.no_grad()
def test_prefill_and_fifty_steps_compile_once_each(without_codegen: Graphs) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = Growing().eval()
    run, counter = counted(model)
    past, sequence, counts = [torch.randn(2, 17, w) for w in (HEAD_DIM, DIM)], inputs(rows=112), []
    done = 0
    for rows in (29, 13, 20, *[1] * 50):
        x = sequence[:, done : done + rows].clone()
        for tensor in [*past, x][: 3 if rows > 1 else 2]:
            torch._dynamo.mark_dynamic(tensor, 1)
        got, expected = run(x, *past), model(x, *past)
        assert_same(got[:3], expected[:3])
        past, done = [t.detach().clone() for t in expected[3:]], done + rows
        counts.append(counter.frame_count)
    assert counts == [1] * 3 + [2] * 50
    assert not counters["recompile_limit"] and not counters["graph_break"]
    report = dsa_compile.compiled_report(model)
    assert report.graphs == 2 and len(report.matched) == 4
    assert all("sparse_mqa_logits" in ops(g) for g in without_codegen)


@torch.no_grad()
def test_decoding_into_a_buffer_updates_it_in_place(without_codegen: Graphs) -> None:
    model, twin = CacheBuffer().eval(), CacheBuffer().eval()
    run, counter = counted(model)
    x, before = inputs(rows=20), model.keys
    for rows in ((0, 9), *((i, i + 1) for i in range(9, 20))):
        part = x[:, rows[0] : rows[1]]
        assert_same(run(part, rows[0]), twin(part, rows[0]))
    assert model.keys is before and torch.equal(model.keys, twin.keys)
    assert int(model.calls) == 12 and counter.frame_count <= 3
    report = dsa_compile.compiled_report(model)
    assert len(report.matched) == 2 * report.graphs


@torch.no_grad()
def test_the_choice_between_the_two_forms_is_made_on_the_host(
    without_codegen: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsa_compile import pass_runner
    from dsa_compile.kernels import providers

    # Only the GPU provider has both forms in one op; the reference stands in for its name.
    monkeypatch.setattr(pass_runner, "crossover_on", lambda target, provider: lambda *_: 64)
    monkeypatch.setitem(providers.NAMESPACES, "reference", "dsa_backend_test")
    library = _both_forms("dsa_backend_test")
    model = Growing().eval()
    run = torch.compile(model, backend="dsa", options={"provider": "reference"}, dynamic=True)
    for length in (20, 40, 80, 160):
        given = inputs(rows=3), torch.randn(2, length, HEAD_DIM), torch.randn(2, length, DIM)
        assert_same(run(*given)[:3], model(*given)[:3])
    (graph,) = without_codegen
    (both,) = [n for n in graph.graph.nodes if "select_columns" in str(n.target)]
    assert both.kwargs["dense_below"] == 64
    # One graph for both forms: no guard, no branch and no number of the device decides.
    tags = {t for n in graph.graph.nodes for t in getattr(n.target, "tags", ())}
    assert torch.Tag.data_dependent_output not in tags
    assert any("fewer than 64 positions" in n for n in _notes(model))
    del library


def _notes(model: nn.Module) -> list[str]:
    return [note for site in dsa_compile.compiled_report(model).sites for note in site.notes]


def _both_forms(namespace: str) -> torch.library.Library:
    """The reference ops under another name, with the joined op of the GPU provider."""
    from dsa_compile.kernels import reference, reference_sparse
    from dsa_compile.kernels.register import register
    from dsa_compile.kernels.triton import SELECT_COLUMNS, TOPK_POSITIONS

    kernels = {
        **{n: getattr(reference, n) for n in dir(reference) if n.startswith("indexer_")},
        **{
            n: getattr(reference_sparse, n)
            for n in ("candidate_expand", "candidate_columns", "sparse_mqa_logits")
        },
        "topk": reference_sparse.topk,
        "topk_remap": reference_sparse.topk_remap,
    }
    library = register(namespace, kernels, "CompositeExplicitAutograd")
    space = getattr(torch.ops, namespace)

    def positions(logits, end, blocks, row_start=None, *, topk, num_positions, sparse_block, **kw):  # type: ignore[no-untyped-def]
        order = kw.pop("sorted", True)
        values, columns = space.topk(logits, end, topk=topk, sorted=order)
        return space.topk_remap(
            values,
            columns,
            blocks,
            row_start,
            num_positions=num_positions,
            sparse_block=sparse_block,
            **kw,
        )

    def columns(q, k, weights, blocks, end, **kw):  # type: ignore[no-untyped-def]
        below = kw.pop("dense_below")
        assert isinstance(k.shape[1] < below, (bool, torch.SymBool))
        scoring = ("scale", "key_scale", "row_start", "row_end", "sparse_block")
        logits = space.sparse_mqa_logits(
            q, k, weights, blocks, end, **{n: kw[n] for n in scoring if n in kw}
        )
        chosen = {n: kw[n] for n in ("topk", "sparse_block", "sorted", "fill") if n in kw}
        return positions(
            logits, end, blocks, kw.get("row_start"), num_positions=k.shape[1], **chosen
        )

    for name, schema, run in (
        ("topk_positions", TOPK_POSITIONS, positions),
        ("select_columns", SELECT_COLUMNS, columns),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", run, lib=library)
    return library
