"""The passes as hooks of Inductor, beside what is in the hooks already."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from dsa_compile.compile_caches import keeps_failures, pass_uuid
from dsa_compile.compiled_reports import merged
from dsa_compile.config import Config, as_config
from dsa_compile.errors import ConfigError
from dsa_compile.inductor_lowering import (
    decompose_emitted,
    register_tagged,
    tag_uncapturable,
)
from dsa_compile.kernels.providers import known_uncapturable, load
from dsa_compile.logs import log_sites
from dsa_compile.pass_runner import PassRun, PassSettings, run_passes
from dsa_compile.passes.graph_tools import value
from dsa_compile.report import Report

HOOK = "joint_custom_pre_pass"
"""Where the passes run: on the functional graph as AOTAutograd leaves it, before Inductor's own
patterns respell it."""
PARTITIONED = "custom_should_partition_ops"


class IndexerPass(CustomGraphPass):
    """Finds, proves and rewrites the indexers of each inference graph that Inductor compiles.

    A graph with a backward part is left alone. One object may serve many graphs.

    Attributes:
        reports: one a graph, in the order of compilation.
    """

    def __init__(self, config: Config, settings: PassSettings | None = None) -> None:
        self.config = config
        self.reports: list[Report] = []
        self._settings = settings
        self._failed = False

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in its module, which gets a new ``graph``.

        Raises:
            PassError: a pass failed, and ``on_error`` is ``"raise"``.
            ProviderError: the configuration asks for what cannot be served on the graph's device.
        """
        module = graph.owning_module
        assert isinstance(module, fx.GraphModule)
        if any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder")):
            self.leave(graph)
            return
        settings = self._settings or PassSettings.of(self.config, *devices_in(graph))
        run = run_passes(module, settings, lower=decompose_emitted)
        self._failed |= run.failed
        if not run.failed and run.rewritten:
            module.graph = run.result.graph_module.graph
        tag_uncapturable(module.graph, _uncapturable(self.config))
        self.reports.append(report_of(run, settings))
        log_sites(self.reports[-1])

    def leave(self, graph: fx.Graph) -> None:
        """Report a graph that computes gradients, which is left alone."""
        settings = self._settings or PassSettings.of(self.config, *devices_in(graph))
        note = "a graph that computes gradients is left as it is; call under torch.no_grad()"
        self.reports.append(Report(provider=settings.provider, graphs=1, notes=(note,)))

    def uuid(self) -> Any:
        """Identity for PyTorch's caches; None, which goes past them, once a pass has failed.

        None from the start where caches would keep what a failed pass left unoptimised.
        Whoever asks may be given a graph that calls the provider's ops: they are there from now on.
        """
        _load_what_graphs_may_call(self.config)
        if self._failed or self.config.on_error == "warn" and keeps_failures():
            return None
        return pass_uuid(self.config)

    @property
    def report(self) -> Report:
        """The report on every graph so far."""
        return merged(self.reports)


def _load_what_graphs_may_call(config: Config) -> None:
    name = config.provider
    if name == "auto":
        name = "triton" if torch.cuda.is_available() else "cpu"
    # A provider that is missing has compiled nothing, and a run of the passes says what it needs.
    with contextlib.suppress(ImportError):
        load(name)
    register_tagged(_uncapturable(config))


def _uncapturable(config: Config) -> tuple[str, ...]:
    """Names of the ops that Inductor's graph partition leaves out of CUDA graphs."""
    return (*known_uncapturable(), *config.uncapturable)


class ComposedPass(CustomGraphPass):
    """Several custom passes in the one slot that a hook has."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = tuple(members)

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        for member in self.members:
            # A member may have put a new graph into the module.
            member(graph if module is None else module.graph)

    def uuid(self) -> Any:
        """Identities of all members; None where one has none."""
        known = [m.uuid() if isinstance(m, CustomGraphPass) else None for m in self.members]
        return tuple(known) if all(known) else None


class InductorPasses(dict[str, Any]):
    """Options of Inductor that run the passes; ``report`` says what they did so far."""

    def __init__(self, indexers: IndexerPass, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._indexers = indexers

    @property
    def report(self) -> Report:
        """The report on every graph that was compiled with these options.

        A graph that PyTorch's caches gave was compiled before, and is not in it.
        """
        return self._indexers.report


def inductor_passes(config: Config | Mapping[str, Any] | None = None) -> InductorPasses:
    """The passes for whoever drives Inductor: ``torch._inductor.config.patch(inductor_passes())``.

    The options hold what is in the hooks at the time of this call, behind our pass, so that nothing
    is lost where they are patched in. They also serve as ``options=`` of ``torch.compile`` with its
    own backend, and as ``config_patches=`` of ``compile_fx``.

    Args:
        config: a ``Config``, or a mapping of its options. ``dynamic``, ``require_match`` and
            ``chunk_bytes`` are for hosts that own the call, and refused.

    Raises:
        ConfigError: an option is unknown, bad, or refused.
    """
    options = as_config(config)
    default = Config()
    for name in ("dynamic", "require_match", "chunk_bytes"):
        if getattr(options, name) != getattr(default, name):
            raise ConfigError(f"{name} is no option of passes alone; give it to the host")
    indexers = IndexerPass(options)
    return InductorPasses(indexers, hook_options(indexers))


def hook_options(indexers: IndexerPass) -> dict[str, Any]:
    """Options of Inductor that add a pass, and the ops it must not capture, to those in force."""
    from torch._inductor import config

    present = getattr(config, HOOK)
    members = _flat(present)
    # Two of ours would look at every selection twice.
    others = [m for m in members if not isinstance(m, IndexerPass)]
    hook = ComposedPass([indexers, *others]) if others else indexers
    listed = list(config.custom_should_partition_ops)
    added = [op for op in _uncapturable(indexers.config) if op not in listed]
    return {HOOK: hook, PARTITIONED: [*listed, *added]}


def _flat(present: Any) -> list[Any]:
    if present is None:
        return []
    if isinstance(present, ComposedPass):
        return list(present.members)
    if isinstance(present, (list, tuple)):
        return [member for part in present for member in _flat(part)]
    return [present]


def devices_in(graph: fx.Graph) -> tuple[frozenset[str], torch.device]:
    """Device types of a graph's tensors of numbers, and the GPU among them or the CPU."""
    return devices_of([value(n) for n in graph.find_nodes(op="placeholder")])


def devices_of(values: Sequence[Any]) -> tuple[frozenset[str], torch.device]:
    """Likewise of the inputs of a graph; single numbers may lie anywhere."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    wide = [t for t in tensors if t.dim() > 0 and t.is_floating_point()] or tensors
    found = [t.device for t in wide]
    device = next((d for d in found if d.type == "cuda"), torch.device("cpu"))
    return frozenset(d.type for d in found), device


def report_of(run: PassRun, settings: PassSettings) -> Report:
    """The report on one graph."""
    result = run.result
    return Report(
        result.sites,
        result.op_counts_before,
        result.op_counts_after,
        settings.provider,
        graphs=1,
        notes=run.notes,
    )
