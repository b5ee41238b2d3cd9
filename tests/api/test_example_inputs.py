"""With example inputs: captured at once, dynamic where the model allows, errors elsewhere."""

from __future__ import annotations

import pytest
import torch

import dsa_compile
from dsa_compile import (
    CaptureError,
    ConfigError,
    InputError,
    NoMatchError,
    NoMatchWarning,
    OptimizedModule,
    TrainingModeError,
)

from .models import (
    DIM,
    HEAD_DIM,
    ByKeyword,
    CacheArgument,
    NoIndexer,
    TwoLevel,
    WithBreak,
    assert_same,
    inputs,
)

STATIC = {"dynamic": False}


@pytest.fixture(scope="module")
def dynamic() -> tuple[TwoLevel, OptimizedModule]:
    model = TwoLevel().eval()
    return model, dsa_compile.optimize(model, example_inputs=(inputs(),))


def test_other_sizes_run(dynamic) -> None:
    model, optimized = dynamic
    for batch, rows in ((2, 29), (3, 40), (5, 12)):
        assert_same(optimized(inputs(batch, rows)), model(inputs(batch, rows)))
    kinds = [(site.kind, site.status) for site in optimized.report.sites]
    assert kinds == [("source", "fused"), ("consumer", "rewritten")]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode_gives_plain_results(dynamic, mode) -> None:
    model, optimized = dynamic
    with mode():
        got = optimized(inputs())
    assert_same(got, model(inputs()))
    assert not got[0].requires_grad


def test_what_is_static_is_noted_and_refused_by_name(dynamic) -> None:
    _, optimized = dynamic
    (note,) = optimized.report.notes
    assert "could not make dimension 2 of x dynamic" in note and f"== {DIM}" in note
    with pytest.raises(InputError, match=rf"argument x: dimension 2 was captured as {DIM}.*got 5"):
        optimized(torch.randn(2, 29, 5))


def test_sizes_zero_and_one_need_their_own_capture(dynamic) -> None:
    model, optimized = dynamic
    with pytest.raises(InputError, match="argument x: dimension 1 is 1"):
        optimized(inputs(2, 1))
    single = dsa_compile.optimize(model, example_inputs=(inputs(1, 9),), config=STATIC)
    assert_same(single(inputs(1, 9)), model(inputs(1, 9)))


def test_a_size_of_one_in_the_example_is_noted() -> None:
    with pytest.warns(NoMatchWarning):
        optimized = dsa_compile.optimize(NoIndexer().eval(), example_inputs=(inputs(1, 9),))
    assert any("dimension 0 of x" in n and "sizes 0 and 1" in n for n in optimized.report.notes)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (inputs().double(), "captured with dtype torch.float32, got torch.float64"),
        (inputs().to("meta"), "captured on cpu, got meta"),
        (inputs()[0], "captured with 3 dimensions"),
        (3, "a tensor was captured, got 3"),
    ],
)
def test_another_kind_of_tensor_is_refused_by_name(dynamic, x, said: str) -> None:
    with pytest.raises(InputError, match=f"argument x: {said}"):
        dynamic[1](x)


def test_wrong_arguments_fail_as_in_a_plain_call(dynamic) -> None:
    for args, kwargs in (((), {}), ((inputs(), 1), {}), ((), {"y": inputs()})):
        with pytest.raises(TypeError):
            dynamic[1](*args, **kwargs)


def test_memory_layouts_may_differ_from_the_example(dynamic) -> None:
    model, optimized = dynamic
    x = inputs(29, 2).transpose(0, 1)
    assert not x.is_contiguous()
    assert_same(optimized(x), model(x))


@pytest.mark.parametrize(
    "examples",
    [
        (inputs(),),
        [inputs()],
        inputs(),
        {"x": inputs()},
        ((inputs(),), {}),
        ((), {"x": inputs()}),
    ],
)
def test_examples_may_be_given_in_each_usual_form(examples) -> None:
    model = NoIndexer().eval()
    with pytest.warns(NoMatchWarning):
        optimized = dsa_compile.optimize(model, example_inputs=examples, config=STATIC)
    assert torch.equal(optimized(x=inputs()), model(inputs()))


@pytest.mark.parametrize("examples", [3, "x", {1: inputs()}])
def test_examples_in_another_form_are_refused(examples) -> None:
    with pytest.raises(ConfigError, match="example_inputs"):
        dsa_compile.optimize(NoIndexer().eval(), example_inputs=examples)


@pytest.fixture(scope="module")
def by_keyword() -> tuple[ByKeyword, OptimizedModule]:
    model = ByKeyword().eval()
    examples = ((inputs(),), {"extra": {"shift": torch.ones(DIM)}, "gain": 0.5})
    return model, dsa_compile.optimize(model, example_inputs=examples, config=STATIC)


