"""Time of the serving kernels on one GPU: queries, key writes, scores of keys where they lie.

Queries and key writes stand beside the same PyTorch operations under torch.compile; scores through
a block table beside the time that their bytes take at the bandwidth of a device copy, measured in
the same run. Times are medians of calls in CUDA graphs. With --check the exit status is 1 where a
bound is missed: 1.5 times faster than torch.compile; 1.3 (fp8) and 1.6 (MXFP4) times the bytes.

    python benchmarks/serving.py [--only queries keys paged packed] [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_timing import milliseconds
from rich.console import Console
from serving_table import Results
from torch import Tensor

import dsa_compile.kernels.triton  # noqa: F401 (fails early without Triton)
from dsa_compile.kernels.quantise import FP8, quantise_mxfp4
from dsa_compile.kernels.triton_fused_q import fused_indexer_q
from dsa_compile.kernels.triton_key_cache import indexer_k_quant, indexer_k_quant_and_cache
from dsa_compile.kernels.triton_sparse import sparse_mqa_logits
from dsa_compile.kernels.triton_stored_ops import (
    mxfp4_sparse_mqa_logits,
    paged_mqa_logits,
    paged_sparse_mqa_logits,
)
from dsa_compile.layout import PageLayout, stride_step

PARTS = ("queries", "keys", "paged", "packed")
DIM, ROTARY, PAGE, BLOCK, CANDIDATES = 128, 64, 64, 8, 2048
COLUMNS = CANDIDATES * BLOCK
NEAR = {"fp8": 1.3, "mxfp4": 1.6}


def copy_rate() -> float:
    """Bytes a second that a device copy reads and writes together."""
    from triton.testing import do_bench

    source = torch.empty(1 << 29, device="cuda")
    target = torch.empty_like(source)
    took = float(do_bench(lambda: target.copy_(source), rep=50, return_mode="median"))
    return 2 * source.nbytes / took * 1000


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call among many in one graph, so that no replay's start counts."""
    return milliseconds(call) / 1000


