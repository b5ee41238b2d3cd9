"""The serving ops as PyTorch sees them: schemas, fakes, mutation, symbolic sizes, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map

from dsa_compile.kernels.serving_schemas import SERVING_SCHEMAS

from .samples import Call
from .serving_samples import filled_cache, serving_calls

NAMESPACES = ["dsa", "dsa_cpu"]
SAMPLES = serving_calls()
sample = pytest.mark.parametrize("call", SAMPLES, ids=[call.name for call in SAMPLES])
namespace = pytest.mark.parametrize("provider", NAMESPACES)


def find(provider: str, call: Call) -> Any:
    return getattr(getattr(torch.ops, provider), call.op)


def copied(call: Call) -> tuple[Any, Any]:
    """Arguments of one's own, with their strides: a cache is written to."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return room.copy_(x)

    return tree_map(copy, (call.args, call.kwargs))


def test_every_op_has_a_sample() -> None:
    assert {call.op for call in SAMPLES} == set(SERVING_SCHEMAS)


@namespace
@sample
def test_op_passes_the_standard_checks(provider: str, call: Call) -> None:
    opcheck(find(provider, call).default, *copied(call))


@namespace
@pytest.mark.parametrize("batch, rows, n", [(1, 1, 1), (1, 0, 7), (0, 3, 7), (2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fakes_agree_at_the_edges(
    provider: str, batch: int, rows: int, n: int, dtype: torch.dtype
) -> None:
    for call in serving_calls(batch, rows, n, dtype):
        opcheck(find(provider, call).default, *copied(call), test_utils="test_faketensor")


@namespace
@sample
def test_only_the_cache_is_written_to(provider: str, call: Call) -> None:
    args, kwargs = copied(call)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    made = [x for x in tree_leaves(find(provider, call)(*args, **kwargs)) if x is not None]
    for out in made:
        assert out.is_contiguous()
        assert (
            out.untyped_storage().data_ptr()
            not in {x.untyped_storage().data_ptr() for x in given if x.numel()}
            or not out.numel()
        )
    assert len({x.untyped_storage().data_ptr() for x in made if x.numel()}) == sum(
        1 for x in made if x.numel()
    )
    changed = [x for x, old in zip(given, before, strict=True) if not torch.equal(x, old)]
    writes = call.op == "indexer_k_quant_and_cache"
    assert [x is args[1] for x in changed] == ([True] if writes else [])


@sample
def test_one_graph_serves_all_sizes(call: Call) -> None:
    """The namespaces share their fakes."""
    op = find("dsa", call)
    counter = CompileCounter()

    def run(args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    index = [x.name for x in SAMPLES].index(call.name)
    # No two sizes are the same: Dynamo would take them for one.
    for batch, rows, n in ((8, 11, 73), (9, 12, 90), (10, 13, 105)):
        other = serving_calls(batch, rows, n)[index]
        (got_args, kwargs), (want_args, _) = copied(other), copied(other)
        got, want = compiled(got_args, kwargs), op(*want_args, **kwargs)
        same(got, want)
        if got is None:
            assert torch.equal(got_args[1], want_args[1])
    assert counter.frame_count == 1


def same(got: Any, want: Any) -> None:
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if x is not None:
            narrow = x.dtype.itemsize == 1
            x, y = (t.view(torch.uint8) if narrow else t for t in (x, y))
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@namespace
def test_compilers_keep_the_write(provider: str) -> None:
    """A cache that is written and then read in one graph: the read sees the write."""
    ops = getattr(torch.ops, provider)

    def step(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ops.indexer_k_quant_and_cache(k, cache, slots, quant="mxfp4")
        table = torch.zeros(1, 1, dtype=torch.int64)
        starts = torch.tensor([0, 16])
        return ops.gather_indexer_k(cache, table, starts, num_tokens=16, quant="mxfp4")[0]

    k, slots = torch.randn(4, 64), torch.tensor([3, -1, 0, 40])
    caches = [filled_cache(2, 16, 64, "mxfp4", 7) for _ in range(2)]
    want = step(k, caches[0], slots)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(k, caches[1], slots)
    assert torch.equal(got, want) and torch.equal(caches[0], caches[1])


@namespace
@sample
def test_meta_tensors_take_no_kernel(provider: str, call: Call) -> None:
    def to_meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    args, kwargs = copied(call)
    got = tree_leaves(find(provider, call)(*map(to_meta, args), **tree_map(to_meta, kwargs)))
    want = tree_leaves(find(provider, call)(*args, **kwargs))
    assert [None if x is None else (x.shape, x.dtype, x.stride()) for x in got] == [
        None if x is None else (x.shape, x.dtype, x.stride()) for x in want
    ]


@namespace
def test_inference_mode_and_autocast_change_nothing(provider: str) -> None:
    for call in SAMPLES:
        op = find(provider, call)
        want = op(*copied(call)[0], **call.kwargs)
        with torch.inference_mode():
            same(op(*copied(call)[0], **call.kwargs), want)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same(op(*copied(call)[0], **call.kwargs), want)


@namespace
def test_a_gradient_is_refused_aloud(provider: str) -> None:
    q, w = torch.randn(1, 1, 2, 32, requires_grad=True), torch.randn(1, 1, 2)
    out = getattr(torch.ops, provider).fused_indexer_q(q, w)
    with pytest.raises(NotImplementedError, match="fused_indexer_q has no gradient"):
        out[0].sum().backward()


def test_both_namespaces_share_their_schemas() -> None:
    for name in SERVING_SCHEMAS:
        first, second = (getattr(getattr(torch.ops, x), name).default for x in NAMESPACES)
        assert str(first._schema).removeprefix("dsa::") == str(second._schema).removeprefix(
            "dsa_cpu::"
        )
    schema = torch.ops.dsa.indexer_k_quant_and_cache.default._schema
    assert schema.is_mutable and [a.name for a in schema.arguments if a.is_write] == ["cache"]
