"""Time and peak memory of one consumer layer: dense, dense compiled, and optimised.

The layer is the indexer of examples/two_level_indexer.py (32 heads of 128, 2,048 candidate blocks
of 8, top-512) given published block ids. Every variant runs in a process of its own; see
examples/measure.py for what peak memory means. The picks of each are compared with the dense
layer's, row by row.

    python benchmarks/consumer_layer.py [--positions 16384 65536 262144] [--dtypes float32 bfloat16]
    python benchmarks/consumer_layer.py --device cuda

On a GPU all variants run in this process, replayed from CUDA graphs (see gpu_timing.py).
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dsa_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import Cost, cost, in_own_process, report_to_parent  # noqa: E402
from two_level_indexer import Indexer, ModelConfig  # noqa: E402

ROWS = {
    "cpu": {16384: 256, 65536: 256, 262144: 64},
    "cuda": {16384: 1024, 32768: 1024, 65536: 1024, 131072: 1024, 524288: 256},
}
DTYPES = {"cpu": ["float32", "bfloat16"], "cuda": ["bfloat16"]}
VARIANTS = ("dense", "compiled", "optimized")


@dataclass(frozen=True)
class Case:
    positions: int
    rows: int
    dtype: str
    device: str = "cpu"


class ConsumerLayer(nn.Module):
    """x [1, S, hidden], q_latent [1, S, q_rank], keys [1, T, 128], block_ids int32 [1, S, C]
    (-1 where unused) -> selected positions int64 [1, S, k] (-1 where a row found nothing)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.block_size, self.topk = config.block_size, config.index_topk
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, q_latent: Tensor, keys: Tensor, block_ids: Tensor) -> Tensor:
        positions = keys.shape[1]
        blocks = (positions + self.block_size - 1) // self.block_size
        spare = block_ids.long().masked_fill(block_ids < 0, blocks)
        keep = torch.zeros(*spare.shape[:2], blocks + 1, dtype=torch.bool, device=x.device)
        keep = keep.scatter_(-1, spare, True)[..., :blocks]
        candidates = keep.repeat_interleave(self.block_size, dim=-1)[..., :positions]
        logits, _ = self.indexer.score(x, q_latent, keys)
        logits = logits.masked_fill(~candidates, float("-inf"))
        top = logits.topk(min(self.topk, positions), dim=-1)
        # By score: how many of the given ids are in use is not known here.
        return top.indices.masked_fill(top.values == float("-inf"), -1)


def build(case: Case) -> tuple[ConsumerLayer, tuple[Tensor, ...]]:
    with torch.device(case.device):
        return _build(case)


