"""Log lines by ``TORCH_LOGS``, and the report in PyTorch's structured trace."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsa_compile
from dsa_compile import Report, Site
from dsa_compile.logs import site_line

from .models import TwoLevel, inputs

SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import models, dsa_compile
dsa_compile.optimize(models.TwoLevel().eval(), config={"dynamic": False})(models.inputs())
"""


def test_a_site_is_one_line() -> None:
    site = Site("consumer", "rewritten", "model.py:7", 32, 128, 8, 512, "cpu", notes=("a note",))
    assert site_line(site) == (
        "model.py:7: consumer rewritten, 32 x 128, blocks of 8, k = 512: a note"
    )
    kept = Site("single", "kept", "router.py:1", reason="no relu", counterexample="row 3")
    assert site_line(kept) == "router.py:1: single kept: no relu; row 3"


def test_sites_at_info_and_graphs_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoLevel().eval()
    with caplog.at_level(logging.INFO, logger="dsa_compile"):
        dsa_compile.optimize(model, example_inputs=(inputs(),), config={"dynamic": False})
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 2 and "source fused" in lines[0] and "consumer rewritten" in lines[1]
    assert not any("graph after" in r.getMessage() for r in caplog.records)

    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="dsa_compile"):
        dsa_compile.optimize(model, example_inputs=(inputs(),), config={"dynamic": False})
    graphs = [r.getMessage() for r in caplog.records if r.getMessage().startswith("graph ")]
    names = [re.match(r"graph (before the passes|after \w+):", g)[0] for g in graphs]  # type: ignore[index]
    assert names[:2] == ["graph before the passes:", "graph after normalize_graph:"]
    assert "graph after match_indexers:" in names and "graph after insert_graph_breaks:" in names
    assert "aten.topk" in graphs[0] and "dsa_cpu.indexer_publish" in graphs[-1]


def test_the_environment_turns_logs_and_the_trace_on(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "TORCH_LOGS": "+dsa_compile",
        "TORCH_TRACE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"I\d{4} .*models.py:\d+: consumer rewritten", done.stderr)
    assert re.search(r"V?D?\d{4} .*graph after expand_candidates:", done.stderr)
    (trace,) = tmp_path.glob("*.log")
    lines = trace.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"name": "dsa_compile_0"' in line]
    assert '"encoding": "json"' in lines[at]
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    report = Report.from_json("\n".join(payload))
    assert [site.status for site in report.sites] == ["fused", "rewritten"]
    assert json.loads("\n".join(payload))["provider"] == "cpu"
    assert torch._logging is not None
