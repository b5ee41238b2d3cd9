"""The example and benchmark scripts run, at small sizes, and say what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from measure import MIB, cost  # noqa: E402

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    env = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@needs_proc
def test_cost_counts_memory_that_a_call_frees_again() -> None:
    peak = cost(lambda: float(torch.ones(64 * MIB // 4).sum())).peak_bytes
    assert peak is not None
    assert 60 * MIB <= peak <= 128 * MIB


@needs_proc
def test_cost_leaves_out_what_was_there_before() -> None:
    there = torch.ones(64 * MIB // 4)
    peak = cost(lambda: float(there.sum())).peak_bytes
    assert peak is not None and peak <= 16 * MIB


def test_demo_prints_report_agreement_and_costs() -> None:
    sizes = ("--positions", "2048", "--rows", "8", "--layers", "2")
    out = run("examples/two_level_indexer.py", *sizes)
    for word in ("consumer", "source", "rewritten", "fused", "original", "optimized", "faster"):
        assert word in out, f"{word} is not in\n{out}"


def test_hugging_face_model_is_matched_and_agrees() -> None:
    name = "GlmMoeDsaForCausalLM"
    out = run("examples/huggingface.py", "--prompt", "40", "--steps", "3", "--only", name)
    assert name in out and "greedy tokens of 2 prompts equal: True" in out


def test_layer_benchmark_compares_the_picks() -> None:
    sizes = ("--positions", "1024", "--rows", "8", "--runs", "1", "--dtypes", "float32")
    out = run("benchmarks/consumer_layer.py", *sizes, "--variants", "dense", "optimized")
    assert out.count("8 / 8") == 2


def test_pass_benchmark_matches_every_layer() -> None:
    out = run("benchmarks/passes.py", "--layers", "1", "3", "--runs", "1")
    assert "growth" in out
