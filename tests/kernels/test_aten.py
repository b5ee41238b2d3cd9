"""The ops written in ATen: equal to the reference bit for bit, ties included, looped or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_compile.kernels import aten, aten_sparse
from dsa_compile.kernels.aten import Aten
from dsa_compile.kernels.schemas import SCHEMAS

from . import samples
from .cases import exact_case


@pytest.fixture(params=["whole", "looped"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows all at once, or a few at a time."""
    if request.param == "looped":
        monkeypatch.setattr(aten, "_HEAD_ROWS", 4)
        monkeypatch.setattr(aten_sparse, "_MOST_ROWS", 2)


def same(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The reference's results, which the ATen form must equal."""
    expected = getattr(torch.ops.dsa, name)(*args, **kwargs)
    got = Aten().table()[name](*args, **kwargs)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        assert torch.equal(mine, theirs), name
    return expected


@pytest.mark.parametrize("n", [1, 2, 29])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_argument_of_every_op(rows: int, n: int) -> None:
    table = Aten().table()
    calls = [call for call in samples.calls(2, rows, n) if call.op in SCHEMAS]
    assert {call.op for call in calls} == SCHEMAS.keys() <= table.keys()
    for call in calls:
        got = table[call.op](*call.args, **call.kwargs)
        expected = getattr(torch.ops.dsa, call.op)(*call.args, **call.kwargs)
        torch.testing.assert_close(
            got, expected, msg=lambda text, call=call: f"{call.name}: {text}"
        )


def test_exact_scores_with_many_ties() -> None:
    for seed in range(150):
        case = exact_case(seed, candidates=True)
        ids, n = case.block_ids, case.k.shape[1]
        if not case.q.shape[1] or ids is None:
            continue
        scores, rows = (case.q, case.k, case.weights), dict(case.kwargs)
        candidates = {"block_ids": ids, "block_size": case.block_size, "anchored": case.anchored}
        blocks = -(-n // case.block_size)
        source = {"block_size": case.block_size, "num_blocks": min(2, blocks)}
        for topk in {1, min(3, n), n}:
            same("indexer_select", scores, {**rows, "topk": topk})
            same("indexer_select", scores, {**rows, **candidates, "topk": topk})
            same("indexer_publish", scores, {**rows, **source, "topk": topk})
        if not ids.shape[2]:
            continue
        size = next(s for s in (4, 2, 1) if case.block_size % s == 0)
        place = {"num_positions": n, "sparse_block": size, "anchored": case.anchored}
        low, high = rows.get("row_start"), rows.get("row_end")
        expanded = same(
            "candidate_expand", (ids, low, high), {**place, "block_size": case.block_size}
        )
        bare = {k: v for k, v in rows.items() if k not in ("mask", "bias")}
        sparse = {**bare, "sparse_block": size, "anchored": case.anchored}
        logits = same("sparse_mqa_logits", (*scores, *expanded), sparse)
        same("topk", (logits, expanded[1]), {"topk": 50})
        found = same("topk", (logits, expanded[1]), {"topk": min(3, n)})
        same("topk_remap", (*found, expanded[0], low), place)


def test_nothing_grows_with_rows_times_heads_times_positions() -> None:
    """What a graph holds at once stays within a chunk of rows, at any number of rows."""

    class Select(torch.nn.Module):
        def forward(self, q: Any, k: Any, weights: Any) -> Any:
            return torch.ops.dsa.indexer_select(q, k, weights, topk=4)

    args = (torch.randn(1, 600, 8, 4), torch.randn(1, 50, 4), torch.randn(1, 600, 8))
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Select(), args, dynamic_shapes=({1: auto}, {1: auto}, {1: auto}))
    sizes = [s for n in program.graph.find_nodes(op="placeholder") for s in n.meta["val"].shape]
    symbolic = [s for s in sizes if isinstance(s, torch.SymInt)]
    rule = {torch.ops.dsa.indexer_select.default: Aten(symbolic).indexer_select}
    plain = program.run_decompositions(rule)
    assert not any(str(n.target).startswith("dsa") for n in plain.graph.nodes)
    if not any("map_impl" in str(n.target) for n in plain.graph.nodes):
        pytest.skip("this torch hands no symbolic size to the body of a loop")
    held = [n.meta.get("val") for n in plain.graph.nodes]
    elements = [int(v.numel()) for v in held if isinstance(v, torch.Tensor)]
    assert max(elements) < 600 * 50
    for rows, positions in ((600, 50), (37, 91)):
        call = (
            torch.randn(1, rows, 8, 4),
            torch.randn(1, positions, 4),
            torch.randn(1, rows, 8),
        )
        for mine, theirs in zip(plain.module()(*call), Select()(*call), strict=True):
            torch.testing.assert_close(mine, theirs)
