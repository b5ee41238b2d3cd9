"""Time of the passes over graphs of 1, 8, 32 and 64 layers, beyond capture.

The graphs are those of examples/two_level_indexer.py: one source layer, all others consumers. The
growth is the exponent between neighbouring sizes: 1.0 is linear in the number of layers.

    python benchmarks/passes.py [--layers 1 8 32 64] [--runs 3] [--check]
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from dsa_compile.export_host import capture
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from two_level_indexer import ModelConfig, build  # noqa: E402

POSITIONS, ROWS = 1024, 64
LONGEST_SECONDS, LARGEST_GROWTH = 2.0, 1.25
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    layers: int
    nodes: int
    matched: int
    capture_seconds: float
    seconds: float

    def growth(self, smaller: "Row") -> float:
        return math.log(self.seconds / smaller.seconds) / math.log(self.layers / smaller.layers)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(layers: int, runs: int) -> Row:
    model, inputs = build(POSITIONS, ROWS, ModelConfig(layers=layers))
    with torch.inference_mode():
        capture_seconds, captured = timed(lambda: capture(model, inputs, {}))
        best, result = math.inf, None
        for _ in range(runs):
            seconds, result = timed(lambda: run_pipeline(captured.graph_module))
            best = min(best, seconds)
    assert isinstance(result, PipelineResult)
    matched = sum(site.status != "kept" for site in result.sites)
    nodes = len(captured.graph_module.graph.nodes)
    return Row(layers, nodes, matched, capture_seconds, best)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    options = parser.parse_args()

    measure(min(options.layers), 1)  # imports and caches are not the passes' own time
    rows = [measure(layers, options.runs) for layers in sorted(options.layers)]
    table = Table(title=f"the passes, torch {torch.__version__} (best of {options.runs})")
    for column in ("layers", "nodes", "matched", "capture", "passes", "a layer", "growth"):
        table.add_column(column, justify="right")
    for smaller, row in zip([None, *rows], rows, strict=False):
        table.add_row(
            str(row.layers),
            str(row.nodes),
            str(row.matched),
            f"{row.capture_seconds:.2f} s",
            f"{row.seconds:.3f} s",
            f"{1000 * row.seconds / row.layers:.1f} ms",
            f"{row.growth(smaller):.2f}" if smaller else "",
        )
    Console().print(table)

    missed = [f"{r.layers} layers: {r.matched} matched" for r in rows if r.matched != r.layers]
    if options.check:
        if rows[-1].seconds > LONGEST_SECONDS:
            missed.append(f"{rows[-1].layers} layers took {rows[-1].seconds:.2f} s")
        if len(rows) > 2 and rows[-1].growth(rows[1]) > LARGEST_GROWTH:
            missed.append(f"growth {rows[-1].growth(rows[1]):.2f} is more than near-linear")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
