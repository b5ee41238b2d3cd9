"""Time of the Triton kernels on one GPU, each beside its peer in the same run.

The consumer layer of DeepSeek-V4.1's indexer: 2,048 query rows, 32 heads of 128, 2,048 candidate
blocks of 8 among T positions, top-512; and the single-level indexer of V3.2, 64 heads, top-2,048.
Times are medians of CUDA graph replays. Peers: torch.topk, the dense form (scores of all positions,
candidate mask, torch.topk) in plain PyTorch, compiled with --compile, and DeepGEMM's dense fp8
scores where the package is installed.

    python benchmarks/kernels.py [--rows 2048] [--positions 16384 131072 1048576] [--compile]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dsa_compile.kernels.triton  # noqa: F401 (fails early without Triton)
from dsa_compile.cost import CEILINGS, crossover
from dsa_compile.kernels import deep_package
from dsa_compile.kernels.deep_dense import dense_scores
from dsa_compile.kernels.triton_choice import select_columns
from dsa_compile.kernels.triton_dense import score_rows
from dsa_compile.kernels.triton_expand import candidate_expand
from dsa_compile.kernels.triton_indexer import indexer_select
from dsa_compile.kernels.triton_sparse import sparse_mqa_logits
from dsa_compile.kernels.triton_topk import topk_positions

FP8 = torch.float8_e4m3fn
DIM, BLOCK, CANDIDATES, TOPK = 128, 8, 2048, 512
PARTS = ("kernels", "layers", "single", "crossover")


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call replayed as a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    with torch.no_grad():
        return float(do_bench_cudagraph(run, rep=20, return_mode="median"))


@dataclass(frozen=True)
class Problem:
    """Operands of one layer: q [1, S, H, D], k [1, T, D], weights fp32, key scales for fp8."""

    q: Tensor
    k: Tensor
    weights: Tensor
    key_scale: Tensor | None

    @staticmethod
    def draw(rows: int, heads: int, positions: int, dtype: torch.dtype) -> Problem:
        scale = torch.rand(1, positions, device="cuda") if dtype == FP8 else None
        return Problem(
            torch.randn(1, rows, heads, DIM, device="cuda").to(dtype),
            torch.randn(1, positions, DIM, device="cuda").to(dtype),
            torch.randn(1, rows, heads, device="cuda"),
            scale,
        )


def random_blocks(rows: int, positions: int) -> Tensor:
    """Published ids [1, S, C] int32 in no order, other ones in every row."""
    total = positions // BLOCK
    count = min(CANDIDATES, total)
    draws = [torch.rand(256, total, device="cuda").topk(count).indices for _ in range(rows // 256)]
    return torch.cat(draws)[None].int()


def dense_form(p: Problem, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A consumer layer as models write it: every position scored, then masked."""
    product = torch.einsum("bshd,btd->bsht", p.q, p.k).relu()
    scores = torch.einsum("bsht,bsh->bst", product.float(), p.weights)
    return masked_topk(scores, ids)


