"""PyTorch's caches in a second process, with the report restored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsa_compile import Config, compile_caches
from dsa_compile.inductor_hooks import IndexerPass

# Compiles a small model and prints what the caches did and what the report says.
SCRIPT = """
import json, sys
import torch
action, bundle = sys.argv[1:3]
sys.path.insert(0, sys.argv[3])
if action == "load":
    with open(bundle, "rb") as file:
        assert torch.compiler.load_cache_artifacts(file.read()) is not None
assert "dsa_compile" not in sys.modules
from cached_model import Consumer, sample
model = Consumer().eval()
options = json.loads(sys.argv[4])
with torch.no_grad():
    run = torch.compile(model, backend="dsa", options=options or None, dynamic=False)
    picks = run(*sample())
    assert torch.equal(picks.sort().values, model(*sample()).sort().values)
import dsa_compile
from torch._dynamo.utils import counters
if action == "save":
    with open(bundle, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
report = dsa_compile.compiled_report(model)
print(json.dumps({
    "report": report.to_dict(),
    "aot": dict(counters["aot_autograd"]),
    "fx": dict(counters["inductor"]),
}))
"""

# Hardly anything but the indexer, so that there is little code to generate.
MODEL = """
import torch
from torch import nn

class Consumer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, query, keys, ids):
        scores = torch.einsum("bshd,btd->bsht", query, keys).relu()
        scores = (scores * self.weight[:, None]).sum(2)
        block = torch.arange(keys.shape[1]) // 4
        inside = (ids[..., None, :] == block[:, None]).any(-1)
        scores = scores.masked_fill(~inside, -torch.inf)
        top = scores.topk(6, dim=-1)
        return top.indices.masked_fill(top.values == -torch.inf, -1)

def sample():
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(5)])[None]
    return torch.randn(1, 5, 16, 8), torch.randn(1, 32, 8), ids
"""


def run(folder: Path, cache: str, action: str = "run", **options: Any) -> dict[str, Any]:
    model = folder / "cached_model.py"
    if not model.exists():
        model.write_text(MODEL)
    bundle = str(folder / "bundle")
    command = [sys.executable, "-c", SCRIPT, action, bundle, str(folder), json.dumps(options)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def hit(result: dict[str, Any]) -> bool:
    return result["aot"].get("autograd_cache_hit") == 1 and "fxgraph_cache_miss" not in result["fx"]


def test_a_second_process_hits_and_restores_the_report(tmp_path: Path) -> None:
    first = run(tmp_path, "one", "save")
    assert not hit(first) and first["report"]["sites"][0]["status"] == "rewritten"
    second = run(tmp_path, "one")
    assert hit(second) and second["report"] == first["report"]
    # A bundle alone does too, in a process that has not imported the package when it loads it.
    third = run(tmp_path, "two", "load")
    assert hit(third) and third["report"] == first["report"]
    # A lost report is made again and the compiled graph still used; lines are those of today.
    (kept,) = (tmp_path / "one" / "dsa_compile").glob("*/*.json")
    kept.unlink()
    (tmp_path / "cached_model.py").write_text("# one line more\n" + MODEL)
    fourth = run(tmp_path, "one")
    assert hit(fourth) and list(kept.parent.parent.glob("*/*.json"))
    where = [r["report"]["sites"][0]["where"].rpartition(":")[2] for r in (first, fourth)]
    assert int(where[1]) == int(where[0]) + 1
    assert fourth["report"]["op_counts_after"] == first["report"]["op_counts_after"]
    # Another configuration is another compilation.
    assert not hit(run(tmp_path, "one", probe_seed=1))


def test_the_identity_follows_sources_configuration_and_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dsa_compile import passes, target

    plain = compile_caches.pass_uuid(Config())
    assert plain == compile_caches.pass_uuid(Config()) == IndexerPass(Config()).uuid()
    assert plain != compile_caches.pass_uuid(Config(probe_draws=4))

    newer = {**target._installed(), "triton": "99.0"}
    with monkeypatch.context() as patch:
        patch.setattr(target.Target, "detect", lambda: target.Target("cpu", "CPU", newer))
        assert plain != compile_caches.pass_uuid(Config())

    edited = tmp_path / "passes"
    edited.mkdir()
    for file in Path(passes.__path__[0]).glob("*.py"):
        (edited / file.name).write_bytes(file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(passes, "__path__", [str(edited)])
        compile_caches.source_digest.cache_clear()
        same = compile_caches.pass_uuid(Config())
        with open(edited / "match_site.py", "a") as source:
            source.write("# an edit\n")
        compile_caches.source_digest.cache_clear()
        other = compile_caches.pass_uuid(Config())
    compile_caches.source_digest.cache_clear()
    assert plain == same != other


def test_a_failure_that_may_be_forgiven_is_in_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config as functorch

    strict, lenient = IndexerPass(Config()), IndexerPass(Config(on_error="warn"))
    assert strict.uuid() and lenient.uuid() and strict.uuid() != lenient.uuid()
    # Bundled caches ask once, before a pass could fail.
    with functorch.patch(bundled_autograd_cache=True):
        assert strict.uuid() and lenient.uuid() is None


def test_a_report_that_cannot_be_read_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compile_caches.restore("ab" * 32) is None
    path = tmp_path / "dsa_compile" / "ab" / ("ab" * 32 + ".json")
    path.parent.mkdir(parents=True)
    path.write_text('{"sites": [')
    assert compile_caches.restore("ab" * 32) is None
