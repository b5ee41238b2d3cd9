"""``torch.ops.dsa_deep``: the canonical ops through both stand-ins, as a graph would call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_compile.kernels import deep

from .cases import quantized, random_ids
from .strict_deep_gemm import StrictDeepGemm
from .strict_operands import FP8

pytestmark = pytest.mark.usefixtures("installed")


def operands(seed: int, positions: int = 90) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        quantized(generator, (2, 3, 32, 128), FP8),
        quantized(generator, (2, positions, 128), FP8),
        torch.randn(2, 3, 32, generator=generator).bfloat16(),
    )


def options(seed: int, positions: int = 90) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "row_start": torch.randint(0, 20, (2, 1), generator=generator),
        "row_end": torch.randint(0, positions + 1, (1, 3), generator=generator),
        "mask": torch.rand(1, 3, positions, generator=generator) > 0.2,
        "bias": torch.randn(2, 1, positions, generator=generator),
        "scale": 0.25,
    }


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal up to the rounding of scores to bf16."""
    if got.shape != want.shape or not torch.equal(got.isneginf(), want.isneginf()):
        return False
    return bool(torch.isclose(got.double(), want.double(), rtol=2**-7, atol=0.5).all())


def wide(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.float().double() for t in tensors)


def packed(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
    """Queries and keys in MXFP4: values and scales."""
    query = torch.ops.dsa.fused_indexer_q(q.float(), weights.float(), quant="mxfp4")
    values, scales = torch.ops.dsa.indexer_k_quant(k.float().flatten(0, 1), quant="mxfp4")
    return query[:3], tuple(t.unflatten(0, k.shape[:2]) for t in (values, scales))


@pytest.mark.parametrize("seed", range(2))
def test_packed_operands(seed: int) -> None:
    """What the reference says of the same bytes."""
    q, k, weights = operands(seed)
    (values, q_scale, _), (keys, k_scale) = packed(q, k, weights)
    blocks = torch.tensor([0, 3, 7, 9], dtype=torch.int32).expand(2, 3, 4).contiguous()
    end = torch.tensor([[32, 24, 0]]).expand(2, 3).contiguous()
    args = (values, keys, k_scale, weights, blocks, end)
    kwargs = {"sparse_block": 8, "q_scale": q_scale}
    got = torch.ops.dsa_deep.mxfp4_sparse_mqa_logits(*args, **kwargs)
    assert same(got, torch.ops.dsa.mxfp4_sparse_mqa_logits(*args, **kwargs))
    with pytest.raises(TypeError, match="packed like the keys"):
        torch.ops.dsa_deep.mxfp4_sparse_mqa_logits(q.float(), *args[1:], sparse_block=8)


@pytest.mark.parametrize("seed", range(3))
def test_a_consumer_layer(seed: int) -> None:
    """Expand, score, select and map back as a chain of this provider's ops."""
    ops = torch.ops.dsa_deep
    q, k, weights = operands(seed)
    ids = random_ids(torch.Generator().manual_seed(seed), (2, 3, 6), 12)
    bounds = {n: options(seed)[n] for n in ("row_start", "row_end")}
    sizes = {"num_positions": 90, "sparse_block": 8}
    blocks, end = ops.candidate_expand(ids, *bounds.values(), block_size=8, **sizes)
    scores = ops.sparse_mqa_logits(q, k, weights, blocks, end, sparse_block=8, **bounds)
    values, index = ops.topk_positions(scores, end, blocks, bounds["row_start"], topk=20, **sizes)
    want, _ = torch.ops.dsa.indexer_select(
        *wide((q, k, weights)), topk=20, block_ids=ids, block_size=8, **bounds
    )
    assert same(values, want)
    held = torch.ops.dsa.indexer_select(
        *wide((q, k, weights)), topk=90, block_ids=ids, block_size=8, **bounds
    )
    position = torch.full((2, 3, 90), float("-inf"), dtype=torch.float64)
    position.scatter_(-1, held[1], held[0])
    assert same(values, position.gather(-1, index))
    assert all(len(row.unique()) == 20 for row in index.flatten(0, 1))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("name", ["indexer_select", "indexer_block_max", "indexer_publish"])
def test_dense_ops(
    name: str,
    capability: tuple[int, int],
    process: StrictDeepGemm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process.capability = capability
    given = {"topk": 17, **options(4)}
    if name == "indexer_select":
        given["block_ids"] = random_ids(torch.Generator().manual_seed(4), (1, 3, 9), 12)
    if name == "indexer_publish":
        given["num_blocks"] = 5
    given["block_size"] = 8
    monkeypatch.setattr(deep, "DENSE_BYTES", 4 * 2 * 90 * 2)
    got = getattr(torch.ops.dsa_deep, name)(*operands(4), **given)
    calls = process.calls.count("fp8_fp4_mqa_logits")
    assert calls == 4, "two tiles of rows, two batches of keys"
    want = getattr(torch.ops.dsa, name)(*wide(operands(4)), **given)
    assert same(got[0], want[0])
    if len(got) > 2:
        assert same(got[2], want[2])


def test_no_rows() -> None:
    q, k, weights = operands(0)
    none = (q[:, :0], k, weights[:, :0])
    values, indices = torch.ops.dsa_deep.indexer_select(*none, topk=4)
    assert values.shape == indices.shape == (2, 0, 4)


@pytest.mark.parametrize("name", sorted(deep.KERNELS))
def test_opcheck(name: str) -> None:
    q, k, weights = operands(1)
    blocks = torch.tensor([[[0, 3, 9]]], dtype=torch.int32).expand(2, 3, 3)
    end = torch.full((2, 3), 24)
    sizes = {"num_positions": 90, "sparse_block": 8}
    logits = torch.randn(2, 3, 24)
    values, columns = torch.ops.dsa.topk(logits, end, topk=5)
    (q4, q_scale, _), (k4, k_scale) = packed(q, k, weights)
    calls: dict[str, Any] = {
        "indexer_select": ((q, k, weights), {"topk": 5}),
        "indexer_publish": ((q, k, weights), {"topk": 5, "num_blocks": 3, "block_size": 8}),
        "indexer_block_max": ((q, k, weights), {"topk": 5, "block_size": 8}),
        "candidate_expand": ((blocks,), {"block_size": 8, **sizes}),
        "candidate_columns": ((blocks,), sizes),
        "sparse_mqa_logits": ((q, k, weights, blocks, end), {"sparse_block": 8}),
        "mxfp4_sparse_mqa_logits": (
            (q4, k4, k_scale, weights, blocks, end),
            {"sparse_block": 8, "q_scale": q_scale},
        ),
        "topk": ((logits, end), {"topk": 5}),
        "topk_remap": ((values, columns, blocks), sizes),
        "topk_positions": ((logits, end, blocks), {"topk": 5, **sizes}),
    }
    args, kwargs = calls[name]
    checks = ["test_autograd_registration", "test_faketensor"]
    if args[0].dtype != FP8:
        # It compares inputs with allclose, which fp8 does not have.
        checks.append("test_schema")
    before = [t.contiguous().clone().view(torch.uint8) for t in args]
    op = getattr(torch.ops.dsa_deep, name).default
    torch.library.opcheck(op, args, kwargs, test_utils=checks)
    after = [t.contiguous().view(torch.uint8) for t in args]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_operands_in_full_precision_are_refused() -> None:
    q, k, weights = operands(1)
    with pytest.raises(TypeError, match="quantise them"):
        torch.ops.dsa_deep.indexer_select(q.float(), k.float(), weights, topk=4)
