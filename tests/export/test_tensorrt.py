"""What Torch-TensorRT is given. Its libraries are not needed: see dsa_compile/tensorrt.py."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

import dsa_compile
from dsa_compile import tensorrt
from dsa_compile.passes.pipeline import op_counts
from dsa_compile.tensorrt_lowering import lowering_pass, ops_in_pytorch, stays_in_pytorch

from .conftest import EXAMPLES
from .models import TwoLevel, WritesBuffer, assert_same, inputs

FIXED = {"dynamic": False, "require_match": 2}


@pytest.fixture(scope="module")
def program(model: TwoLevel) -> Any:
    return dsa_compile.export(model, EXAMPLES, config=FIXED)


def test_the_lowering_pass_rewrites_what_torch_tensorrt_would_hand_it(model: TwoLevel) -> None:
    plain = torch.export.export(model, EXAMPLES).run_decompositions()
    graph_module = plain.module()
    lowered = lowering_pass({"require_match": 2})(graph_module, object())
    assert isinstance(lowered, fx.GraphModule)
    assert op_counts(lowered)["dsa_cpu.sparse_mqa_logits.default"] == 1
    assert "dsa_cpu.sparse_mqa_logits.default" not in op_counts(graph_module)
    assert_same(lowered(*EXAMPLES), model(*EXAMPLES))
    held = {t.data_ptr() for t in lowered.state_dict().values()}
    assert {t.data_ptr() for t in model.state_dict().values()} <= held


def test_writes_at_the_end_of_a_graph_survive_the_lowering_pass() -> None:
    model, other = WritesBuffer().eval(), WritesBuffer().eval()
    other.load_state_dict(model.state_dict())
    x, _ = inputs()
    plain = torch.export.export(model, (x,)).run_decompositions()
    lowered = lowering_pass({"require_match": 2})(plain.module())
    assert_same(lowered(x), other(x))
    buffers = dict(lowered.named_buffers())
    assert torch.equal(buffers["keys"], other.keys) and buffers["calls"] == 1


def test_a_graph_that_reads_what_it_wrote_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    module = fx.GraphModule({}, graph)
    with pytest.warns(dsa_compile.SlowPathWarning, match="after add__tensor wrote to it"):
        assert lowering_pass()(module) is module


class _Engines(OperatorSupportBase):
    """Takes everything into engines but what must stay in PyTorch."""

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        return node.op == "call_function" and not stays_in_pytorch(node)


def test_everything_else_is_free_to_go_into_engines(model: TwoLevel, program: Any) -> None:
    graph_module = program.module()
    ours = ops_in_pytorch(graph_module)
    assert ours and all(op.namespace == "dsa_cpu" for op in ours)
    divider = CapabilityBasedPartitioner(
        graph_module, _Engines(), allows_single_node_partition=True
    )
    engines = divider.propose_partitions()
    inside = {node for engine in engines for node in engine.nodes}
    calls = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    assert {n for n in calls if n not in inside} == {n for n in calls if stays_in_pytorch(n)}
    fused = divider.fuse_partitions(engines)
    assert_same(fused(*EXAMPLES), model(*EXAMPLES))


def test_a_missing_library_is_told(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(dsa_compile.ProviderError, match="install torch-tensorrt 2.14"):
        tensorrt.compile(program)
    with pytest.raises(dsa_compile.ConfigError, match="require_full_compilation leaves no"):
        tensorrt.compile(program, require_full_compilation=True)


def test_what_torch_tensorrt_is_called_with(
    model: TwoLevel, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def compile(exported_program: Any, inputs: Any = None, *, arg_inputs: Any = None,
                kwarg_inputs: Any = None, torch_executed_ops: Any = None,
                min_block_size: int = 5) -> str:  # fmt: skip
        calls.append((exported_program, {k: v for k, v in locals().items() if k != "calls"}))
        return "compiled"

    library = types.SimpleNamespace(dynamo=types.SimpleNamespace(compile=compile))
    monkeypatch.setitem(sys.modules, "torch_tensorrt", library)
    relu = torch.ops.aten.relu.default
    for source in (program, model):
        args = None if source is program else EXAMPLES
        done = tensorrt.compile(
            source, args, config=None if source is program else FIXED,
            torch_executed_ops={relu}, min_block_size=1,
        )  # fmt: skip
        assert done == "compiled"
        given, named = calls.pop()
        assert isinstance(given, torch.export.ExportedProgram)
        assert named["torch_executed_ops"] == {relu, *ops_in_pytorch(given.graph_module)}
        assert len(named["torch_executed_ops"]) > 2 and named["min_block_size"] == 1
        assert all(torch.equal(a, b) for a, b in zip(named["arg_inputs"], EXAMPLES, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Torch-TensorRT builds engines on a GPU")
def test_engines_give_what_the_model_gives(model: TwoLevel) -> None:
    pytest.importorskip("torch_tensorrt")
    args = tuple(x.cuda() for x in EXAMPLES)
    own = TwoLevel().eval().cuda()
    compiled = tensorrt.compile(own, args, config=FIXED, min_block_size=1)
    assert_same(compiled(*args), own(*args))