def test_keywords_nested_inputs_and_results(by_keyword) -> None:
    model, optimized = by_keyword
    extra = {"shift": torch.full((DIM,), 0.1)}
    expected = model(inputs(), extra, gain=0.5)
    for got in (optimized(inputs(), extra, gain=0.5), optimized(x=inputs(), gain=0.5, extra=extra)):
        assert_same((got["y"], *got["picks"]), (expected["y"], *expected["picks"]))
        assert got["gain"] == 0.5 and got["none"] is None and list(got) == list(expected)


def test_a_constant_or_nesting_that_differs_is_refused_by_name(by_keyword) -> None:
    _, optimized = by_keyword
    extra = {"shift": torch.ones(DIM)}
    with pytest.raises(InputError, match="argument gain: captured as the constant 0.5, got 2.0"):
        optimized(inputs(), extra, gain=2.0)
    with pytest.raises(InputError, match="nested otherwise"):
        optimized(inputs(), {"shifts": torch.ones(DIM)}, gain=0.5)
    with pytest.raises(InputError, match=r"argument extra\['shift'\]: dimension 0"):
        optimized(inputs(), {"shift": torch.ones(1)}, gain=0.5)


def test_a_branch_on_a_size_is_a_condition_of_the_capture() -> None:
    class Branches(TwoLevel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wk(x) * 2 if x.shape[1] > 16 else self.wk(x)

    with pytest.warns(NoMatchWarning):
        optimized = dsa_compile.optimize(Branches().eval(), example_inputs=(inputs(),))
    torch.testing.assert_close(optimized(inputs(2, 17)), optimized.wk(inputs(2, 17)).detach() * 2)
    with pytest.raises(
        InputError, match=r"argument x: .*x.shape\[1\] > 16, got shape \(2, 9, 24\)"
    ):
        optimized(inputs(2, 9))


def test_caches_and_a_start_position_stay_dynamic() -> None:
    model = CacheArgument().eval()

    def caches(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(batch, length, HEAD_DIM), torch.zeros(batch, length, DIM)

    examples = caches(2, 32)
    optimized = dsa_compile.optimize(model, example_inputs=(inputs(2, 8), *examples, 4))
    assert not any(cache.any() for cache in examples)
    x, mine, theirs = inputs(3, 24), caches(3, 48), caches(3, 48)
    for start, end in ((0, 10), (10, 17), (17, 24)):
        got = optimized(x[:, start:end], *mine, start)
        assert_same(got, model(x[:, start:end], *theirs, start))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert len(optimized.report.matched) == 2
    with pytest.raises(InputError, match="argument start: a whole number was captured"):
        optimized(x[:, :4], *mine, 1.5)


def test_too_few_matches_are_an_error_at_once() -> None:
    with pytest.raises(NoMatchError, match="0 indexers were matched.*nearest miss: .*models.py"):
        dsa_compile.optimize(
            NoIndexer().eval(), example_inputs=(inputs(),), config={"require_match": True}
        )


def test_nothing_matched_warns_at_once() -> None:
    with pytest.warns(NoMatchWarning, match="nearest miss") as caught:
        dsa_compile.optimize(NoIndexer().eval(), example_inputs=(inputs(),))
    assert caught[0].filename == __file__


def test_a_model_that_cannot_be_exported_says_so() -> None:
    class Branches(TwoLevel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wk(x) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="torch.export could not capture the model: .*Guard"):
        dsa_compile.optimize(Branches().eval(), example_inputs=(inputs(),))


def test_a_model_that_allows_no_dynamic_size_is_captured_as_it_is() -> None:
    from torch import fx

    from dsa_compile import export_host

    plain, tried = torch.export.export, []

    def only_static(*args, dynamic_shapes=None, **kwargs):
        tried.append(dynamic_shapes)
        if dynamic_shapes is not None:
            plain(*args, dynamic_shapes=dynamic_shapes, **kwargs)
            raise ValueError("no size may change\nfor a reason")
        return plain(*args, dynamic_shapes=None, **kwargs)

    x = inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "export", only_static)
        captured = export_host.capture(NoIndexer().eval(), (x,), {})
    assert len(tried) == 3 and isinstance(captured.graph_module, fx.GraphModule)
    assert captured.notes == ("no size could be kept dynamic: ValueError: no size may change",)
    assert captured.leaves[0].sizes == tuple(x.shape)
    assert not any("dynamo" in name for name in vars(x))


def test_python_attributes_that_forward_changes_are_never_lost_silently() -> None:
    model = WithBreak().eval()
    with pytest.raises(CaptureError, match="forward changes its attribute seen"):
        dsa_compile.optimize(model, example_inputs=(inputs(),), config=STATIC)
    assert model.seen == []


def test_an_argument_that_export_does_not_know_is_named() -> None:
    class Cache:
        pass

    class Takes(NoIndexer):
        def forward(self, x: torch.Tensor, cache: object = None) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(CaptureError, match="argument cache: .*does not understand Cache"):
        dsa_compile.optimize(Takes().eval(), example_inputs=(inputs(), Cache()))


def test_capturing_in_training_mode_is_refused() -> None:
    with pytest.raises(TrainingModeError):
        dsa_compile.optimize(TwoLevel(), example_inputs=(inputs(),))
