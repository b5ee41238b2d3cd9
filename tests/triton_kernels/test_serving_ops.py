"""The serving ops of the provider as PyTorch sees them: schemas, fakes, mutation, tracing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map

import dsa_compile.kernels.triton  # noqa: F401 (registers the ops)
from dsa_compile.kernels.serving_schemas import SERVING_SCHEMAS

from .conftest import ON_GPU
from .values import kernel_tests

serving_calls = kernel_tests("serving_samples").serving_calls
SAMPLES = serving_calls() if ON_GPU else serving_calls(1, 2, 13)
sample = pytest.mark.parametrize("call", SAMPLES, ids=[call.name for call in SAMPLES])


def copied(call: Any, device: str) -> tuple[Any, Any]:
    """Arguments of one's own on a device, with their strides: a cache is written to."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return room.copy_(x)

    return tree_map(copy, (call.args, call.kwargs))


@pytest.mark.parametrize("name", SERVING_SCHEMAS)
def test_schemas_are_the_canonical_ones(name: str) -> None:
    mine, canonical = getattr(torch.ops.dsa_triton, name), getattr(torch.ops.dsa, name)
    assert str(mine.default._schema).replace("dsa_triton::", "dsa::") == str(
        canonical.default._schema
    )


@sample
def test_values_are_those_of_the_reference(call: Any, device: str) -> None:
    (args, kwargs), (others, _) = copied(call, device), copied(call, device)
    got = getattr(torch.ops.dsa_triton, call.op)(*args, **kwargs)
    want = getattr(torch.ops.dsa, call.op)(*others, **kwargs)
    if got is None:
        got, want = args[1], others[1]
        assert not torch.equal(got, call.args[1].to(device))
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.dtype in (torch.uint8, torch.float8_e4m3fn):
            near = (x.view(torch.uint8) != y.view(torch.uint8)).float()
            assert not near.numel() or float(near.mean()) < 0.02
        else:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)


@sample
def test_op_passes_the_standard_checks(call: Any, device: str) -> None:
    opcheck(getattr(torch.ops.dsa_triton, call.op).default, *copied(call, device))


@pytest.mark.parametrize("batch, rows, n", [(1, 1, 1), (1, 0, 7), (0, 3, 7)])
def test_fakes_agree_at_the_edges(batch: int, rows: int, n: int, device: str) -> None:
    for call in serving_calls(batch, rows, n):
        op = getattr(torch.ops.dsa_triton, call.op).default
        opcheck(op, *copied(call, device), test_utils="test_faketensor")


def test_float64_is_refused(device: str) -> None:
    q = torch.randn(1, 1, 2, 32, device=device, dtype=torch.float64)
    with pytest.raises(TypeError, match="fused_indexer_q: .*float64"):
        torch.ops.dsa_triton.fused_indexer_q(q, torch.ones(1, 1, 2, device=device))


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )


def test_compilers_see_kernels_of_symbolic_sizes() -> None:
    """AOTAutograd traces a decode step to the launches inside, the write to the cache included."""
    done = python(
        """
import torch, dsa_compile.kernels, dsa_compile.kernels.triton as provider
from functorch.compile import aot_function
provider.check_device = lambda *args: None
op = torch.ops.dsa_triton
def step(q, w, k, cache, slots, cos, sin, at, table, ids, end):
    angles = {"cos": cos, "sin": sin, "hadamard": True}
    op.indexer_k_quant_and_cache(k, cache, slots, norm="layer", positions=slots, **angles)
    query, _, weights, _ = op.fused_indexer_q(q, w, positions=at, quant="fp8", **angles)
    shape = {"num_positions": table.shape[1] * cache.shape[1], "sparse_block": 8}
    blocks, stop = op.candidate_expand(ids, None, end, block_size=8, **shape)
    logits = op.paged_sparse_mqa_logits(
        query, cache, weights, blocks, stop, table, sparse_block=8, row_end=end)
    starts = torch.arange(table.shape[0] + 1) * 16
    keys = op.gather_indexer_k(cache, table, starts, num_tokens=40)
    return (logits, *keys)
class Traced(Exception):
    pass
def stop(graph_module, inputs):
    text = graph_module.code
    assert "dsa_triton" not in text, text
    assert text.count("triton_kernel_wrapper") >= 5, text
    # What was written is copied back into the caller's cache. (Without a GPU, PyTorch cannot read
    # off the kernels what they write, and takes all for written.)
    assert "copy_.default(arg3_1" in text, text
    raise Traced
rows, draw = 6, torch.randint
args = (torch.randn(3, rows, 4, 64), torch.randn(3, rows, 4), torch.randn(18, 64),
        torch.zeros(11, 16, 68, dtype=torch.uint8), torch.arange(18), torch.rand(99, 16),
        torch.rand(99, 16), torch.zeros(3, rows, dtype=torch.int64),
        torch.zeros(3, 5, dtype=torch.int32), draw(0, 9, (3, rows, 7)), draw(0, 80, (3, rows)))
try:
    with torch.no_grad():
        aot_function(step, fw_compiler=stop, dynamic=True, keep_inference_input_mutations=True)(
            *args)
except Traced:
    pass
else:
    raise SystemExit("not traced")
"""
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not ON_GPU, reason="Inductor compiles kernels for a GPU")
def test_inductor_keeps_the_write(device: str) -> None:
    op = torch.ops.dsa_triton

    def step(k: Any, cache: Any, slots: Any, table: Any, starts: Any) -> Any:
        op.indexer_k_quant_and_cache(k, cache, slots, norm="rms", quant="mxfp4")
        return op.gather_indexer_k(cache, table, starts, num_tokens=16, quant="mxfp4")

    k, slots = torch.randn(4, 64, device=device), torch.tensor([3, -1, 0, 40], device=device)
    table = torch.zeros(1, 1, dtype=torch.int64, device=device)
    starts = torch.tensor([0, 16], device=device)
    caches = [torch.zeros(2, 16, 34, dtype=torch.uint8, device=device) for _ in range(2)]
    want = step(k, caches[0], slots, table, starts)
    got = torch.compile(step, fullgraph=True)(k, caches[1], slots, table, starts)
    for x, y in zip((*got, caches[1]), (*want, caches[0]), strict=True):
        assert torch.equal(x, y)
