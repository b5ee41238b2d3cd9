"""The ops as PyTorch sees them: schemas, fakes, strides, symbolic sizes, gradients, autocast."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

from dsa_compile.kernels.schemas import SCHEMAS

from .samples import Call, calls

NAMESPACES = ["dsa", "dsa_cpu"]
SAMPLES = calls()
sample = pytest.mark.parametrize("call", SAMPLES, ids=[call.name for call in SAMPLES])
namespace = pytest.mark.parametrize("provider", NAMESPACES)


def find(provider: str, call: Call) -> Any:
    return getattr(getattr(torch.ops, provider), call.op)


def test_every_op_has_a_sample() -> None:
    assert {call.op for call in SAMPLES} == set(SCHEMAS)


@namespace
@sample
def test_op_passes_the_standard_checks(provider: str, call: Call) -> None:
    opcheck(find(provider, call).default, call.args, call.kwargs)


@namespace
@pytest.mark.parametrize("batch, rows, n", [(1, 1, 1), (1, 0, 7), (0, 3, 7), (2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fakes_agree_at_the_edges(
    provider: str, batch: int, rows: int, n: int, dtype: torch.dtype
) -> None:
    for call in calls(batch, rows, n, dtype):
        opcheck(find(provider, call).default, call.args, call.kwargs, test_utils="test_faketensor")


@namespace
@sample
def test_results_are_contiguous_and_new(provider: str, call: Call) -> None:
    given = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    for out in tree_leaves(find(provider, call)(*call.args, **call.kwargs)):
        assert out.is_contiguous()
        assert out.untyped_storage().data_ptr() not in {
            x.untyped_storage().data_ptr() for x in given
        }
    for x, old in zip(given, before, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


@namespace
@sample
def test_one_graph_serves_all_sizes(provider: str, call: Call) -> None:
    """A fake that guarded on a size would compile again for the second call."""
    op = find(provider, call)
    counter = CompileCounter()

    def run(args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    index = [x.name for x in SAMPLES].index(call.name)
    for batch, rows, n in ((2, 5, 29), (3, 4, 40), (4, 9, 33)):
        other = calls(batch, rows, n)[index]
        got = compiled(other.args, other.kwargs)
        want = op(*other.args, **other.kwargs)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1


@namespace
@sample
def test_autocast_changes_nothing(provider: str, call: Call) -> None:
    op = find(provider, call)
    want = op(*call.args, **call.kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = op(*call.args, **call.kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@namespace
def test_a_gradient_is_refused_aloud(provider: str) -> None:
    call = SAMPLES[0]
    args = [x.clone().requires_grad_() for x in call.args]
    values, indices = find(provider, call)(*args, **call.kwargs)
    assert not indices.requires_grad
    with pytest.raises(NotImplementedError, match=f"{provider}::indexer_select has no gradient"):
        values.sum().backward()
    with torch.no_grad():
        assert not find(provider, call)(*args, **call.kwargs)[0].requires_grad


@namespace
@sample
def test_inference_mode(provider: str, call: Call) -> None:
    op = find(provider, call)
    want = op(*call.args, **call.kwargs)
    with torch.inference_mode():
        got = op(*call.args, **call.kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@namespace
@sample
def test_meta_tensors_take_no_kernel(provider: str, call: Call) -> None:
    def to_meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    args = [to_meta(x) for x in call.args]
    kwargs = {name: to_meta(x) for name, x in call.kwargs.items()}
    got = tree_leaves(find(provider, call)(*args, **kwargs))
    want = tree_leaves(find(provider, call)(*call.args, **call.kwargs))
    assert [(x.shape, x.dtype, x.stride()) for x in got] == [
        (x.shape, x.dtype, x.stride()) for x in want
    ]


def test_both_namespaces_share_their_schemas() -> None:
    for name in SCHEMAS:
        first, second = (getattr(getattr(torch.ops, x), name).default for x in NAMESPACES)
        assert str(first._schema).removeprefix("dsa::") == str(second._schema).removeprefix(
            "dsa_cpu::"
        )


def test_import_is_light() -> None:
    """No compiler, no Triton, nothing of the passes above."""
    code = (
        "import sys; sys.modules['triton'] = None; import dsa_compile.kernels, torch;"
        "assert torch.ops.dsa.topk and torch.ops.dsa_cpu.topk;"
        "bad = [m for m in sys.modules if m.startswith(('torch._inductor.codegen',"
        " 'dsa_compile.passes'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
