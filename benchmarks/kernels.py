"""Time of the Triton kernels on one GPU, each beside its peer in the same run.

The consumer layer of DeepSeek-V4.1's indexer: 2,048 query rows, 32 heads of 128, 2,048 candidate
blocks of 8 among T positions, top-512; and the single-level indexer of V3.2, 64 heads, top-2,048.
Times are medians of CUDA graph replays, one after the other; those of the scorer also of a few
calls after a pause, since a card at its power limit lowers its clocks. Peers: torch.topk, the dense
form (scores of all positions, candidate mask, torch.topk) in plain PyTorch, compiled with
--compile, and DeepGEMM's dense fp8 scores where the package is installed.

    python benchmarks/kernels.py [--rows 2048] [--positions 16384 131072 1048576] [--compile]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_layer import (
    BLOCK,
    CANDIDATES,
    DIM,
    FP8,
    TOPK,
    Problem,
    Results,
    consumer,
    deep_gemm_layer,
    deep_gemm_scores,
    dense_below,
    dense_form,
    random_blocks,
)
from gpu_timing import milliseconds, milliseconds_in_turns, peak_bytes, rested_milliseconds
from rich.console import Console

import dsa_compile.kernels.triton  # noqa: F401 (fails early without Triton)
from dsa_compile.kernels.triton_choice import select_columns
from dsa_compile.kernels.triton_dense import score_rows
from dsa_compile.kernels.triton_expand import candidate_expand
from dsa_compile.kernels.triton_indexer import SCORE_BYTES, indexer_select
from dsa_compile.kernels.triton_sparse import scorer_tiles, sparse_mqa_logits
from dsa_compile.kernels.triton_tiles import columns_for_maxima, maxima_groups
from dsa_compile.kernels.triton_topk import topk_positions

PARTS = ("kernels", "layers", "single", "crossover", "decode", "pairs")
SINGLE_TOPK = 2048


def parts(results: Results, rows: int, positions: int) -> None:
    """Each kernel of a consumer layer by itself."""
    ids = random_blocks(rows, positions)
    shape: dict[str, Any] = {"num_positions": positions, "sparse_block": BLOCK}
    blocks, end = candidate_expand(ids, block_size=BLOCK, **shape)
    width = blocks.shape[2] * BLOCK
    at = f"{rows} x {width}"
    results.add(
        f"expand {rows} x {ids.shape[2]} ids",
        milliseconds(lambda: candidate_expand(ids, block_size=BLOCK, **shape)),
    )
    logits = torch.empty(1, rows, width, device="cuda")
    for dtype, heads in ((FP8, 32), (FP8, 64), (torch.bfloat16, 32), (torch.bfloat16, 64)):
        p = Problem.draw(rows, heads, positions, dtype)
        score = partial(sparse_mqa_logits, p.q, p.k, p.weights, blocks, end)
        options: dict[str, Any] = {"key_scale": p.key_scale, "out": logits}
        score = partial(score, sparse_block=BLOCK, **options)
        ms, rested = milliseconds(score), rested_milliseconds(score)
        size = rows * width * (DIM * dtype.itemsize + (4 if dtype == FP8 else 0))
        flops = 2 * rows * width * heads * DIM
        for took, how in ((ms, ""), (rested, ", after a pause")):
            rate = f"{size / took / 1e9:.1f} TB/s {flops / took / 1e9:.0f} TFLOP/s"
            results.add(f"score {str(dtype)[6:]} {heads} heads {at}{how}", took, rate)
    p = Problem.draw(rows, 32, positions, FP8)
    tile = scorer_tiles(p.q, p.k).tile
    run = columns_for_maxima(rows, width, TOPK, tile, 0)
    assert run is not None, "the scorer keeps maxima of these rows"
    maxima = torch.empty(rows, int(maxima_groups(width, run, tile)), device="cuda")
    sparse_mqa_logits(
        p.q,
        p.k,
        p.weights,
        blocks,
        end,
        sparse_block=BLOCK,
        key_scale=p.key_scale,
        out=logits,
        run=run,
        maxima=maxima,
    )
    select = partial(topk_positions, end=end, blocks=blocks, topk=TOPK, **shape)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype)
        peer = milliseconds(partial(x.topk, TOPK, dim=-1))
        for order in (True, False):
            name = f"select + remap {str(dtype)[6:]} {at} k {TOPK} {'sorted' if order else 'any'}"
            ms = milliseconds(partial(select, x, sorted=order))
            results.add(name, ms, "", "torch.topk alone", peer)
            if dtype == torch.float32:
                ms = milliseconds(partial(select, x, sorted=order, maxima=maxima))
                results.add(f"{name}, with maxima", ms, "", "torch.topk alone", peer)
    for some in (1, 16, 64):
        x, e, b = logits[:, :some], end[:, :some], blocks[:, :some]
        ms = milliseconds(partial(topk_positions, x, e, b, topk=TOPK, **shape))
        peer = milliseconds(partial(x.topk, TOPK, dim=-1))
        results.add(f"select + remap float32 {some} x {width}", ms, "", "torch.topk alone", peer)


def layers(results: Results, rows: int, positions: int, compiled: bool) -> None:
    """The whole consumer layer; the dense form in bf16 with 1,024 rows, which it has room for."""
    ids = random_blocks(rows, positions)
    p = Problem.draw(rows, 32, positions, FP8)
    ms = milliseconds(partial(consumer, p, ids))
    dense = deep_gemm_layer(p, ids)
    peer = ("DeepGEMM dense, mask, torch.topk", milliseconds(dense)) if dense else ()
    results.add(f"consumer fp8 32 heads {rows} rows T {positions}", ms, "", *peer)
    del p, dense
    few = 256 if positions > 131072 else 1024
    some, short = ids[:, :few].contiguous(), Problem.draw(few, 32, positions, torch.bfloat16)
    ms = milliseconds(partial(consumer, short, some))
    name = f"consumer bf16 32 heads {few} rows T {positions}"
    if not compiled or positions > 524288:
        results.add(name, ms)
        return
    compiled_form = torch.compile(dense_form)
    theirs = milliseconds(partial(compiled_form, short, some))
    results.add(name, ms, "", "torch.compile dense form", theirs)


def single_level(results: Results, rows: int, positions: int, dtype: torch.dtype) -> None:
    """Dense scores and selection, 64 heads."""
    p = Problem.draw(rows, 64, positions, dtype)
    name = f"{str(dtype)[6:]} 64 heads {rows} x {positions}"
    k = min(SINGLE_TOPK, positions)
    # As many rows at a time as the op itself scores.
    few = min(rows, SCORE_BYTES // (4 * positions))
    part = Problem(p.q[:, :few], p.k, p.weights[:, :few], p.key_scale)
    scores = torch.empty(1, few, positions, device="cuda")
    none: dict[str, Any] = dict.fromkeys(("row_start", "row_end", "mask", "bias"))
    score = partial(score_rows, part.q, p.k, part.weights, scores, scale=1.0)
    ms = milliseconds(partial(score, key_scale=p.key_scale, **none)) * rows / few
    rate = f"{2 * rows * positions * 64 * DIM / ms / 1e9:.0f} TFLOP/s"
    theirs = deep_gemm_scores(p)
    peer = ("DeepGEMM", milliseconds(theirs)) if theirs else ()
    results.add(f"dense score {name}", ms, rate, *peer)
    whole = partial(indexer_select, p.q, p.k, p.weights, topk=k, key_scale=p.key_scale)
    ours = milliseconds(whole)
    if theirs is None:
        results.add(f"dense score + top-{k} {name}", ours)
    else:
        # One after the other, as ours are: alone, a selection finds its scores in the cache.
        no_end = torch.full((1, rows), positions, device="cuda", dtype=torch.int32)
        own = partial(dsa_compile.kernels.triton.topk, end=no_end, topk=k)
        library = partial(torch.topk, k=k, dim=-1)

        def chained(pick: Callable[[torch.Tensor], Any]) -> Any:
            return pick(theirs())

        both = min(milliseconds(partial(chained, pick)) for pick in (library, own))
        results.add(f"dense score + top-{k} {name}", ours, "", "DeepGEMM, better top-k", both)
    small = max(1, min(rows, (4 << 30) // (positions * 64 * 6)))
    plain = Problem(p.q[:, :small], p.k, p.weights[:, :small], None)
    used = peak_bytes(whole)
    theirs_bytes = peak_bytes(partial(_plain_single, plain, k)) * rows / small
    memory = f"{used / 2**20:.0f} MiB, PyTorch {theirs_bytes / 2**20:.0f} MiB"
    results.add(f"memory of it {name}", None, memory)


def _plain_single(p: Problem, k: int) -> Any:
    q, key = (x.bfloat16() for x in (p.q, p.k))
    product = torch.einsum("bshd,btd->bsht", q, key).relu()
    return torch.einsum("bsht,bsh->bst", product.float(), p.weights).topk(k)


def decode(results: Results, positions: int, compiled: bool) -> None:
    """Few rows, as in decoding: the layer against every dense form that there is."""
    for rows in (1, 16, 64, 256):
        ids = random_blocks(rows, positions)
        for dtype in (FP8, torch.bfloat16):
            p = Problem.draw(rows, 32, positions, dtype)
            runs: dict[str, Callable[[], Any]] = {
                "ours": partial(consumer, p, ids),
                "dense form on our kernels": partial(consumer, p, ids, positions + 1),
            }
            deep = deep_gemm_layer(p, ids) if dtype == FP8 else None
            if deep:
                runs["DeepGEMM dense, mask, torch.topk"] = deep
            if compiled and dtype == torch.bfloat16 and rows * positions <= 1 << 26:
                runs["torch.compile dense form"] = partial(torch.compile(dense_form), p, ids)
            times = milliseconds_in_turns(runs)
            ours = times.pop("ours")
            best = min(times, key=lambda name: times[name])
            results.add(
                f"decode {str(dtype)[6:]} {rows} rows T {positions}", ours, "", best, times[best]
            )


def pairs(results: Results, rows: int, positions: int) -> None:
    """What adjacent rows would win at most by sharing the loads of their common candidates.

    A pair is scored as one row of twice the heads over the union of its candidates: it costs what
    the pair would, without the second result and without finding the union.
    """
    ids = random_blocks(rows, positions)
    one = Problem.draw(rows, 32, positions, FP8)
    two = Problem.draw(rows // 2, 64, positions, FP8)
    blocks, end = _expanded(ids, positions)
    alone = milliseconds(partial(_scores, one, blocks, end))
    for common in (0.9, 0.5, 0.0):
        ids = random_blocks(rows // 2, positions, int(CANDIDATES * (2 - common)))
        union, stop = _expanded(ids, positions)
        ms = milliseconds(partial(_scores, two, union, stop))
        results.add(f"score in pairs, {common:.0%} in common, at best", ms, "", "row by row", alone)


def _expanded(ids: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return candidate_expand(ids, num_positions=positions, block_size=BLOCK, sparse_block=BLOCK)


def _scores(p: Problem, blocks: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return sparse_mqa_logits(
        p.q, p.k, p.weights, blocks, end, sparse_block=BLOCK, key_scale=p.key_scale
    )


def crossovers(results: Results, rows: int) -> None:
    """Both forms of a consumer's selection, and from how many positions the sparse one wins."""
    for dtype, heads in ((FP8, 32), (FP8, 64), (torch.bfloat16, 32), (torch.bfloat16, 64)):
        name = f"{str(dtype)[6:]} {heads} heads {rows} rows"
        said = dense_below(Problem.draw(1, heads, 1024, dtype))
        points: list[tuple[int, float]] = []
        for positions in (16384, 18432, 20480, 32768):
            p, ids = Problem.draw(rows, heads, positions, dtype), random_blocks(rows, positions)
            blocks, end = candidate_expand(
                ids, num_positions=positions, block_size=BLOCK, sparse_block=BLOCK
            )
            form = partial(select_columns, p.q, p.k, p.weights, blocks, end, topk=TOPK)
            form = partial(form, sparse_block=BLOCK, key_scale=p.key_scale)
            sparse = milliseconds(partial(form, dense_below=0))
            dense = milliseconds(partial(form, dense_below=positions + 1))
            points.append((positions, dense / sparse))
            results.add(f"sparse selection {name} T {positions}", sparse, "", "dense form", dense)
        results.add(f"crossover {name}", None, f"measured {_where_one(points)}, model {said}")


