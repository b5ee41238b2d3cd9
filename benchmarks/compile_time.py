"""Compile time of backend="dsa" against backend="inductor" on the same models, in one table.

Each time is the median of `--runs` first calls with empty caches, in one process that has compiled
before, so that neither pays for what PyTorch loads once. The two backends take turns.

    python benchmarks/compile_time.py [--device cuda] [--runs 3] [--check]

With `--check` it exits 1 where the backend takes over 10 % more than Inductor alone.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import huggingface  # noqa: E402
from two_level_indexer import ModelConfig, build  # noqa: E402

BACKENDS = ("inductor", "dsa")
MOST = 1.10
Case = Callable[[str], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def two_level(device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = ModelConfig(index_heads=16, index_dim=64, index_topk=64, candidate_blocks=64)
    model, inputs = build(2048, 8, config)
    return model.to(device), tuple(t.to(device) for t in inputs), {}


def hugging_face(name: str) -> Case:
    def case(device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(0)
        model, _ = huggingface.CASES[name]()
        ids = torch.randint(huggingface.SIZES["vocab_size"], (2, 96), device=device)
        return nn.Module.to(model, device), (), {"input_ids": ids, "use_cache": False}

    return case


CASES: dict[str, Case] = {
    "two-level example": two_level,
    **{name: hugging_face(name) for name in huggingface.CASES},
}


def seconds(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str) -> float:
    """Of a first call with empty caches, less that of a second one."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        run = torch.compile(model, backend=backend)
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            run(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return times[0] - times[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 100)
    shown = Table(title=f"seconds to compile, on {options.device}")
    for column in ("model", *BACKENDS, "dsa against inductor"):
        shown.add_column(column, justify="right" if column != "model" else "left")
    slow = False
    for name in [options.only] if options.only else CASES:
        model, args, kwargs = CASES[name](options.device)
        for backend in BACKENDS:
            seconds(model, args, kwargs, backend)
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for _ in range(options.runs):
            for backend in BACKENDS:
                times[backend].append(seconds(model, args, kwargs, backend))
        plain, ours = (median(times[backend]) for backend in BACKENDS)
        shown.add_row(name, f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f} x")
        slow |= ours > MOST * plain
    console.print(shown)
    if options.check and slow:
        print(f"backend='dsa' takes over {MOST:.2f} x of Inductor's time", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
