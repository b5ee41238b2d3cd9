"""CUDA graphs with breaks, over a stand-in that records a piece and replays it on its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

import dsa_compile
from dsa_compile import BreakableCUDAGraph, CaptureError, ConfigError, InputError
from dsa_compile.capture import export_graph
from dsa_compile.kernels.providers import known_uncapturable, uncapturable
from dsa_compile.passes.insert_graph_breaks import MARK
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

from .models import BLOCK, DIM, HEAD_DIM, TwoLevel, inputs

SELECTION = "dsa_cpu::topk"


class Recorder:
    """Stands in for CUDA graphs: a recording runs nothing, a replay writes where it wrote."""

    def __init__(self) -> None:
        self.capturing = False
        self.recorded = self.replayed = self.warmed = self.freed = 0

    def active(self) -> bool:
        return self.capturing

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.warmed += 1
        return run()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        result = run()
        for tensor in _tensors(result):
            tensor.fill_(-77)

        def replay() -> None:
            self.replayed += 1
            for fixed, made in zip(_tensors(result), _tensors(run()), strict=True):
                fixed.copy_(made)

        return replay, result

    def free(self) -> None:
        self.freed += 1


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


class Step(TwoLevel):
    """A decoding step of a batch [B, 1, DIM] on caches [B, T, ...], to (y, picks)."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return self.layers(x, keys, values, keys.shape[1] - 1)


def step_inputs(batch: int, length: int = 40, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, 1, DIM), (batch, length, HEAD_DIM), (batch, length, DIM))
    return tuple(torch.randn(s, generator=generator) for s in sizes)


@pytest.fixture(scope="module")
def captured() -> fx.GraphModule:
    return export_graph(Step().eval(), step_inputs(3), dynamic=True)


def optimised(captured: fx.GraphModule, *names: str) -> PipelineResult:
    return run_pipeline(captured, uncapturable=dict.fromkeys(names, "the test says so"))


BATCH = {0: 0}


def test_without_marks_a_step_is_one_graph(captured: fx.GraphModule) -> None:
    recorder = Recorder()
    run = BreakableCUDAGraph(optimised(captured).graph_module, [4], rows=BATCH, capture=recorder)
    assert [piece.reason for piece in run.pieces] == [None]
    given = step_inputs(4)
    for got, expected in zip(run(*given), captured(*given), strict=True):
        torch.testing.assert_close(got, expected)
    assert recorder.recorded == 1


def test_no_kernel_of_the_triton_provider_needs_a_break() -> None:
    assert uncapturable("triton") == uncapturable("cpu") == {}
    assert set(uncapturable("deepgemm")) == set(known_uncapturable())
    assert all(name.startswith("dsa_deep::") for name in known_uncapturable())
    for name in known_uncapturable():
        space, _, op = name.partition("::")
        from dsa_compile.kernels.providers import load

        assert hasattr(getattr(torch.ops, load("deepgemm")), op), (space, op)


def test_marked_calls_run_between_the_captured_pieces(captured: fx.GraphModule) -> None:
    result, recorder = optimised(captured, SELECTION), Recorder()
    marked = [n for n in result.graph_module.graph.nodes if MARK in n.meta]
    assert [str(n.target) for n in marked] == ["dsa_cpu.topk.default"]
    assert result.breaks == {"dsa_cpu::topk.default": "the test says so"}
    run = BreakableCUDAGraph(result.graph_module, [2, 4], rows=BATCH, capture=recorder)
    reasons = [piece.reason for piece in run.pieces]
    assert reasons == [None, "the test says so", None]
    for count in (4, 3, 2, 4, 3):
        given = step_inputs(count, seed=count)
        for got, expected in zip(run(*given), captured(*given), strict=True):
            torch.testing.assert_close(got, expected)
    assert run.captured == (2, 4) and recorder.recorded == 4


def test_addresses_stay_and_results_do_not_change_later(captured: fx.GraphModule) -> None:
    module = optimised(captured, SELECTION).graph_module
    seen: list[list[int]] = []

    class Watching(Recorder):
        def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            replay, result = super().record(run)

            def watched() -> None:
                replay()
                seen.append([t.data_ptr() for t in _tensors(result)])

            return watched, result

    run = BreakableCUDAGraph(module, [4], rows=BATCH, capture=Watching())
    first = run(*step_inputs(4, seed=1))
    kept = [t.clone() for t in first]
    # Memory that comes and goes must not disturb a replay.
    noise = [torch.randn(size) for size in range(1, 4000, 61)]
    del noise
    second = run(*step_inputs(4, seed=2))
    assert seen[-2:] == seen[-4:-2]
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert not torch.equal(first[0], second[0])


def test_padded_rows_touch_no_result(captured: fx.GraphModule) -> None:
    run = BreakableCUDAGraph(optimised(captured).graph_module, [8], rows=BATCH, capture=Recorder())
    own = [torch.full((8, 1, DIM), 5.0), *(torch.full((8, 1, 6), 5) for _ in "ab")]
    for count in (2, 5, 8):
        given = step_inputs(count, seed=count)
        for buffer in own:
            buffer.fill_(5)
        got = run(*given, out=own)
        for result, buffer, expected in zip(got, own, captured(*given), strict=True):
            assert result.data_ptr() == buffer.data_ptr() and result.shape[0] == count
            torch.testing.assert_close(result, expected)
            assert bool((buffer[count:] == 5).all())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x - x.mean(0), x * 2


