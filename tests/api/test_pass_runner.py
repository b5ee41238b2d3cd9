"""One run of the passes: what a host adds to them fails as they do."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import dsa_compile
from dsa_compile import PassError, SlowPathWarning
from dsa_compile.capture import export_graph
from dsa_compile.pass_runner import PassSettings, run_passes

from .models import NoIndexer, TwoLevel, inputs


def settings(on_error: str) -> PassSettings:
    config = dsa_compile.Config(on_error=on_error)
    return PassSettings.of(config, frozenset({"cpu"}), torch.device("cpu"))


def broken(graph_module: fx.GraphModule) -> None:
    raise NotImplementedError("a constant of its own")


def test_a_fault_of_the_hosts_lowering_is_one_of_a_pass() -> None:
    graph = export_graph(TwoLevel().eval(), (inputs(),), dynamic=False)
    with pytest.raises(PassError, match=r"pass broken failed.*a constant.*\(graphs in .*broken"):
        run_passes(graph, settings("raise"), lower=broken)
    with pytest.warns(SlowPathWarning, match="pass broken failed.*runs as it was"):
        run = run_passes(graph, settings("warn"), lower=broken)
    assert run.failed and run.result.graph_module is graph and not run.rewritten


def test_a_graph_that_stays_as_it_is_needs_no_lowering() -> None:
    graph = export_graph(NoIndexer().eval(), (inputs(),), dynamic=False)
    run = run_passes(graph, settings("raise"), lower=broken)
    assert not run.failed and not run.rewritten
