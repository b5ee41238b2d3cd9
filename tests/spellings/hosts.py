"""Optimising a composed model in either host, and what its report must say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dsa_compile

from .masks import INF
from .model import BLOCK, HEAD_DIM, HEADS, TOPK, Indexer, Spelling
from .oracle import Case

HOSTS = ("exported", "compiled")
# Capture is what takes time here. Where the host hardly matters the two take turns, unless asked.
EVERY_HOST = os.environ.get("DSA_EVERY_HOST", "") not in ("", "0")


def hosts_of(turn: int, both: bool = False) -> tuple[str, ...]:
    """The hosts that the ``turn``-th of many cases runs in."""
    return HOSTS if both or EVERY_HOST else (HOSTS[turn % 2],)


@dataclass(frozen=True)
class Run:
    """An optimised model after its first call."""

    module: Any
    outputs: Any

    @property
    def sites(self) -> tuple[dsa_compile.Site, ...]:
        return self.module.report.sites


def fresh(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies: capture may leave marks of dynamic sizes on the tensors it is given."""
    return tuple(x.clone() for x in inputs)


def run(model: nn.Module, inputs: Sequence[Tensor], host: str, dynamic: bool = False) -> Run:
    """Optimise with example inputs (exported) or at the first call (compiled), and call."""
    model.eval()
    config = {"dynamic": dynamic}
    if host == "exported":
        module = dsa_compile.optimize(model, example_inputs=fresh(inputs), config=config)
    else:
        torch._dynamo.reset()
        module = dsa_compile.optimize(model, config=config)
    with torch.no_grad():
        return Run(module, module(*fresh(inputs)))


def run_case(case: Case, host: str, dynamic: bool = False) -> Run:
    return run(case.model, case.inputs, host, dynamic)


def describe(sites: Sequence[dsa_compile.Site]) -> str:
    return "; ".join(f"{s.kind} {s.status}: {s.reason} {s.counterexample or ''}" for s in sites)


def check_site(site: dsa_compile.Site, kind: str, spelling: Spelling) -> None:
    """A matched site of a composed model."""
    status = "rewritten" if kind == "consumer" else "fused"
    assert (site.kind, site.status) == (kind, status), describe([site])
    assert (site.heads, site.head_dim, site.k) == (HEADS, HEAD_DIM, TOPK)
    assert site.block_size == (None if kind == "single" else BLOCK)
    assert site.provider == "cpu" and site.reason is None and site.counterexample is None
    path, _, line = site.where.rpartition(":")
    assert path.endswith(".py") and line.isdigit(), site.where


def check_sites(sites: Sequence[dsa_compile.Site], spellings: Sequence[Spelling]) -> None:
    """One site a layer, in order: a source and its consumers, or a single-level indexer."""
    assert len(sites) == len(spellings), describe(sites)
    kinds = ["source" if len(spellings) > 1 else "single", *["consumer"] * (len(spellings) - 1)]
    for site, kind, spelling in zip(sites, kinds, spellings, strict=True):
        check_site(site, kind, spelling)


def assert_as_good(model: Indexer, x: Tensor, got: Any, want: Any) -> None:
    """Equal scores of the picks, layer by layer: exact ties (all relus off) may fall either way."""
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        scores = model.score(x, model.keys(x, None), layer)
        picked = [
            scores.gather(-1, i[0].clamp(min=0)).masked_fill(i[0] < 0, -INF).sort(-1).values
            for i in (a, b)
        ]
        torch.testing.assert_close(*picked)
