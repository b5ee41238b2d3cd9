"""backend="dsa" on the Triton kernels, also where PyTorch's caches give back a graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
import torch, dsa_compile
import conftest
from pass_models import TwoLevel, hidden, same_sets
from torch._dynamo.utils import counters
from dsa_compile import pass_runner
from dsa_compile.cost import crossover_on
from dsa_compile.target import Target
pass_runner.crossover_on = lambda *args: crossover_on(Target("sm90"), "triton")
device = "cuda" if torch.cuda.is_available() else "cpu"
model, x = TwoLevel().eval().to(device), hidden(9, 1).to(device)
with torch.no_grad():
    run = torch.compile(model, backend="dsa", options={"provider": "triton", "require_match": 2})
    assert same_sets(run(x), model(x))
report = dsa_compile.compiled_report(model)
assert report.op_counts_after["dsa_triton.select_columns.default"] == 1, report
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_finds_the_graph_and_the_ops_that_it_calls(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "passes")])
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for hits in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.split() == [hits]
