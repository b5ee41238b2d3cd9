"""Options, recorder and result that every pass takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.fx as fx

from dsa_compile.passes.emit_nodes import Emission
from dsa_compile.passes.sites import Site, SitePair


@dataclass(frozen=True)
class MatchOptions:
    """How indexers are proven.

    Attributes:
        probe_memory_bytes: most memory that one probe's tensors may take together; a site whose
            static sizes need more is kept, with that reason.
        seed: seed of the probes' random numbers.
        draws: number of random probes that a proposal must pass.
    """

    probe_memory_bytes: int = 2 << 30
    seed: int = 0
    draws: int = 3


@dataclass
class Recorder:
    """Collects the sites of one pipeline run."""

    sites: list[Site] = field(default_factory=list)
    pairs: list[SitePair] = field(default_factory=list)


Crossover = Callable[[int, int, int, int], int]
"""Candidate columns, heads, head dim and bytes of a key's element -> the number of positions from
which scoring the candidates alone is the cheaper form."""


@dataclass(frozen=True)
class PassContext:
    """What a pass may read besides the graph: options, the provider's name, and what one run
    of the passes collects and remembers."""

    options: MatchOptions = field(default_factory=MatchOptions)
    provider: str = "cpu"
    recorder: Recorder = field(default_factory=Recorder)
    emission: Emission = field(default_factory=Emission)
    crossover: Crossover | None = None


@dataclass(frozen=True)
class PassResult:
    """A pass's graph module and whether it changed anything."""

    graph_module: fx.GraphModule
    changed: bool
