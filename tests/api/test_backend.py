"""``torch.compile(backend="dsa")``: options, report, hooks, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass

import dsa_compile
from dsa_compile import ConfigError, NoMatchError, NoMatchWarning, PassError, SlowPathWarning
from dsa_compile.inductor_hooks import HOOK, ComposedPass, IndexerPass

from .models import CacheBuffer, NoIndexer, TwoLevel, WithBreak, assert_same, inputs, ops

Graphs = list[fx.GraphModule]


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model.eval(), backend="dsa", options=options or None)


@torch.no_grad()
def test_the_name_is_known_without_an_import_and_inductor_runs_the_rewritten_graph() -> None:
    # Code generation for the CPU needs a C++ compiler, which the reference run does too.
    script = (
        "import torch, sys; assert 'dsa_compile' not in sys.modules;"
        "assert 'dsa' in torch._dynamo.list_backends(); assert 'dsa_compile' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    model = TwoLevel().eval()
    assert_same(compiled(model, require_match=2)(inputs()), model(inputs()))
    report = dsa_compile.compiled_report(model)
    assert [(s.kind, s.status) for s in report.sites] == [
        ("source", "fused"),
        ("consumer", "rewritten"),
    ]
    assert report.graphs == 1 and "models.py" in report.sites[0].where


@torch.no_grad()
def test_reports_belong_to_models(without_codegen: Graphs) -> None:
    one, other = TwoLevel(0).eval(), TwoLevel(1).eval()
    first = compiled(one)
    first(inputs())
    assert dsa_compile.compiled_report(first) == dsa_compile.compiled_report(one)
    assert dsa_compile.compiled_report(one).graphs == 1
    assert dsa_compile.compiled_report(other).graphs == 0
    torch._dynamo.reset()
    assert dsa_compile.compiled_report().graphs == 0


@torch.no_grad()
def test_two_configurations_and_a_plain_compilation_stay_apart(without_codegen: Graphs) -> None:
    model, x = TwoLevel().eval(), inputs()
    reference = torch.compile(TwoLevel().eval(), backend="dsa", options={"provider": "reference"})
    fast, plain = compiled(model), torch.compile(TwoLevel().eval())
    results = [run(x) for run in (fast, reference, plain)]
    for result in results:
        assert_same(result, model(x))
    spaces = [
        {str(n.target).split(".")[0] for n in g.graph.nodes if str(n.target).startswith("dsa")}
        for g in without_codegen
    ]
    assert spaces == [{"dsa_cpu"}, {"dsa"}, set()]
    assert getattr(inductor, HOOK) is None and inductor.custom_should_partition_ops == []


@torch.no_grad()
def test_threads_compile_at_once(without_codegen: Graphs) -> None:
    models = [TwoLevel(seed).eval() for seed in range(4)]
    providers = ["cpu", "reference"] * 2
    got: list[Any] = [None] * 4

    def run(turn: int) -> None:
        with torch.no_grad():
            got[turn] = compiled(models[turn], provider=providers[turn])(inputs())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn, model in enumerate(models):
        assert_same(got[turn], model(inputs()))
        report = dsa_compile.compiled_report(model)
        assert report.provider == providers[turn] and len(report.matched) == 2
    assert getattr(inductor, HOOK) is None


class _Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs: list[set[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append(ops(graph.owning_module))  # type: ignore[arg-type]

    def uuid(self) -> str:
        return "counting"


@torch.no_grad()
def test_passes_that_are_in_the_hook_run_too(without_codegen: Graphs) -> None:
    theirs, seen = _Counting(), []

    def function(graph: fx.Graph) -> None:
        seen.append(ops(graph.owning_module))  # type: ignore[arg-type]

    for present, record in ((theirs, theirs.graphs), (function, seen)):
        torch._dynamo.reset()
        with inductor.patch({HOOK: present}):
            compiled(TwoLevel())(inputs())
            assert getattr(inductor, HOOK) is present
        # They see the rewritten graph.
        assert len(record) == 1 and "sparse_mqa_logits" in record[0]


def test_composition_has_the_identity_of_its_members() -> None:
    ours = IndexerPass(dsa_compile.Config())
    assert ComposedPass([ours, ours]).uuid() == (ours.uuid(), ours.uuid())
    assert ComposedPass([ours, lambda graph: None]).uuid() is None
    passes = dsa_compile.inductor_passes()
    with inductor.patch(passes):
        # Ours is not run twice where it is in the hook already.
        again = dsa_compile.inductor_passes()[HOOK]
        assert isinstance(again, IndexerPass)
    with inductor.patch({HOOK: print}):
        both = dsa_compile.inductor_passes()[HOOK]
        assert [type(m) for m in both.members] == [IndexerPass, type(print)]


@torch.no_grad()
def test_passes_alone_serve_whoever_drives_inductor(without_codegen: Graphs) -> None:
    from torch._inductor import compile_fx

    passes = dsa_compile.inductor_passes({"provider": "reference"})
    assert passes.report.graphs == 0

    def engine(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx.compile_fx(graph_module, example_inputs, config_patches=passes)

    model = TwoLevel().eval()
    assert_same(torch.compile(model, backend=engine)(inputs()), model(inputs()))
    assert len(passes.report.matched) == 2 and passes.report.provider == "reference"
    with pytest.raises(ConfigError, match="require_match is no option of passes alone"):
        dsa_compile.inductor_passes({"require_match": True})
    # They are options of torch.compile too.
    torch.compile(model, options=passes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"providr": "cpu"}, "unknown option 'providr'; did you mean 'provider'"),
        ({"dynamic": False}, "dynamic is an argument of torch.compile"),
        ({"uncapturable": ["gemm"]}, "uncapturable: must hold names like 'namespace::op'"),
        ({"on_error": "ignore"}, "on_error: must be one of 'raise', 'warn'"),
        ({"require_match": 3}, "2 indexers were .* asks for 3; every selection was matched"),
    ],
)
@torch.no_grad()
def test_bad_options_are_named(without_codegen: Graphs, options: Any, message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(TwoLevel(), **options)(inputs())
    assert isinstance(caught.value.inner_exception, (ConfigError, NoMatchError))


@torch.no_grad()
def test_modes_are_inductors(without_codegen: Graphs) -> None:
    from dsa_compile.backend import backend_options, mode_options

    assert mode_options(None) == mode_options("default") == {}
    assert mode_options("reduce-overhead")["triton.cudagraphs"] is True
    model = TwoLevel().eval()
    run = torch.compile(model, backend="dsa", mode="reduce-overhead", fullgraph=True)
    assert_same(run(inputs()), model(inputs()))
    with pytest.raises(ConfigError, match="did you mean 'reduce-overhead'"):
        mode_options("reduce_overhead")
    with pytest.raises(ConfigError, match="mode must be one of"):
        mode_options(["default"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dynamic is an argument of torch.compile"):
        backend_options({"dynamic": True})
    # torch.compile refuses a mode beside options.
    both = {"provider": "reference", "mode": "reduce-overhead"}
    config, mode = backend_options(both)
    assert (config.provider, mode) == ("reference", "reduce-overhead") and len(both) == 2


@torch.no_grad()
def test_a_graph_without_a_match_is_told(without_codegen: Graphs) -> None:
    with pytest.warns(NoMatchWarning, match="no indexer was matched in a graph"):
        compiled(NoIndexer())(inputs())


def test_a_graph_with_gradients_is_left_alone_and_told(without_codegen: Graphs) -> None:
    model, x = TwoLevel().eval(), inputs().requires_grad_()
    with pytest.warns(SlowPathWarning, match="gradients"):
        got = torch.compile(model, backend="dsa")(x)
    assert_same(got, model(inputs()))
    got[0].sum().backward()
    assert x.grad is not None
    assert not any(ops(g) for g in without_codegen)
    assert "left as it is" in dsa_compile.compiled_report(model).notes[0]


def _broken(*_: Any) -> Any:
    raise ZeroDivisionError("a fault of the pass")


@torch.no_grad()
def test_a_pass_that_raises_is_one_clear_error(
    without_codegen: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsa_compile.passes import expand_candidates, graph_tools

    def broken(graph_module: fx.GraphModule, context: Any) -> Any:
        node = next(n for n in graph_module.graph.nodes if graph_tools.namespace(n) == "dsa")
        return _broken(node)

    monkeypatch.setattr(expand_candidates, "run", broken)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(TwoLevel())(inputs())
    fault = caught.value.inner_exception
    assert isinstance(fault, PassError) and isinstance(fault.__cause__.__cause__, ZeroDivisionError)
    text = str(fault)
    assert "pass expand_candidates failed at " in text and "models.py:" in text
    assert "ZeroDivisionError: a fault of the pass" in text
    path = text.rpartition("graphs in ")[2].rstrip(")")
    with open(path) as file:
        dumped = file.read()
    assert "the graph as captured" in dumped and "the graph as expand_candidates left it" in dumped
    with pytest.raises(PassError, match="pass expand_candidates failed"):
        dsa_compile.optimize(TwoLevel().eval())(inputs())

    model = TwoLevel().eval()
    with pytest.warns(SlowPathWarning, match="pass expand_candidates failed.*runs as it was"):
        assert_same(compiled(model, on_error="warn")(inputs()), model(inputs()))
    report = dsa_compile.compiled_report(model)
    assert not report.sites and "expand_candidates failed" in report.notes[0]
    assert not ops(without_codegen[-1])


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_consumers_behind_a_graph_break_are_matched(
    dynamic: bool | None, without_codegen: Graphs
) -> None:
    model = WithBreak().eval()
    run = torch.compile(model, backend="dsa", dynamic=dynamic)
    assert_same(run(inputs()), model(inputs()))
    report = dsa_compile.compiled_report(model)
    assert report.graphs == 2
    assert [(s.graph, s.kind, s.status) for s in report.sites] == [
        (0, "source", "fused"),
        (1, "consumer", "rewritten"),
    ]
    assert "and are proven on it" in " ".join(report.sites[1].notes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("rows", [1, 29])
@torch.no_grad()
def test_on_a_gpu(mode: str, rows: int) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    # One row decodes at the end of a cache: a context of one position has no axis of positions.
    model = (CacheBuffer() if rows == 1 else TwoLevel()).eval().cuda()
    for cache in model.buffers():
        cache.copy_(torch.randn(cache.shape))
    given = (inputs(rows=rows).cuda(), *((28,) if rows == 1 else ()))
    run = torch.compile(model, backend="dsa", mode=mode, fullgraph=True, options=None)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(run(*given), model(*given))
    # The choice between dense and sparse, and all else that a step decides, waits for no result.
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.compiler.cudagraph_mark_step_begin()
        got = run(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, model(*given))
    report = dsa_compile.compiled_report(model)
    assert report.provider == "triton" and len(report.matched) == 2
    assert not report.notes and not counters["inductor"]["cudagraph_skips"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_named_op_splits_inductors_graphs_on_a_gpu() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model, x = TwoLevel().eval().cuda(), inputs().cuda()
    named = ("dsa_triton::candidate_expand",)
    run = compiled(model, uncapturable=named, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(run(x), model(x))
    (note,) = dsa_compile.compiled_report(model).notes
    assert note.startswith("a CUDA graph is interrupted around dsa_triton::candidate_expand")
    assert counters["inductor"]["cudagraph_partitions"] != 1