def _build(case: Case) -> tuple[ConsumerLayer, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    # A GPU multiplies fp32 many times slower than bf16: no model made for one would ask for it.
    config = ModelConfig(wide_products=case.device == "cpu")
    dtype = getattr(torch, case.dtype)
    layer = ConsumerLayer(config).eval().to(case.device, dtype)
    blocks = -(-case.positions // config.block_size)
    count = min(config.candidate_blocks, blocks)
    newest = torch.arange(case.positions - case.rows, case.positions) // config.block_size
    # Each row's candidates are drawn from the blocks it sees, its newest block always among them.
    draw = torch.rand(case.rows, blocks)
    draw = draw.masked_fill(torch.arange(blocks) > newest[:, None], -1.0)
    draw = draw.scatter(1, newest[:, None], 2.0)
    top = draw.topk(count, dim=1)
    ids = top.indices.masked_fill(top.values < 0, -1).to(torch.int32)[None]
    keys = F.rms_norm(torch.randn(1, case.positions, config.index_dim), (config.index_dim,))
    inputs = (
        torch.randn(1, case.rows, config.hidden).to(dtype),
        torch.randn(1, case.rows, config.q_rank).to(dtype),
        keys.to(dtype),
        ids,
    )
    return layer, inputs


def prepare(variant: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    if variant == "compiled":
        return torch.compile(layer, dynamic=False, fullgraph=True)
    if variant == "optimized":
        config = dsa_compile.Config(require_match=1)
        return dsa_compile.optimize(layer, example_inputs=inputs, config=config)
    return layer


def measure_child(variant: str, case: Case, runs: int, save: str) -> None:
    layer, inputs = build(case)
    with torch.inference_mode():
        call = prepare(variant, layer, inputs)
        torch.save(call(*inputs), save)  # the first call compiles; it is not timed
        report_to_parent(cost(lambda: call(*inputs), runs=runs))


def measure_on_gpu(case: Case, variants: list[str], runs: int) -> dict[str, tuple[Cost, Tensor]]:
    from gpu_timing import gpu_cost

    layer, inputs = build(case)
    results = {}
    with torch.inference_mode():
        for variant in variants:
            call = prepare(variant, layer, inputs)
            picks = call(*inputs)
            cost = gpu_cost(partial(call, *inputs), runs=10 * runs)
            results[variant] = (cost, picks)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    return results


def equal_rows(picks: Tensor, dense: Tensor) -> str:
    same = (picks.sort(-1).values == dense.sort(-1).values).all(-1)
    return f"{int(same.sum())} / {same.numel()}"


def in_common(picks: Tensor, dense: Tensor) -> str:
    """Share of the dense picks that are picked here, too: rounding moves those near the cut."""
    pairs = zip(picks.flatten(0, -2).tolist(), dense.flatten(0, -2).tolist(), strict=True)
    shares = [len(set(a) & set(b)) / max(1, len(set(b))) for a, b in pairs]
    return f"{100 * sum(shares) / len(shares):.1f} %"


def measure_case(case: Case, variants: list[str], runs: int) -> dict[str, tuple[Cost, Tensor]]:
    if case.device == "cuda":
        return measure_on_gpu(case, variants, runs)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            save = str(Path(folder) / variant)
            arguments = ["--child", variant, "--save", save, "--runs", str(runs)]
            arguments += ["--positions", str(case.positions), "--rows", str(case.rows)]
            result = in_own_process(__file__, [*arguments, "--dtypes", case.dtype])
            results[variant] = (result, torch.load(save))
    return results


def failures(case: Case, results: dict[str, tuple[Cost, Tensor]]) -> list[str]:
    """What --check asks: the optimised layer against the dense one under torch.compile."""
    ours, dense = results["optimized"][0], results["compiled"][0]
    found = []
    if case.positions >= 262144:
        if ours.seconds * 5 > dense.seconds:
            found.append(f"{case}: less than 5 times faster")
        if ours.peak_bytes and dense.peak_bytes and ours.peak_bytes * 10 > dense.peak_bytes:
            found.append(f"{case}: more than a tenth of the memory")
    if case.positions <= 16384 and ours.seconds > 1.03 * dense.seconds:
        found.append(f"{case}: slower than the dense form")
    return found


def add_rows(table: Table, case: Case, results: dict[str, tuple[Cost, Tensor]]) -> None:
    base = results.get("compiled", (None, None))[0]
    for variant, (result, picks) in results.items():
        faster = f"{base.seconds / result.seconds:.2f} x" if base else ""
        less = ""
        if base and base.peak_bytes and result.peak_bytes:
            less = f"{result.peak_bytes / base.peak_bytes:.2f}"
        equal = common = ""
        if "dense" in results:
            equal = equal_rows(picks, results["dense"][1])
            common = in_common(picks, results["dense"][1])
        table.add_row(
            f"{case.positions:,}",
            str(case.rows),
            case.dtype,
            variant,
            f"{1000 * result.seconds:,.3f} ms",
            result.peak,
            faster,
            less,
            equal,
            common,
            end_section=variant == list(results)[-1],
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--positions", type=int, nargs="+", help="default: a range that fits the device"
    )
    parser.add_argument("--rows", type=int, help="query rows (default: by positions)")
    parser.add_argument("--device", choices=tuple(ROWS), default="cpu")
    parser.add_argument("--dtypes", nargs="+", help="default: float32 and bfloat16, or bfloat16")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    options = parser.parse_args()
    usual = ROWS[options.device]
    cases = [
        Case(positions, options.rows or usual.get(positions, 256), dtype, options.device)
        for positions in options.positions or list(usual)
        for dtype in options.dtypes or DTYPES[options.device]
    ]
    if options.child:
        measure_child(options.child, cases[0], options.runs, options.save)
        return 0

    where = f"{torch.get_num_threads()} CPU threads"
    if options.device == "cuda":
        where = f"{torch.cuda.get_device_name()}, graph replays"
    table = Table(title=f"one consumer layer, torch {torch.__version__}, {where}")
    for column in ("positions", "rows", "dtype", "variant"):
        table.add_column(column)
    for column in ("time", "peak", "against compiled", "memory", "rows equal", "picks in common"):
        table.add_column(column, justify="right")
    missed: list[str] = []
    for case in cases:
        results = measure_case(case, options.variants, options.runs)
        add_rows(table, case, results)
        if options.check:
            missed += failures(case, results)
    Console(width=130).print(table)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
