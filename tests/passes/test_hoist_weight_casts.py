"""bf16 casts of head weights go into the fused query op, where no value changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_models import calls, captured
from query_models import DIM, QueryModel, fp8, hidden
from torch import Tensor, fx, nn

from dsa_compile.passes import hoist_weight_casts
from dsa_compile.passes.context import PassContext
from dsa_compile.passes.graph_tools import CASTS, op_name
from dsa_compile.passes.hoist_weight_casts import WEIGHTS
from dsa_compile.passes.pipeline import run_pipeline

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = (2, 5, 8, 32)


class Scored(nn.Module):
    """A fused query op, a spelling of what happens to its weights, and a scorer.

    Args:
        spell: from the op's weights to the scorer's.
        sparse: score candidate blocks alone.
        wide: also return the op's own weights.
        options: of the fused op.
    """

    def __init__(
        self,
        spell: Callable[[Tensor], Tensor],
        *,
        sparse: bool = False,
        wide: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.spell, self.sparse, self.wide, self.options = spell, sparse, wide, options

    def forward(self, q: Tensor, w: Tensor, k: Tensor, ids: Tensor) -> Any:
        out = torch.ops.dsa.fused_indexer_q(q, w, softmax_scale=0.3, **self.options)
        query = out[0].to(FP32)
        weights = self.spell(out[2])
        given = {"block_ids": ids, "block_size": 4} if self.sparse else {}
        picked = torch.ops.dsa.indexer_select(query, k, weights, topk=4, **given)
        return (*picked, out[2]) if self.wide else picked


def operands() -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    q, w = torch.randn(SHAPE, generator=made), torch.randn(SHAPE[:3], generator=made)
    k = torch.randn(2, 19, SHAPE[3], generator=made)
    return q, w, k, torch.tensor([[[0, 2]]]).expand(2, 5, 2).contiguous()


def hot_casts(graph_module: fx.GraphModule) -> list[str]:
    """Casts between the fused op's weights and a scorer."""
    found = []
    for node in graph_module.graph.nodes:
        if op_name(node) not in WEIGHTS:
            continue
        at = node.args[WEIGHTS[op_name(node)]]
        while op_name(at) != "fused_indexer_q":
            if op_name(at) in CASTS:
                found.append(at.name)
            at = at.args[0]
    return found


def hoisted(model: nn.Module) -> tuple[fx.GraphModule, fx.Node]:
    """The graph after the pass, and its fused op; results are bit for bit the model's."""
    given = operands()
    graph_module = captured(model, *given)
    hoist_weight_casts.run(graph_module, PassContext())
    graph_module.graph.lint()
    graph_module.recompile()
    with torch.no_grad():
        want, got = model(*given), graph_module(*given)
    assert len(want) == len(got)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(want, got, strict=True))
    (op,) = calls(graph_module, "fused_indexer_q")
    return graph_module, op


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda w: w.to(BF16),
    "below views": lambda w: w.unsqueeze(1).transpose(1, 2).to(BF16).squeeze(2),
    "above views": lambda w: w.to(BF16).reshape(10, 8).unflatten(0, (2, 5)),
    "below a slice": lambda w: torch.ops.aten.slice.Tensor(w, 1, 0, 5).to(BF16),
    "there and back": lambda w: w.to(BF16).to(FP32),
    "there and back and there": lambda w: w.to(BF16).to(FP32).view(2, 5, 8).to(BF16),
}


@pytest.mark.parametrize("name", MOVED)
def test_exact_casts_move(name: str) -> None:
    quant = "fp8" if "views" in name else "none"
    graph_module, op = hoisted(Scored(MOVED[name], quant=quant))
    assert not hot_casts(graph_module)
    assert op.kwargs["weights_out_dtype"] == BF16 and not op.kwargs.get("bf16_weights")
    assert op.meta["val"][2].dtype == BF16


def test_a_widening_of_bf16_weights_goes() -> None:
    model = Scored(lambda w: w.to(FP32), weights_out_dtype=BF16)
    graph_module, op = hoisted(model)
    assert not hot_casts(graph_module) and op.kwargs["weights_out_dtype"] == BF16