class Share(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[0]


class Total(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, total + x.sum(0)


class Put(nn.Module):
    """Writes rows into a shared table: equal rows write equal values to equal places."""

    def forward(self, x: Tensor, places: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), table.index_copy(0, places, x)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (Mean(), (), "result 0 of a real row depends on the rows that pad"),
        (Share(), (), "result 0 depends on the number of rows"),
        (Total(), (torch.zeros(5),), "result 1 of a real row depends on the rows that pad"),
    ],
)
def test_rows_that_depend_on_each_other_are_refused(
    model: nn.Module, more: tuple[Tensor, ...], message: str
) -> None:
    x = torch.randn(4, 5)
    graph = export_graph(model, (x, *more), dynamic=True)
    run = BreakableCUDAGraph(graph, [8], rows=BATCH, capture=Recorder())
    with pytest.raises(CaptureError, match=message):
        run(x, *more)


def test_padding_repeats_a_row_so_that_writes_by_row_are_harmless() -> None:
    x, places, table = torch.randn(3, 5), torch.tensor([4, 0, 2]), torch.zeros(6, 5)
    graph = export_graph(Put(), (x, places, table), dynamic=True)
    run = BreakableCUDAGraph(graph, [4], rows={0: 0, 1: 0}, capture=Recorder())
    for count in (2, 3):
        given = x[:count], places[:count], table
        for got, expected in zip(run(*given), Put()(*given), strict=True):
            torch.testing.assert_close(got, expected)


def test_what_a_capture_cannot_follow_is_named(captured: fx.GraphModule) -> None:
    module = optimised(captured).graph_module
    x, table = torch.randn(3, 5), torch.zeros(6, 5)
    put = export_graph(Put(), (x, torch.tensor([4, 0, 2]), table), dynamic=True)
    run = BreakableCUDAGraph(put, [4], rows={0: 0, 1: 0}, capture=Recorder())
    run(x, torch.tensor([4, 0, 2]), table)
    with pytest.raises(InputError, match="input 2 lies elsewhere"):
        run(x, torch.tensor([4, 0, 2]), table.clone())
    with pytest.raises(InputError, match="inputs disagree on the number of rows"):
        run(x, torch.tensor([4, 0]), table)
    with pytest.raises(InputError, match="5 rows: the graph serves"):
        run(torch.randn(5, 5), torch.arange(5), table)
    with pytest.raises(InputError, match="out must have 2 entries"):
        run(x, torch.tensor([4, 0, 2]), table, out=[None])

    recorder = Recorder()
    step = BreakableCUDAGraph(module, [4], rows=BATCH, capture=recorder)
    step(*step_inputs(4))
    with pytest.raises(InputError, match="was captured as .* and is now"):
        step(*step_inputs(4, length=41))
    recorder.capturing = True
    with pytest.raises(CaptureError, match="called inside a capture"):
        step(*step_inputs(4))
    recorder.capturing = False
    with step:
        step(*step_inputs(4))
    assert recorder.freed == 1 and step.captured == ()
    with pytest.raises(CaptureError, match="were freed"):
        step(*step_inputs(4))


def test_what_cannot_be_built_is_named(captured: fx.GraphModule) -> None:
    module = optimised(captured).graph_module
    with pytest.raises(CaptureError, match="a symbolic size must hold the rows.*dim 1 of input 1"):
        BreakableCUDAGraph(module, [4], capture=Recorder())
    with pytest.raises(CaptureError, match="no tensor with a dim 0 as input 3"):
        BreakableCUDAGraph(module, [4], rows={3: 0}, capture=Recorder())
    for bad in ([], [0], [True], [1]):
        with pytest.raises(ConfigError, match="buckets must be numbers of rows from 2 on"):
            BreakableCUDAGraph(module, bad, rows=BATCH, capture=Recorder())
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    x.meta["val"] = next(iter(captured.graph.nodes)).meta["val"]
    for node in graph.nodes:
        node.meta.setdefault("val", x.meta["val"])
    with pytest.raises(CaptureError, match=r"aten::add_.Tensor writes into its inputs"):
        BreakableCUDAGraph(fx.GraphModule({}, graph), [4], rows={0: 0}, capture=Recorder())


def test_the_report_names_the_breaks() -> None:
    model, config = TwoLevel().eval(), {"uncapturable": (SELECTION,), "dynamic": False}
    optimized = dsa_compile.optimize(model, example_inputs=(inputs(),), config=config)
    assert optimized.report.notes[-1] == (
        "a CUDA graph is interrupted around dsa_cpu::topk.default: the configuration names it"
    )
    assert BLOCK == 4


def test_the_report_names_ops_that_no_library_has() -> None:
    wrong = ("dsa_cpu::topkk", "aten::add.Tensor", "aten::relu.default")
    config = {"uncapturable": wrong, "dynamic": False}
    optimized = dsa_compile.optimize(TwoLevel().eval(), example_inputs=(inputs(),), config=config)
    assert [note for note in optimized.report.notes if note.startswith("uncapturable")] == [
        "uncapturable names dsa_cpu::topkk, and no such op is registered; did you mean "
        "'dsa_cpu::topk'?"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("names", [(), ("dsa_triton::select_columns",)])
def test_on_a_gpu(names: tuple[str, ...]) -> None:
    model = Step().eval().cuda()
    given = [t.cuda() for t in step_inputs(3)]
    captured = export_graph(model, tuple(given), dynamic=True)
    marks = dict.fromkeys((*names, "dsa_triton::topk_positions") if names else (), "the test")
    result = run_pipeline(captured, provider="triton", uncapturable=marks)
    with BreakableCUDAGraph(result.graph_module, [2, 4, 8], rows=BATCH) as run:
        assert len(run.pieces) == (3 if names else 1)
        for count in (8, 3, 5, 2, 4, 7):
            case = [t.cuda() for t in step_inputs(count, seed=count)]
            for got, expected in zip(run(*case), captured(*case), strict=True):
                torch.testing.assert_close(got, expected)
        used = torch.cuda.memory_reserved()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError, match="inside"):
            run(*case)
    del run
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < used
