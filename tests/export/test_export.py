"""Exported programs are ordinary ones: saved, loaded, exported again, unflattened, decomposed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsa_compile
from dsa_compile.passes.pipeline import op_counts

from .conftest import EXAMPLES, OTHERS
from .models import NoIndexer, TwoLevel, WritesBuffer, WritesInput, assert_same, inputs

STRICT = {"require_match": 2}
FIXED = {**STRICT, "dynamic": False}


def ours(program: Any) -> dict[str, int]:
    counts = op_counts(program.graph_module)
    return {name: count for name, count in counts.items() if name.startswith("dsa")}


def test_export_is_the_function_and_the_program_is_rewritten(program: Any) -> None:
    assert isinstance(program, torch.export.ExportedProgram)
    counts = op_counts(program.graph_module)
    assert "aten.relu.default" not in counts
    assert ours(program)["dsa_cpu.sparse_mqa_logits.default"] == 1
    report = dsa_compile.report_of(program)
    assert [site.status for site in report.sites] == ["fused", "rewritten"]


def test_one_program_serves_all_lengths(model: TwoLevel, program: Any) -> None:
    run = program.module()
    # As many rows as a head has dims, too: a proof must not tell the two apart.
    for args in (EXAMPLES, OTHERS, inputs(rows=8, positions=43)):
        assert_same(run(*args), model(*args))


def test_nothing_is_copied(model: TwoLevel, program: Any) -> None:
    held = program.state_dict
    assert held.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert held[name].data_ptr() == tensor.data_ptr()
    assert not program.constants


def test_a_saved_program_holds_each_parameter_once() -> None:
    class Wide(TwoLevel):
        def __init__(self) -> None:
            super().__init__()
            self.consumer.wq = self.source.wq
            self.big = nn.Parameter(torch.zeros(500_000))

        def forward(self, x: Any, keys: Any) -> Any:
            return (*super().forward(x, keys), self.big[:1])

    model = Wide().eval()
    buffer = io.BytesIO()
    torch.export.save(dsa_compile.export(model, EXAMPLES, config=FIXED), buffer)
    held = sum(p.numel() * 4 for p in model.parameters())
    assert held < buffer.getbuffer().nbytes < held + 500_000


def test_saved_and_loaded(model: TwoLevel, program: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(program, file)
    back = torch.export.load(file)
    assert ours(back) == ours(program)
    assert_same(back.module()(*OTHERS), model(*OTHERS))
    assert dsa_compile.report_of(back) == dsa_compile.report_of(program)


def test_exported_again(model: TwoLevel, program: Any) -> None:
    auto = torch.export.Dim.AUTO
    again = torch.export.export(
        program.module(), EXAMPLES, dynamic_shapes=({1: auto}, {1: auto}), strict=False
    )
    assert ours(again) == ours(program)
    assert_same(again.module()(*OTHERS), model(*OTHERS))


def test_decomposed(model: TwoLevel, program: Any) -> None:
    plain = program.run_decompositions()
    assert ours(plain) == ours(program)
    assert_same(plain.module()(*OTHERS), model(*OTHERS))
    assert dsa_compile.report_of(plain) == dsa_compile.report_of(program)


def test_unflattened_to_the_modules_it_was_made_of(model: TwoLevel, program: Any) -> None:
    unflat = torch.export.unflatten(program)
    assert_same(unflat(*OTHERS), model(*OTHERS))
    names = {name for name, _ in model.named_modules()}
    assert names <= {name for name, _ in unflat.named_modules()}
    assert unflat.state_dict().keys() == model.state_dict().keys()


def test_buffers_are_written_as_the_model_writes_them() -> None:
    model, other = WritesBuffer().eval(), WritesBuffer().eval()
    other.load_state_dict(model.state_dict())
    x, _ = inputs()
    before = model.keys.clone()
    program = dsa_compile.export(model, (x,), config=FIXED)
    assert torch.equal(model.keys, before) and model.calls == 0
    assert set(program.graph_signature.buffers_to_mutate.values()) == {"keys", "calls"}
    run = program.run_decompositions().module()
    for seed in (1, 2):
        x, _ = inputs(seed=seed)
        assert_same(run(x), other(x))
    assert run.calls == other.calls == 2
    assert torch.equal(run.keys, other.keys)


def test_inputs_are_written_and_nested_arguments_kept() -> None:
    model = WritesInput().eval()
    x, cache = inputs()
    args, kwargs = (x,), {"state": {"keys": cache}, "gain": 0.5}
    program = dsa_compile.export(model, args, kwargs, config=FIXED)
    for run in (program.module(), torch.export.unflatten(program)):
        mine, theirs = cache.clone(), cache.clone()
        got = run(x, state={"keys": mine}, gain=0.5)
        expected = model(x, state={"keys": theirs}, gain=0.5)
        assert_same(got["picks"], expected["picks"])
        torch.testing.assert_close(got["newest"], expected["newest"])
        assert torch.equal(mine, theirs) and not torch.equal(mine, cache)


def test_a_program_and_a_file_are_taken_too(model: TwoLevel, tmp_path: Path) -> None:
    plain = torch.export.export(model, EXAMPLES)
    before = op_counts(plain.graph_module)
    file = tmp_path / "plain.pt2"
    torch.export.save(plain, file)
    for source in (plain, file):
        program = dsa_compile.export(source, config=STRICT)
        assert ours(program)["dsa_cpu.sparse_mqa_logits.default"] == 1
        assert_same(program.module()(*EXAMPLES), model(*EXAMPLES))
    assert op_counts(plain.graph_module) == before


def test_named_sizes_are_kept(model: TwoLevel) -> None:
    shapes = {
        "x": {1: torch.export.Dim("rows", min=2, max=16)},
        "keys": {1: torch.export.Dim.AUTO},
    }
    program = dsa_compile.export(model, EXAMPLES, dynamic_shapes=shapes, config=STRICT)
    assert_same(program.module()(*OTHERS), model(*OTHERS))
    bounds = {(int(r.lower), int(r.upper)) for r in program.range_constraints.values()
              if r.upper.is_Integer}  # fmt: skip
    assert (2, 16) in bounds


def test_sizes_stay_fixed_where_that_is_asked_for(model: TwoLevel) -> None:
    program = dsa_compile.export(model, EXAMPLES, config=FIXED)
    assert not program.range_constraints
    assert_same(program.module()(*EXAMPLES), model(*EXAMPLES))


def test_provenance_says_what_was_done(program: Any) -> None:
    made = program.graph_module.meta["custom"]["dsa_compile"]
    assert json.loads(json.dumps(made)) == made
    assert made["torch"] == torch.__version__.partition("+")[0]
    assert made["config"]["require_match"] == 2
    assert len(made["report"]["sites"]) == 2


def test_a_program_of_others_has_no_report(model: TwoLevel) -> None:
    plain = torch.export.export(model, EXAMPLES)
    with pytest.raises(dsa_compile.PackageError, match="did not export this program"):
        dsa_compile.report_of(plain)


def test_too_few_matches_are_an_error_and_none_a_warning() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(dsa_compile.NoMatchError, match="require_match=1"):
        dsa_compile.export(NoIndexer().eval(), (x,), config={"require_match": 1})
    with pytest.warns(dsa_compile.NoMatchWarning, match="nearest miss"):
        program = dsa_compile.export(NoIndexer().eval(), (x,))
    assert torch.equal(program.module()(x), NoIndexer()(x))


def test_selections_in_branches_are_told() -> None:
    def best(x: Any) -> Any:
        return x.topk(2).indices

    def worst(x: Any) -> Any:
        return (-x).topk(2).indices

    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, best, worst, (x,))

    x = torch.randn(3, 8)
    with pytest.warns(dsa_compile.NoMatchWarning):
        program = dsa_compile.export(Branches().eval(), (x,), config={"dynamic": False})
    notes = dsa_compile.report_of(program).notes
    assert [note[:34] for note in notes] == ["not looked at: 1 top-k or sort ins"] * 2
    for given in (x.abs(), -x.abs()):
        assert torch.equal(program.module()(given), Branches()(given))


def test_arguments_that_contradict_each_other(model: TwoLevel, program: Any) -> None:
    plain = torch.export.export(model, EXAMPLES)
    with pytest.raises(dsa_compile.ConfigError, match="args, kwargs and dynamic_shapes"):
        dsa_compile.export(plain, EXAMPLES)
    with pytest.raises(dsa_compile.ConfigError, match="args: the arguments of a typical call"):
        dsa_compile.export(model)
    for args in (EXAMPLES[0], {"x": EXAMPLES[0]}):
        with pytest.raises(dsa_compile.ConfigError, match="args must be a tuple"):
            dsa_compile.export(model, args)  # type: ignore[arg-type]
    with pytest.raises(dsa_compile.ConfigError, match="rewritten already"):
        dsa_compile.export(program)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        dsa_compile.export(3, EXAMPLES)
    with pytest.raises(dsa_compile.TrainingModeError):
        dsa_compile.export(TwoLevel(), EXAMPLES)


def test_what_torch_cannot_export_is_told_with_its_reason() -> None:
    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(dsa_compile.CaptureError) as fault:
        dsa_compile.export(Branches().eval(), (torch.randn(3),))
    assert "torch.export could not capture the model" in str(fault.value)
    assert "dsa_compile.optimize" in str(fault.value)
    assert fault.value.__cause__ is not None


def test_sizes_that_a_model_cannot_keep_are_told(model: TwoLevel) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {"x": {1: rows}, "keys": {1: rows}}
    with pytest.raises(dsa_compile.CaptureError, match="leave dynamic_shapes away"):
        dsa_compile.export(model, EXAMPLES, dynamic_shapes=shapes)