def _where_one(points: list[tuple[int, float]]) -> str:
    """Where a ratio passes 1, between the points."""
    for (a, below), (b, above) in itertools.pairwise(points):
        if below <= 1 <= above:
            return f"{a + (b - a) * (1 - below) / (above - below):.0f}"
    return f"below {points[0][0]}" if points[0][1] > 1 else f"beyond {points[-1][0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument(
        "--positions", type=int, nargs="+", default=[16384, 131072, 524288, 1048576]
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the table"
    )
    parser.add_argument("--compile", action="store_true", help="time the compiled dense form too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs a CUDA GPU; none was found")
    torch.manual_seed(0)
    results = Results()
    if "kernels" in args.only:
        parts(results, args.rows, 131072)
    for positions in args.positions if "layers" in args.only else ():
        layers(results, args.rows, positions, args.compile)
    for positions in (8192, 32768, 131072, 262144) if "single" in args.only else ():
        for dtype in (FP8, torch.bfloat16):
            single_level(results, args.rows, positions, dtype)
    for positions in (32768, 131072, 1048576) if "decode" in args.only else ():
        decode(results, positions, args.compile)
    if "pairs" in args.only:
        pairs(results, args.rows, 131072)
    if "crossover" in args.only:
        crossovers(results, args.rows)
    Console(width=150).print(results.table)


if __name__ == "__main__":
    main()
