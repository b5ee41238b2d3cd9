"""Key writes become one op: every spelling, slots that name no place, every host."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from key_models import (
    ADDED,
    DIM,
    EPS,
    PAGE,
    PAGES,
    WRITES,
    KeyModel,
    Several,
    check,
    fp8_bytes,
    notes,
    option,
    rewritten,
    step,
    steps,
    writes,
)
from torch import Tensor, nn

import dsa_compile


def test_writes() -> None:
    models = Several(*(KeyModel(write) for write, _ in WRITES.values())).eval()
    result = rewritten(models, steps(len(WRITES)))
    assert len(writes(result)) == len(WRITES)
    assert not any("index_put" in name or "scatter" in name for name in result.op_counts_after)
    assert result.op_counts_after["dsa_cpu.indexer_k_quant_and_cache.default"] == len(WRITES)
    for text, (_, negative) in zip(notes(result), WRITES.values(), strict=True):
        assert text.startswith(f"{ADDED}LayerNorm with eps 1e-06, half rotation from dim 0, fp8")
        assert ("counted from the end" in text) == (negative == "wrap")
    given = steps(len(WRITES), seed=2)
    # The first and the last places of the cache and of a page.
    given[4][[0, 1, 3]] = torch.tensor([0, PAGES * PAGE - 1, PAGE - 1])
    check(models, result, given)


@pytest.mark.parametrize("name", [n for n, (_, rule) in WRITES.items() if rule != "fail"])
def test_slots_below_zero(name: str) -> None:
    write, negative = WRITES[name]
    model = KeyModel(write).eval()
    result = rewritten(model, step())
    assert len(writes(result)) == 1
    given = step(seed=2)
    given[4][:3] = torch.tensor([0, -1, PAGES * PAGE - 2])
    check(model, result, given)
    if negative == "skip":
        given[4][:] = torch.tensor([-1, -7, 0, -1, PAGES * PAGE - 1])
        check(model, result, given)
        given[4][:] = -1
        check(model, result, given)


STAGES: list[tuple[Any, Any, bool]] = [
    ("layer", "complex", True),
    ("rms", "rotate half", False),
    (None, "even into halves", True),
    ("layer", None, False),
    (None, None, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages(dtype: torch.dtype) -> None:
    models = Several(
        *(KeyModel(norm=n, rotation=r, hadamard=h, dtype=dtype) for n, r, h in STAGES)
    ).eval()
    given = steps(len(STAGES), dtype=dtype)
    result = rewritten(models, given)
    for op, (norm, rotation, hadamard) in zip(writes(result), STAGES, strict=True):
        assert option(op, "norm") == (norm or "none") and option(op, "hadamard") == hadamard
        assert (option(op, "cos") is None) == (rotation is None)
        assert op.kwargs["k"].meta["val"].dtype == dtype  # type: ignore[union-attr]
        assert (option(op, "norm_bias") is None) == (norm != "layer")
        assert option(op, "eps") == (EPS if norm else 1e-6)
    check(models, result, given)


def test_mxfp4() -> None:
    given = step("mxfp4")
    model = KeyModel(quant="mxfp4", hadamard=True).eval()
    result = rewritten(model, given)
    (op,) = writes(result)
    assert option(op, "quant") == "mxfp4" and "MXFP4" in notes(result)[0]
    check(model, result, given)


class Gemma(KeyModel):
    """A norm that is no stage of the op: what comes behind it is fused all the same."""

    def normed(self, k: Tensor) -> Tensor:
        return nn.functional.rms_norm(k, (DIM,), 1 + self.weight, EPS) * 2


class OtherEps(KeyModel):
    def normed(self, k: Tensor) -> Tensor:
        return nn.functional.layer_norm(k, (DIM,), self.weight, None, 3e-4)


class Summed(KeyModel):
    """Keys are the sum of two projections: they are fused from the sum on."""

    def put(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        k = self.turned(self.normed(self.wk(x) + self.wk(x.flip(0)).sigmoid()), positions)
        self.write(cache, *self.quantised(k), slots)


def test_other_options_and_stages_behind_one_that_is_none() -> None:
    models = Several(Gemma(), OtherEps(), Summed()).eval()
    result = rewritten(models, steps(3))
    gemma, other, summed = writes(result)
    assert option(gemma, "norm") == "none" and option(gemma, "cos") is not None
    assert option(other, "norm") == "layer" and option(other, "eps") == 3e-4
    assert option(other, "norm_bias") is None
    assert option(summed, "cos") is not None
    check(models, result, steps(3, seed=3))


class Fp32Scale(KeyModel):
    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_bytes(k, pow2=False, floor=1e-10)


@pytest.mark.parametrize("host", ["optimize", "optimize with inputs", "export"])
def test_the_cache_of_a_buffer_is_updated_in_every_host(host: str) -> None:
    model, own = (Fp32Scale(norm=None, held=True).eval() for _ in range(2))
    given, config = step(), {"provider": "cpu", "require_match": 1}
    cache, sizes = model.cache, (5, 8)
    if host == "optimize":
        run: Any = dsa_compile.optimize(model, config=config)
    elif host == "optimize with inputs":
        run = dsa_compile.optimize(model, example_inputs=given, config=config)
    else:
        program = dsa_compile.export(model, given, config=config)
        run = program.run_decompositions().module()
        cache, sizes = dict(run.named_buffers())["cache"], (5, 5)
    with torch.no_grad():
        for seed, keys in enumerate(sizes):
            inputs = step(keys=keys, seed=seed)
            want = own(*(t.clone() for t in inputs))
            assert torch.equal(run(*inputs).sort(-1).values, want.sort(-1).values)
            assert torch.equal(cache, own.cache)
    if host != "export":
        (site,) = run.report.sites
        assert any(n.startswith(ADDED) and "fp32 scales" in n for n in site.notes)
        assert run.report.op_counts_after["dsa_cpu.indexer_k_quant_and_cache.default"] == 1


def test_inductor_writes_into_the_cache_itself() -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, own = (KeyModel(norm=None, rotation=None, held=True).eval() for _ in range(2))
    given = step(seed=1)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(model, backend="dsa", options={"provider": "cpu"})
        picks, sources = run_and_get_code(compiled, *given)
    want = own(*given)
    assert torch.equal(picks.sort(-1).values, want.sort(-1).values)
    assert torch.equal(model.cache, own.cache)
    (site,) = dsa_compile.compiled_report(compiled).sites
    assert any(n.startswith(ADDED) for n in site.notes)
    code = "\n".join(sources)
    body = code[code.index("def call(") :].partition("benchmark_compiled")[0]
    assert body.count("dsa_cpu.indexer_k_quant_and_cache.default(") == 1
    # No tensor of the size of the cache is made, and nothing is copied back.
    made = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", body)
    sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in made]
    assert sizes and max(sizes) < PAGES * PAGE * (DIM + 4) and "copy_(" not in body


class ReadBefore(KeyModel):
    """The cache is read before it is written, by something else."""

    def forward(self, *inputs: Tensor) -> Any:
        return super().forward(*inputs) + (inputs[5].long().sum() > 10**9)


def test_layers_that_are_alike_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_compile.passes import match_k_cache

    proofs: list[object] = []
    check_one = match_k_cache.KeyProver.check

    def counted(self: Any, *args: Any) -> None:
        proofs.append(self)
        check_one(self, *args)

    monkeypatch.setattr(match_k_cache.KeyProver, "check", counted)
    models, given = Several(ReadBefore(), ReadBefore()).eval(), steps(2)
    result = rewritten(models, given)
    assert len(writes(result)) == 2 and len(proofs) == 1
    check(models, result, given)


class ByHand(KeyModel):
    def put(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        k = self.normed(self.wk(x))
        torch.ops.dsa.indexer_k_quant_and_cache(k, cache, slots, hadamard=True)


def test_a_write_by_hand_gets_the_kernel_of_the_provider() -> None:
    model, given = ByHand().eval(), step()
    given[4][1] = -1
    result = rewritten(model, given)
    assert len(writes(result)) == 1 and not any("key write" in n for n in result.sites[0].notes)
    assert result.op_counts_after["dsa_cpu.indexer_k_quant_and_cache.default"] == 1
    check(model, result, given)


class TwoWrites(KeyModel):
    """Other tokens' keys go into the same cache, which is scored after each write."""

    def forward(self, *inputs: Tensor) -> Any:
        x, q, w, positions, slots, cache, table, lens = inputs
        self.put(cache, x, positions, slots)
        first = self.scores(q, w, cache, table, lens, lens)
        self.put(cache, x.flip(0), positions, (slots + 1) % (PAGES * PAGE))
        return first, self.scores(q, w, cache, table, lens, lens)


def test_writes_one_after_the_other() -> None:
    model, given = TwoWrites().eval(), step()
    result = rewritten(model, given)
    assert len(writes(result)) == 2
    mine, theirs = (tuple(t.clone() for t in given) for _ in range(2))
    new, want = result.graph_module(*mine), model(*theirs)
    assert torch.equal(new[0], theirs[5])
    for got, wanted in zip(new[1:], want, strict=True):
        assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)