def masked_topk(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The best positions [1, S, k] of scores [1, S, T] inside candidate blocks."""
    positions = scores.shape[-1]
    keep = torch.zeros(*ids.shape[:2], positions // BLOCK, dtype=torch.bool, device="cuda")
    keep = keep.scatter(-1, ids.long(), True).repeat_interleave(BLOCK, -1)
    values, indices = scores.masked_fill(~keep, -torch.inf).topk(TOPK)
    return values, indices


def consumer(p: Problem, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same layer on the kernels."""
    shape: dict[str, Any] = {"num_positions": p.k.shape[1], "sparse_block": BLOCK}
    blocks, end = candidate_expand(ids, block_size=BLOCK, **shape)
    logits = sparse_mqa_logits(
        p.q, p.k, p.weights, blocks, end, sparse_block=BLOCK, key_scale=p.key_scale
    )
    return topk_positions(logits, end, blocks, topk=TOPK, **shape)


class Results:
    """Rows of the table, printed as they come."""

    def __init__(self) -> None:
        self.table = Table(title=torch.cuda.get_device_name())
        for name in ("work", "ms", "rate", "peer", "peer ms", "times faster"):
            self.table.add_column(name, justify="left" if name in ("work", "peer") else "right")

    def add(
        self,
        work: str,
        ms: float | None,
        rate: str = "",
        peer: str = "",
        peer_ms: float | None = None,
    ) -> None:
        faster = "" if peer_ms is None or ms is None else f"{peer_ms / ms:.2f}"
        theirs = "" if peer_ms is None else f"{peer_ms:.4f}"
        self.table.add_row(work, "" if ms is None else f"{ms:.4f}", rate, peer, theirs, faster)


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
        ms = milliseconds(partial(score, sparse_block=BLOCK, **options))
        size = rows * width * (DIM * dtype.itemsize + (4 if dtype == FP8 else 0))
        flops = 2 * rows * width * heads * DIM
        rate = f"{size / ms / 1e9:.1f} TB/s {flops / ms / 1e9:.0f} TFLOP/s"
        results.add(f"score {str(dtype)[6:]} {heads} heads {at}", ms, rate)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype)
        peer = milliseconds(partial(x.topk, TOPK, dim=-1))
        select = partial(topk_positions, x, end, blocks, topk=TOPK, **shape)
        for order in (True, False):
            name = f"select + remap {str(dtype)[6:]} {at} k {TOPK} {'sorted' if order else 'any'}"
            ms = milliseconds(partial(select, sorted=order))
            results.add(name, ms, "", "torch.topk alone", peer)
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


def single_level(results: Results, rows: int, positions: int) -> None:
    """Dense scores and selection, 64 heads, fp8."""
    p = Problem.draw(rows, 64, positions, FP8)
    scores = torch.empty(1, rows, positions, device="cuda")
    none: dict[str, Any] = dict.fromkeys(("row_start", "row_end", "mask", "bias"))
    score = partial(score_rows, p.q, p.k, p.weights, scores, scale=1.0, key_scale=p.key_scale)
    ms = milliseconds(partial(score, **none))
    rate = f"{2 * rows * positions * 64 * DIM / ms / 1e9:.0f} TFLOP/s"
    theirs = deep_gemm_scores(p)
    peer = ("DeepGEMM", milliseconds(theirs)) if theirs else ()
    results.add(f"dense score fp8 64 heads {rows} x {positions}", ms, rate, *peer)
    kwargs: dict[str, Any] = {"topk": min(2048, positions), "key_scale": p.key_scale}
    ms = milliseconds(partial(indexer_select, p.q, p.k, p.weights, **kwargs))
    both = None if theirs is None else partial(_scores_and_topk, theirs, kwargs["topk"])
    peer = ("DeepGEMM, torch.topk", milliseconds(both)) if both else ()
    results.add(f"dense score + top-2048 fp8 64 heads {rows} x {positions}", ms, "", *peer)


def _scores_and_topk(score: Callable[[], Tensor], k: int) -> Any:
    return score().topk(k, dim=-1)


def deep_gemm_scores(p: Problem) -> Callable[[], Tensor] | None:
    """DeepGEMM's dense fp8 scores of the same problem, where it is installed."""
    package = deep_package.find()
    if not isinstance(package, deep_package.DeepGemm):
        return None

    def score() -> Tensor:
        return dense_scores(p.q, p.k, p.weights, key_scale=p.key_scale, package=package).logits

    return score


def deep_gemm_layer(p: Problem, ids: Tensor) -> Callable[[], Any] | None:
    """DeepGEMM's dense scores, the candidate mask and torch.topk."""
    score = deep_gemm_scores(p)
    return None if score is None else lambda: masked_topk(score(), ids)


def crossovers(results: Results, rows: int) -> None:
    """Both forms of a consumer's selection, and from how many positions the sparse one wins."""
    for dtype, heads in ((FP8, 32), (FP8, 64), (torch.bfloat16, 32), (torch.bfloat16, 64)):
        name = f"{str(dtype)[6:]} {heads} heads {rows} rows"
        size = {"heads": heads, "head_dim": DIM, "itemsize": dtype.itemsize}
        said = crossover(CEILINGS["sm90"], columns=CANDIDATES * BLOCK, **size)
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
    for positions in (8192, 32768, 131072) if "single" in args.only else ():
        single_level(results, args.rows, positions)
    if "crossover" in args.only:
        crossovers(results, args.rows)
    Console(width=150).print(results.table)


if __name__ == "__main__":
    main()