def test_another_user_of_fp32_weights_gets_them() -> None:
    graph_module, op = hoisted(Scored(lambda w: w.to(BF16), wide=True))
    assert not hot_casts(graph_module) and op.kwargs["bf16_weights"]
    assert op.kwargs.get("weights_out_dtype") is None


def test_two_scorers_get_what_each_asks_for() -> None:
    class Two(Scored):
        def forward(self, q: Tensor, w: Tensor, k: Tensor, ids: Tensor) -> Any:
            out = torch.ops.dsa.fused_indexer_q(q, w)
            low = torch.ops.dsa.indexer_select(out[0], k, out[2].to(BF16), topk=4)
            high = torch.ops.dsa.indexer_select(out[0], k, out[2], topk=4)
            return (*low, *high)

    graph_module, op = hoisted(Two(lambda w: w))
    assert not hot_casts(graph_module) and op.kwargs["bf16_weights"]
    first, second = calls(graph_module, "indexer_select")
    assert [n.args[2].meta["val"].dtype for n in (first, second)] == [BF16, FP32]  # type: ignore[union-attr]


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "no cast": lambda w: w,
    "rounded twice": lambda w: w.to(FP16).to(BF16),
    "another dtype": lambda w: w.to(FP16),
    "a product above the cast": lambda w: (w * 0.3).to(BF16),
    "a product below the cast": lambda w: w.to(BF16) * 0.3,
}


@pytest.mark.parametrize("name", KEPT)
def test_casts_that_round_otherwise_stay(name: str) -> None:
    model = Scored(KEPT[name])
    before = str(captured(model, *operands()).graph)
    graph_module, op = hoisted(model)
    assert str(graph_module.graph) == before
    assert op.kwargs.get("weights_out_dtype") is None and not op.kwargs.get("bf16_weights")


def test_moving_a_kept_cast_would_change_values() -> None:
    """The rules above are no formality: each case has numbers that tell it apart."""
    w = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert not torch.equal(w.to(FP16).to(BF16), w.to(BF16))
    assert not torch.equal((w * 0.3).to(BF16), w.to(BF16) * 0.3)
    assert not torch.equal((w * 0.3).to(BF16), (w.to(BF16).float() * 0.3).to(BF16))


def test_a_cast_of_what_the_op_reads_stays() -> None:
    class Before(Scored):
        def forward(self, q: Tensor, w: Tensor, k: Tensor, ids: Tensor) -> Any:
            return super().forward(q, w.to(BF16), k, ids)

    graph_module, op = hoisted(Before(lambda w: w.to(BF16)))
    assert op_name(op.args[1]) in CASTS and not hot_casts(graph_module)


class LowWeights(QueryModel):
    """Head weights that are rounded to bf16 once, after all their factors."""

    def formatted(self, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8(q)
        return codes.float(), (w * scale.squeeze(-1) * DIM**-0.5).to(BF16)


def test_the_cast_of_a_model_ends_up_in_the_op() -> None:
    model, x = LowWeights("rotate half", "butterflies"), hidden()
    result = run_pipeline(captured(model, x))
    (op,) = calls(result.graph_module, "fused_indexer_q")
    assert op.kwargs["weights_out_dtype"] == BF16 and not hot_casts(result.graph_module)
    with torch.no_grad():
        want, got = model(x), result.graph_module(x)
    assert torch.equal(want[1].sort(-1).values, got[1].sort(-1).values)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)


def test_sparse_scorers_of_a_pipeline_read_bf16() -> None:
    model, given = Scored(lambda w: w.to(BF16), sparse=True, quant="fp8"), operands()
    result = run_pipeline(captured(model, *given))
    (scorer,) = calls(result.graph_module, "sparse_mqa_logits")
    assert scorer.args[2].meta["val"].dtype == BF16 and not hot_casts(result.graph_module)  # type: ignore[union-attr]
    with torch.no_grad():
        want, got = model(*given), result.graph_module(*given)
    assert torch.equal(want[1].sort(-1).values, got[1].sort(-1).values)
