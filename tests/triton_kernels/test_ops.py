"""The provider as PyTorch sees it: schemas, fakes, symbolic sizes, gradients, errors, imports."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_map

import dsa_compile.kernels.triton  # noqa: F401 (registers the ops)
from dsa_compile.kernels.schemas import SCHEMAS

from .conftest import ON_GPU
from .values import kernel_tests

calls = kernel_tests("samples").calls
SAMPLES = calls()
SMALL = {call.name: call for call in calls(1, 2, 13)}
sample = pytest.mark.parametrize("call", SAMPLES, ids=[call.name for call in SAMPLES])


def to_device(given: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, given)


def op_of(call: Any) -> Any:
    return getattr(torch.ops.dsa_triton, call.op).default


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_the_canonical_ones(name: str) -> None:
    mine, canonical = getattr(torch.ops.dsa_triton, name), getattr(torch.ops.dsa, name)
    assert str(mine.default._schema).replace("dsa_triton::", "dsa::") == str(
        canonical.default._schema
    )


@sample
def test_values_are_those_of_the_reference(call: Any, device: str) -> None:
    call = call if ON_GPU else SMALL[call.name]
    args, kwargs = to_device(call.args, device), to_device(call.kwargs, device)
    got = op_of(call)(*args, **kwargs)
    want = getattr(torch.ops.dsa, call.op)(*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@sample
def test_op_passes_the_standard_checks(call: Any, device: str) -> None:
    call = call if ON_GPU else SMALL[call.name]
    opcheck(op_of(call), to_device(call.args, device), to_device(call.kwargs, device))


@pytest.mark.parametrize("batch, rows, n", [(1, 1, 1), (1, 0, 7), (0, 3, 7)])
def test_fakes_agree_at_the_edges(batch: int, rows: int, n: int, device: str) -> None:
    for call in calls(batch, rows, n):
        opcheck(
            op_of(call),
            to_device(call.args, device),
            to_device(call.kwargs, device),
            test_utils="test_faketensor",
        )


def test_topk_positions_is_both_halves(device: str) -> None:
    x, end = torch.randn(1, 2, 24, device=device), torch.tensor([[24, 3]], device=device)
    blocks = torch.arange(3, device=device).view(1, 1, 3)
    kwargs = {"num_positions": 24, "sparse_block": 8}
    op = torch.ops.dsa_triton.topk_positions
    got = op(x, end, blocks, topk=5, **kwargs)
    picked = torch.ops.dsa.topk(x, end, topk=5)
    want = torch.ops.dsa.topk_remap(*picked, blocks, **kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    opcheck(op.default, (x, end, blocks), {"topk": 5, **kwargs})


def test_no_gradient(device: str) -> None:
    x = torch.randn(1, 1, 8, device=device, requires_grad=True)
    values, _ = torch.ops.dsa_triton.topk(x, torch.tensor([[8]], device=device), topk=2)
    with pytest.raises(NotImplementedError, match="no gradient"):
        values.sum().backward()


def test_float64_is_refused(device: str) -> None:
    x = torch.randn(1, 1, 8, device=device, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        torch.ops.dsa_triton.topk(x, torch.tensor([[8]], device=device), topk=2)


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


def test_package_needs_no_triton_and_the_provider_says_so() -> None:
    """Once with Triton missing, once with a module of that name that holds nothing."""
    done = python(
        """
import sys
sys.modules["triton"] = None
import dsa_compile, dsa_compile.kernels
assert not any(name.startswith("dsa_compile.kernels.triton") for name in sys.modules)
def attempt():
    try:
        import dsa_compile.kernels.triton
    except ImportError as error:
        assert "needs Triton" in str(error) and "provider='cpu'" in str(error), error
        return
    raise SystemExit("imported")
attempt()
import types
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton.language"] = types.ModuleType("triton.language")
sys.modules["triton"].language = sys.modules["triton.language"]
attempt()
"""
    )
    assert done.returncode == 0, done.stderr


def test_compilers_see_kernels_of_symbolic_sizes() -> None:
    """AOTAutograd traces an op to the launches inside, once for all sizes."""
    done = python(
        """
import torch, dsa_compile.kernels, dsa_compile.kernels.triton as provider
from functorch.compile import aot_function
provider.check_device = lambda *args: None
op = torch.ops.dsa_triton
def chain(q, k, w, ids, end):
    shape = {"num_positions": k.shape[1], "sparse_block": 8}
    blocks, stop = op.candidate_expand(ids, None, end, block_size=8, **shape)
    logits = op.sparse_mqa_logits(q, k, w, blocks, stop, sparse_block=8, row_end=end)
    picked = op.topk_positions(logits, stop, blocks, topk=5, **shape)
    return (*picked, *op.indexer_publish(q, k, w, topk=5, num_blocks=2, block_size=8))
class Traced(Exception):
    pass
def stop(graph_module, inputs):
    text = graph_module.code
    assert "dsa_triton" not in text, text
    assert text.count("triton_kernel_wrapper") >= 8, text
    raise Traced
args = (torch.randn(2, 6, 4, 32), torch.randn(2, 90, 32), torch.randn(2, 6, 4),
        torch.randint(0, 9, (2, 6, 7)), torch.randint(0, 90, (2, 6)))
try:
    with torch.no_grad():
        aot_function(chain, fw_compiler=stop, dynamic=True)(*args)
except Traced:
    pass
else:
    raise SystemExit("not traced")
"""
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernels_do_not_run_on_the_cpu() -> None:
    done = python(
        """
import torch, dsa_compile.kernels, dsa_compile.kernels.triton
try:
    torch.ops.dsa_triton.topk(torch.zeros(1, 1, 4), torch.tensor([[4]]), topk=1)
except ValueError as error:
    assert "CUDA" in str(error) and "provider='cpu'" in str(error), error
else:
    raise SystemExit("ran")
"""
    )
    assert done.returncode == 0, done.stderr
