"""One call of every serving op with all its arguments, and some with few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .samples import Call

FP8 = torch.float8_e4m3fn


def token_bytes(dim: int, quant: str) -> int:
    return dim + 4 if quant == "fp8" else dim // 2 + dim // 32


def filled_cache(pages: int, page: int, dim: int, quant: str, seed: int = 0) -> Tensor:
    """A cache of random keys, whose pages lie further apart than they are long."""
    generator = torch.Generator().manual_seed(seed)
    width = token_bytes(dim, quant)
    stride = page * width + 16
    room = torch.zeros(max(1, pages * stride), dtype=torch.uint8)
    cache = room.as_strided((pages, page, width), (stride, width, 1))
    k = torch.randn(pages * page, dim, generator=generator)
    if k.numel():
        slots = torch.arange(pages * page)
        torch.ops.dsa.indexer_k_quant_and_cache(k, cache, slots, quant=quant)
    return cache


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of MXFP4."""
    from dsa_compile.kernels.quantise import quantise_mxfp4

    return quantise_mxfp4(x)


def serving_calls(
    batch: int = 2, rows: int = 5, n: int = 29, dtype: torch.dtype = torch.float32
) -> list[Call]:
    """Calls with ``batch`` items, ``rows`` query rows and a context of ``n`` positions."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    dim, heads, page = 64, 3, 16
    q, weights = randn(batch, rows, heads, dim).to(dtype), randn(batch, rows, heads)
    table = {"cos": randn(50, 16), "sin": randn(50, 16)}
    lines = {"cos": randn(batch, 1, 4), "sin": randn(batch, 1, 4)}
    turned = {"rope_start": 16, "hadamard": True, **table}
    calls = [
        Call("fused_indexer_q", (q, weights), {}, "few"),
        Call(
            "fused_indexer_q",
            (q, weights),
            {
                **turned,
                "positions": randint(0, 50, batch, rows),
                "quant": "fp8",
                "softmax_scale": 0.5,
                "head_scale": 0.25,
                "bf16_weights": True,
            },
            "fp8",
        ),
        Call(
            "fused_indexer_q",
            (q, weights),
            {**lines, "rope": "interleaved", "quant": "mxfp4", "weights_out_dtype": torch.bfloat16},
            "mxfp4",
        ),
    ]
    k = randn(n, dim).to(dtype)
    norm = {"norm": "layer", "norm_weight": randn(dim), "norm_bias": randn(dim)}
    key: dict[str, Any] = {**turned, **norm, "positions": randint(0, 50, n)}
    pages = -(-n // page)
    for quant in ("fp8", "mxfp4"):
        cache = filled_cache(batch * pages + 1, page, dim, quant)
        block_table = torch.randperm(batch * pages, generator=generator).view(batch, pages)
        slots = torch.randperm(cache.shape[0] * page, generator=generator)[:n]
        slots[: n // 4] = -1
        calls.append(Call("indexer_k_quant", (k,), {**key, "quant": quant}, quant))
        calls.append(
            Call("indexer_k_quant_and_cache", (k, cache, slots), {**key, "quant": quant}, quant)
        )
        starts = torch.arange(batch + 1) * n
        calls.append(
            Call(
                "gather_indexer_k",
                (cache, block_table, starts),
                {"num_tokens": batch * n + 3, "quant": quant},
                quant,
            )
        )
        block_ids = randint(0, -(-n // 8), batch, rows, 3)
        row_end = randint(0, n + 1, batch, rows)
        shape = {"num_positions": n, "block_size": 8, "sparse_block": 8}
        blocks, end = torch.ops.dsa.candidate_expand(block_ids, None, row_end, **shape)
        requests = randint(0, batch, batch, 1) if batch else torch.zeros(0, 1, dtype=torch.int64)
        values, scales = packed(q.float())
        shared = {"quant": quant, "scale": 0.5, "requests": requests}
        calls.append(
            Call(
                "paged_sparse_mqa_logits",
                (values, cache, weights, blocks, end, block_table),
                {"sparse_block": 8, "row_end": row_end, "q_scale": scales, **shared},
                quant,
            )
        )
        calls.append(
            Call(
                "paged_mqa_logits",
                (q, cache, weights, row_end, block_table),
                {"num_positions": n, "quant": quant},
                quant,
            )
        )
    keys, key_scales = packed(randn(1, n, dim))
    start = randint(0, 3, batch, 1)
    calls.append(
        Call(
            "mxfp4_sparse_mqa_logits",
            (q, keys, key_scales, weights, blocks, end),
            {"sparse_block": 8, "row_start": start, "row_end": row_end, "anchored": True},
        )
    )
    return calls
