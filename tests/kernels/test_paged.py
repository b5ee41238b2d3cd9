"""Scores through a block table and of packed keys, against keys read byte by byte in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels import cpu
from dsa_compile.kernels.quantise import dequantise_mxfp4, quantise_mxfp4

from . import serving_oracle as oracle
from .serving_samples import filled_cache

FP8 = torch.float8_e4m3fn
provider = pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])
quant_format = pytest.mark.parametrize("quant", ["fp8", "mxfp4"])


def ops(provider: str) -> Any:
    return getattr(torch.ops, provider)


def queries(kind: str, q: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Queries of a kind, what goes with them, and their exact values."""
    if kind == "mxfp4":
        values, scales = quantise_mxfp4(q)
        return values, {"q_scale": scales}, dequantise_mxfp4(values, scales).double()
    low = q.to({"fp8": FP8, "bf16": torch.bfloat16, "fp64": torch.float64}[kind])
    return low, {}, low.float().double() if kind != "fp64" else low


def setting(seed: int, quant: str, page: int) -> dict[str, Any]:
    """A ragged batch: three requests, two rows each (speculative ones), pages in no order."""
    generator = torch.Generator().manual_seed(seed)
    positions = 70
    columns = -(-positions // page)
    cache = filled_cache(3 * columns + 1, page, 64, quant, seed)
    table = torch.randperm(3 * columns, generator=generator).view(3, columns).int()
    lengths = torch.tensor([[positions, positions - 1], [33, 32], [1, 0]])
    ids = torch.randint(-1, 12, (3, 2, 5), generator=generator)
    shape = {"num_positions": positions, "block_size": 8, "sparse_block": 8}
    blocks, end = torch.ops.dsa.candidate_expand(ids, None, lengths, **shape)
    return {
        "cache": cache,
        "table": table,
        "lengths": lengths,
        "blocks": blocks,
        "end": end,
        "q": torch.randn(3, 2, 3, 64, generator=generator),
        "weights": torch.randn(3, 2, 3, generator=generator),
    }


def check(got: Tensor, want: list[float], tolerance: float) -> None:
    exact = torch.tensor(want, dtype=torch.float64)
    assert torch.equal(got.isneginf(), exact.isneginf())
    seen = exact.isfinite()
    torch.testing.assert_close(got[seen].double(), exact[seen], rtol=tolerance, atol=tolerance)


@provider
@quant_format
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "mxfp4", "fp64"])
def test_scores_are_those_of_the_stored_keys(
    provider: str, quant: str, page: int, kind: str
) -> None:
    s = setting(page, quant, page)
    q, more, exact = queries(kind, s["q"])
    assert torch.equal(exact, s["q"].double()) or kind != "fp64"
    shared: dict[str, Any] = {"quant": quant, "scale": 0.5, **more}
    sparse = ops(provider).paged_sparse_mqa_logits(
        q, s["cache"], s["weights"], s["blocks"], s["end"], s["table"], sparse_block=8,
        row_end=s["lengths"], **shared,
    )  # fmt: skip
    dense = ops(provider).paged_mqa_logits(
        q, s["cache"], s["weights"], s["lengths"], s["table"], num_positions=70, **shared
    )
    assert sparse.dtype == dense.dtype == (torch.float64 if kind == "fp64" else torch.float32)
    tolerance = 1e-12 if kind == "fp64" else 1e-5
    for b in range(3):
        for r in range(2):
            row = []
            for p in range(int(s["lengths"][b, r])):
                key = oracle.token(s["cache"], int(s["table"][b, p // page]), p % page, quant)
                row.append(oracle.score(exact[b, r], key, s["weights"][b, r], 0.5))
            row += [-math.inf] * (70 - len(row))
            check(dense[b, r], row, tolerance)
            picked = []
            for c in range(sparse.shape[-1]):
                p = int(s["blocks"][b, r, c // 8]) * 8 + c % 8
                picked.append(row[p] if c < s["end"][b, r] and p < 70 else -math.inf)
            check(sparse[b, r], picked, tolerance)


@provider
@quant_format
def test_requests_choose_the_line_of_the_table(provider: str, quant: str) -> None:
    s = setting(1, quant, 16)
    owner = torch.tensor([[2, 0], [1, 1], [0, 2]], dtype=torch.int32)
    run = ops(provider).paged_mqa_logits
    args = (s["q"], s["cache"], s["weights"], s["lengths"])
    got = run(*args, s["table"], num_positions=70, quant=quant, requests=owner)
    lines = s["table"][owner.long()].flatten(0, 1)
    flat = [x.flatten(0, 1)[:, None] for x in (s["q"], s["weights"], s["lengths"])]
    want = run(flat[0], s["cache"], flat[1], flat[2], lines, num_positions=70, quant=quant)
    assert torch.equal(got.flatten(0, 1), want[:, 0])


@provider
@quant_format
def test_garbage_in_padded_rows_is_hidden(provider: str, quant: str) -> None:
    """Rows of no request, tables that name no page, ids that overflow."""
    s = setting(2, quant, 16)
    table = s["table"].long()
    table[0, 1], table[1, 0], table[2, 3] = -1, 10**6, 2**40
    owner = torch.tensor([[0, 0], [1, 3], [-5, 2**31 - 1]])
    shared: dict[str, Any] = {"quant": quant, "requests": owner}
    blocks = s["blocks"].long()
    blocks[0, 0, 1:3] = torch.tensor([-(2**30), 2**40])
    end = torch.full((3, 2), 40)
    args = (s["q"], s["cache"], s["weights"])
    sparse = ops(provider).paged_sparse_mqa_logits(
        *args, blocks, end, table, sparse_block=8, **shared
    )
    dense = ops(provider).paged_mqa_logits(
        *args, torch.full((1, 1), 70), table, num_positions=70, **shared
    )
    assert bool(dense[0, :, 16:32].isneginf().all()) and bool(dense[0, :, :16].isfinite().all())
    assert bool(dense[1, 0, :16].isneginf().all()) and bool(dense[1, 0, 16:].isfinite().all())
    assert bool(dense[1, 1].isneginf().all()) and bool(dense[2].isneginf().all())
    assert bool(sparse[0, 0, 8:24].isneginf().all()) and not bool(sparse.isnan().any())


@provider
@pytest.mark.parametrize("anchored", [False, True])
def test_packed_keys_score_like_their_values(provider: str, anchored: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 64, generator=generator)
    weights = torch.randn(2, 3, 4, generator=generator)
    keys, scales = quantise_mxfp4(torch.randn(2, 50, 64, generator=generator))
    ids = torch.randint(0, 7, (2, 3, 4), generator=generator)
    start, stop = torch.tensor([[2], [11]]), torch.tensor([[50, 17, 3]])
    shape = {"num_positions": 50, "block_size": 8, "sparse_block": 8, "anchored": anchored}
    blocks, end = torch.ops.dsa.candidate_expand(ids, start, stop, **shape)
    more: dict[str, Any] = {"row_start": start, "row_end": stop, "anchored": anchored}
    got = ops(provider).mxfp4_sparse_mqa_logits(
        q, keys, scales, weights, blocks, end, sparse_block=8, scale=0.25, **more
    )
    wide = dequantise_mxfp4(keys, scales)
    want = torch.ops.dsa.sparse_mqa_logits(
        q.double(), wide.double(), weights, blocks, end, sparse_block=8, scale=0.25, **more
    )
    check(got.flatten(), want.flatten().tolist(), 1e-5)


def test_the_budget_changes_nothing() -> None:
    s = setting(4, "fp8", 16)
    args = (s["q"], s["cache"], s["weights"], s["blocks"], s["end"], s["table"])
    want = torch.ops.dsa.paged_sparse_mqa_logits(*args, sparse_block=8, row_end=s["lengths"])
    for size in (1, 30000):
        with cpu.limit_working_set(size):
            got = torch.ops.dsa_cpu.paged_sparse_mqa_logits(
                *args, sparse_block=8, row_end=s["lengths"]
            )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@provider
def test_the_indexer_of_v32_from_queries_to_scores(provider: str) -> None:
    """RoPE of halves, Hadamard, fp8 with scales of powers of two, scales in the weights: what is
    scored is the float64 indexer of the rounded numbers, and near that of the exact ones."""
    generator = torch.Generator().manual_seed(6)
    heads, dim, positions, rows = 4, 128, 48, 3
    q = torch.randn(1, rows, heads, dim, generator=generator).bfloat16()
    k = torch.randn(positions, dim, generator=generator).bfloat16()
    weights = torch.randn(1, rows, heads, generator=generator)
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    table: dict[str, Any] = {"cos": angle.cos(), "sin": angle.sin()}
    at = torch.tensor([45, 46, 47])
    how: dict[str, Any] = {"hadamard": True, "quant": "fp8", **table}
    norm = torch.nn.LayerNorm(dim, eps=1e-6)
    ns = ops(provider)
    cache = filled_cache(3, 16, dim, "fp8")
    slots = torch.arange(positions).flip(0)
    ns.indexer_k_quant_and_cache(
        k, cache, slots, norm="layer", norm_weight=norm.weight.detach(),
        norm_bias=norm.bias.detach(), positions=torch.arange(positions), **how,
    )  # fmt: skip
    values, _, scaled, _ = ns.fused_indexer_q(
        q, weights, positions=at[None], softmax_scale=dim**-0.5, head_scale=heads**-0.5, **how
    )
    lengths = at[None] + 1
    # Slots run backwards: position p is token 47 - p, so that pages are read in reverse.
    got = ns.paged_mqa_logits(
        values, cache, scaled, lengths.flip(1), torch.tensor([[0, 1, 2]]), num_positions=positions
    )
    exact_k = torch.stack(
        [
            oracle.rotated(x, table["cos"][p], table["sin"][p], "half", 0)
            for p, x in enumerate(norm(k.float()).detach().bfloat16().double())
        ]
    )
    exact_q = torch.stack(
        [
            torch.stack(
                [oracle.rotated(x, table["cos"][p], table["sin"][p], "half", 0) for x in q[0, r]]
            )
            for r, p in enumerate(at.tolist())
        ]
    )
    ideal = (
        torch.einsum("rhd,td->rht", exact_q, exact_k).relu()
        * weights[0].double()[..., None]
        * (dim * heads) ** -0.5
    )
    ideal = ideal.sum(1).flip(-1)
    for r in range(rows):
        stop = int(lengths.flip(1)[0, r])
        for p in range(stop):
            key = oracle.token(cache, p // 16, p % 16, "fp8")
            want = oracle.score(values[0, r].float().double(), key, scaled[0, r], 1.0)
            assert abs(float(got[0, r, p]) - want) <= 1e-5 * max(1, abs(want))
        error = (got[0, r, :stop].double() - ideal[r, :stop]).abs().max()
        assert float(error) < 0.06 * float(ideal.abs().max())
        assert bool(got[0, r, stop:].isneginf().all())