def angles(rows: int) -> dict[str, Any]:
    """Tables of 4,096 positions and a position for every row."""
    steps = 10000.0 ** (-torch.arange(ROTARY // 2, device="cuda") / (ROTARY // 2))
    angle = torch.arange(4096, device="cuda")[:, None] * steps
    positions = torch.randint(0, 4096, (rows,), device="cuda")
    return {"cos": angle.cos(), "sin": angle.sin(), "positions": positions}


def hadamard() -> Tensor:
    """The orthonormal Hadamard matrix of order DIM in bf16, as models multiply by it."""
    matrix = torch.ones(1, 1, device="cuda")
    while matrix.shape[0] < DIM:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix * DIM**-0.5).bfloat16()


def turned(x: Tensor, cos: Tensor, sin: Tensor, matrix: Tensor) -> Tensor:
    """RoPE of halves of the first dims, then the Hadamard product, each in bf16."""
    half = ROTARY // 2
    wide = x.float()
    a, b = wide[..., :half], wide[..., half:ROTARY]
    parts = (a * cos - b * sin, b * cos + a * sin, wide[..., ROTARY:])
    return torch.cat(parts, -1).to(x.dtype) @ matrix


def as_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    amax = wide.abs().amax(-1).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (wide / scale[..., None]).clamp(-448, 448).to(FP8), scale


def queries_in_pytorch(
    q: Tensor, w: Tensor, cos: Tensor, sin: Tensor, at: Tensor, matrix: Tensor, quant: str
) -> tuple[Tensor, ...]:
    x = turned(q, cos[at][:, :, None], sin[at][:, :, None], matrix)
    if quant == "fp8":
        values, scale = as_fp8(x)
        return values, w * scale * DIM**-0.5 * 0.125
    return (*quantise_mxfp4(x), w * DIM**-0.5 * 0.125)


def queries(results: Results) -> None:
    matrix = hadamard()
    cases = [(rows, heads, "fp8") for rows in (1, 64, 4096) for heads in (32, 64)]
    for rows, heads, quant in [*cases, (64, 32, "mxfp4"), (4096, 32, "mxfp4")]:
        q = torch.randn(1, rows, heads, DIM, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(1, rows, heads, device="cuda")
        given = angles(rows)
        given["positions"] = given["positions"][None]
        scales = {"softmax_scale": DIM**-0.5, "head_scale": 0.125}
        run = partial(fused_indexer_q, q, w, **given, hadamard=True, quant=quant, **scales)
        torch._dynamo.reset()
        form: Any = torch.compile(queries_in_pytorch, dynamic=False, fullgraph=True)
        peer = seconds(partial(form, q, w, *given.values(), matrix, quant))
        results.faster(f"queries {quant} {rows} rows x {heads} heads", seconds(run), peer)


def keys_in_pytorch(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    at: Tensor,
    matrix: Tensor,
    values: Tensor,
    scales: Tensor,
    slots: Tensor,
) -> None:
    """The peer writes values and scales to caches of their own, which is simpler."""
    x = torch.nn.functional.layer_norm(k.float(), (DIM,), weight, bias, 1e-6).to(k.dtype)
    fp8, scale = as_fp8(turned(x, cos[at], sin[at], matrix))
    values[slots] = fp8.view(torch.uint8)
    scales[slots] = scale


def keys(results: Results) -> None:
    matrix = hadamard()
    weight, bias = torch.randn(DIM, device="cuda"), torch.randn(DIM, device="cuda")
    for rows in (1, 64, 4096):
        k = torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(1 << 17, device="cuda")[:rows]
        values = torch.zeros(1 << 17, DIM, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(1 << 17, device="cuda")
        given = angles(rows)
        torch._dynamo.reset()
        form: Any = torch.compile(keys_in_pytorch, dynamic=False, fullgraph=True)
        rest = (*given.values(), matrix, values, scales, slots)
        peer = seconds(partial(form, k, weight, bias, *rest))
        for quant in ("fp8", "mxfp4"):
            cache = PageLayout(PAGE, DIM, quant).new_cache((1 << 17) // PAGE, "cuda")
            run = partial(
                indexer_k_quant_and_cache, k, cache, slots, norm="layer", norm_weight=weight,
                norm_bias=bias, hadamard=True, quant=quant, **given,
            )  # fmt: skip
            took = seconds(run)
            if quant == "fp8":
                results.faster(f"keys fp8 {rows} tokens", took, peer)
            else:
                results.plain(f"keys mxfp4 {rows} tokens", took, "torch.compile, fp8", peer)


def filled(pages: int, quant: str) -> Tensor:
    """A cache of real keys, a few of them repeated."""
    layout = PageLayout(PAGE, DIM, quant, stride_step("triton"))
    small = layout.new_cache(256, "cuda")
    k = torch.randn(256 * PAGE, DIM, device="cuda", dtype=torch.bfloat16)
    indexer_k_quant_and_cache(k, small, torch.arange(256 * PAGE, device="cuda"), quant=quant)
    room = torch.empty(pages * layout.page_bytes, dtype=torch.uint8, device="cuda")
    step = 256 * layout.page_bytes
    for first in range(0, room.numel(), step):
        part = room[first : first + step]
        part.copy_(small.as_strided((step,), (1,))[: part.numel()])
    return room.as_strided(
        (pages, PAGE, layout.token_bytes), (layout.page_bytes, layout.token_bytes, 1)
    )


def some_queries(rows: int, heads: int, quant: str) -> tuple[Tensor, dict[str, Any]]:
    q = torch.randn(rows, 1, heads, DIM, device="cuda")
    if quant == "fp8":
        return q.to(FP8), {}
    values, scales = quantise_mxfp4(q)
    return values, {"q_scale": scales}


def sparse_blocks(rows: int, positions: int) -> Tensor:
    """Ascending blocks int32 [rows, 1, CANDIDATES], other ones in every row."""
    draws = [
        torch.rand(16, positions // BLOCK, device="cuda").topk(CANDIDATES, -1).indices
        for _ in range(rows // 16)
    ]
    return torch.cat(draws).sort(-1).values.int()[:, None]


def paged(results: Results, rate: float) -> None:
    """One new row for each of many requests, whose pages are all over the cache."""
    for quant, heads in (("fp8", 32), ("mxfp4", 32), ("fp8", 64), ("mxfp4", 64)):
        bound, token = NEAR[quant], 132 if quant == "fp8" else 68
        for rows, positions in ((64, 1 << 17), (256, 1 << 17), (64, 1 << 20), (256, 1 << 20)):
            torch.cuda.empty_cache()
            columns = positions // PAGE
            cache = filled(rows * columns, quant)
            table = torch.randperm(rows * columns, device="cuda").view(rows, columns).int()
            q, more = some_queries(rows, heads, quant)
            w = torch.randn(rows, 1, heads, device="cuda")
            length = torch.full((rows, 1), positions, dtype=torch.int32, device="cuda")
            end = torch.full((rows, 1), COLUMNS, dtype=torch.int32, device="cuda")
            blocks = sparse_blocks(rows, positions)
            name = f"{quant} {heads} heads {rows} rows T {positions >> 10}K"
            out = torch.empty(rows, 1, COLUMNS, device="cuda")
            run = partial(
                paged_sparse_mqa_logits, q, cache, w, blocks, end, table, sparse_block=BLOCK,
                quant=quant, row_end=length, out=out, **more,
            )  # fmt: skip
            moved = rows * (COLUMNS * (token + 4) + CANDIDATES * 4 + q[0].nbytes)
            results.near(f"paged candidates {name}", seconds(run), moved, rate, bound)
            out = torch.empty(rows, 1, positions, device="cuda")
            every = partial(
                paged_mqa_logits, q, cache, w, length, table, num_positions=positions,
                quant=quant, out=out, **more,
            )  # fmt: skip
            moved = rows * (positions * (token + 4) + columns * 4 + q[0].nbytes)
            took = seconds(every)
            results.near(f"paged all {name}", took, moved, rate, bound)
            del cache, table, out, run, every


def packed(results: Results) -> None:
    """Prefill rows over keys in one piece: MXFP4, widened in the kernel, beside fp8."""
    rows, positions = 2048, 1 << 17
    k = torch.randn(positions, DIM, device="cuda", dtype=torch.bfloat16)
    low, scale = indexer_k_quant(k, quant="mxfp4")
    wide, key_scale = indexer_k_quant(k, quant="fp8")
    blocks = sparse_blocks(rows, positions).view(1, rows, CANDIDATES)
    end = torch.full((1, rows), COLUMNS, dtype=torch.int32, device="cuda")
    out = torch.empty(1, rows, COLUMNS, device="cuda")
    for heads in (32, 64):
        w = torch.randn(1, rows, heads, device="cuda")
        q8, _ = some_queries(rows, heads, "fp8")
        q4, more = some_queries(rows, heads, "mxfp4")
        q8, q4 = q8.transpose(0, 1), q4.transpose(0, 1)
        more = {name: x.transpose(0, 1) for name, x in more.items()}
        shared: dict[str, Any] = {"sparse_block": BLOCK, "out": out}
        peer = seconds(
            partial(
                sparse_mqa_logits, q8, wide[None], w, blocks, end, key_scale=key_scale[None],
                **shared,
            )
        )  # fmt: skip
        kinds: tuple[tuple[str, Tensor, dict[str, Any]], ...]
        kinds = (("mxfp4", q4, more), ("fp8", q8, {}))
        for name, q, options in kinds:
            run = partial(
                mxfp4_sparse_mqa_logits, q, low[None], scale[None], w, blocks, end,
                **options, **shared,
            )  # fmt: skip
            work = f"packed mxfp4 keys, {name} queries {rows} x {COLUMNS} {heads} heads"
            results.plain(work, seconds(run), "fp8 keys", peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/serving.py needs a CUDA GPU; none was found")
    torch.manual_seed(0)
    rate = copy_rate()
    results = Results()
    if "queries" in args.only:
        queries(results)
    if "keys" in args.only:
        keys(results)
    if "paged" in args.only:
        paged(results, rate)
    if "packed" in args.only:
        packed(results)
    Console(width=150).print(results.table)
    for miss in results.missed:
        print(f"missed: {miss}")
    if args.check and results.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
