"""Options, recorder and result that every pass takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from dsa_compile.passes.adapter import Adapter
from dsa_compile.passes.bind_sizes import SizeBinder
from dsa_compile.passes.emit_nodes import Emission
from dsa_compile.passes.sites import Site, SitePair


@dataclass(frozen=True)
class MatchOptions:
    """How indexers are proven.

    Attributes:
        probe_memory_bytes: most memory that one probe's tensors may take together; a site whose
            static sizes need more, and which no smaller ones stand for, is kept, with that reason.
        seed: seed of the probes' random numbers.
        draws: number of random probes that a proposal must pass.
    """

    probe_memory_bytes: int = 2 << 30
    seed: int = 0
    draws: int = 3


@dataclass
class Recorder:
    """Collects the sites of one pipeline run, and the ops that no CUDA graph may capture."""

    sites: list[Site] = field(default_factory=list)
    pairs: list[SitePair] = field(default_factory=list)
    breaks: dict[str, str] = field(default_factory=dict)


Crossover = Callable[[int, int, int, int], int]
"""Candidate columns, heads, head dim and bytes of a key's element -> the number of positions from
which scoring the candidates alone is the cheaper form."""


@dataclass(frozen=True)
class PassContext:
    """What a pass may read besides the graph: options, the provider's name, the ops that no CUDA
    graph may capture (name to reason), the adapters of opaque ops by name, and what one run of the
    passes collects and remembers (among it the opaque calls that were taken out)."""

    options: MatchOptions = field(default_factory=MatchOptions)
    provider: str = "cpu"
    recorder: Recorder = field(default_factory=Recorder)
    emission: Emission = field(default_factory=Emission)
    binder: SizeBinder = field(default_factory=SizeBinder)
    crossover: Crossover | None = None
    uncapturable: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    entered: list[Any] = field(default_factory=list)
    precision: str = "preserve"


class UnservedError(Exception):
    """What was asked for cannot be served for this graph.

    Attributes:
        needs: what is unmet, and its mend.
    """

    def __init__(self, needs: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(what for what, _ in needs))
        self.needs = tuple(needs)


class StageError(Exception):
    """A pass raised; its exception is the cause.

    Attributes:
        stage: name of the pass.
        graph_module: the graph as the pass left it, possibly half changed.
    """

    def __init__(self, stage: str, fault: Exception, graph_module: fx.GraphModule) -> None:
        super().__init__(f"pass {stage} failed: {fault}")
        self.stage = stage
        self.graph_module = graph_module


@dataclass(frozen=True)
class PassResult:
    """A pass's graph module and whether it changed anything."""

    graph_module: fx.GraphModule
    changed: bool
