"""One run of the passes over a captured graph, the same for every host."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import fx, nn

from dsa_compile.adapters import registered_adapters
from dsa_compile.config import Config, near_miss
from dsa_compile.cost import crossover_on
from dsa_compile.errors import Need, PassError, ProviderError, SlowPathWarning
from dsa_compile.kernels.providers import load, uncapturable
from dsa_compile.logs import log, observer, readable
from dsa_compile.passes.context import Crossover, MatchOptions, StageError, UnservedError
from dsa_compile.passes.graph_tools import where_in_model
from dsa_compile.passes.pipeline import PipelineResult, op_counts, run_pipeline
from dsa_compile.target import Target, device_of, devices, provider_for


@dataclass(frozen=True)
class PassSettings:
    """What the passes are told, for tensors on one kind of device."""

    options: MatchOptions
    provider: str
    crossover: Crossover | None
    uncapturable: Mapping[str, str]
    on_error: str
    precision: str = "preserve"

    @classmethod
    def of(cls, config: Config, held: frozenset[str], device: torch.device) -> PassSettings:
        """Settings for tensors on devices of the types ``held``, ``device`` the GPU among them.

        Raises:
            ProviderError: the configuration asks for what cannot be served there.
        """
        provider = provider_for(config, held, device)
        # Also for a graph that PyTorch's caches give back: its code calls the provider's ops.
        load(provider)
        named = dict.fromkeys(config.uncapturable, "the configuration names it")
        return cls(
            MatchOptions(
                probe_memory_bytes=config.probe_memory_bytes,
                seed=config.probe_seed,
                draws=config.probe_draws,
            ),
            provider,
            crossover_on(Target.detect(device), provider),
            {**uncapturable(provider), **named},
            config.on_error,
            config.precision,
        )

    @classmethod
    def for_model(cls, config: Config, model: nn.Module) -> PassSettings:
        """Settings for the devices that a model's tensors are on.

        Raises:
            ProviderError: the configuration asks for what cannot be served there.
        """
        return cls.of(config, devices(model), device_of(model))


@dataclass(frozen=True)
class PassRun:
    """What a run of the passes gave.

    Attributes:
        result: the rewritten graph and its sites; the graph as it was where a pass failed.
        notes: what the report must say besides.
        failed: whether a pass failed.
    """

    result: PipelineResult
    notes: tuple[str, ...] = ()
    failed: bool = False

    @property
    def rewritten(self) -> bool:
        """Whether an indexer was rewritten or fused."""
        return any(site.status != "kept" for site in self.result.sites)


def run_passes(
    graph_module: fx.GraphModule,
    settings: PassSettings,
    *,
    lower: Callable[[fx.GraphModule], object] | None = None,
) -> PassRun:
    """Match, rewrite and lower the indexers of a graph, which is left unchanged.

    Args:
        graph_module: functional ATen graph whose nodes carry ``meta["val"]``.
        settings: what the passes are told.
        lower: called with a graph in which something was rewritten, for the host that compiles it;
            it fails as a pass does.

    Raises:
        PassError: a pass failed, and ``on_error`` is ``"raise"``; names the pass, the place in the
            model, and a file that holds the graphs.
        ProviderError: an indexer does not fit the precision that was asked for.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    # Proofs run on real numbers, also while a compiler's fake tensors are in force.
    try:
        with _disable_current_modes(), torch.no_grad():
            result = run_pipeline(
                graph_module,
                options=settings.options,
                provider=settings.provider,
                crossover=settings.crossover,
                uncapturable=settings.uncapturable,
                adapters=registered_adapters(),
                precision=settings.precision,
                observe=observer(graph_module),
            )
        run = PassRun(result, (*_notes(result), *_unknown(settings.uncapturable)))
        if lower is not None and run.rewritten:
            _lower(result.graph_module, lower)
    except Exception as fault:
        text = _describe(fault, graph_module)
        # Dynamo takes some exceptions for graph breaks and would go on without a word.
        if settings.on_error == "raise":
            unserved = fault.__cause__
            if isinstance(unserved, UnservedError):
                asked = f"provider={settings.provider!r}, precision={settings.precision!r}"
                raise ProviderError(asked, [Need(*need) for need in unserved.needs]) from fault
            raise PassError(text) from fault
        log.error("%s", text, exc_info=fault)
        warnings.warn(f"{text}; the graph runs as it was", SlowPathWarning, stacklevel=2)
        counts = op_counts(graph_module)
        return PassRun(PipelineResult(graph_module, (), counts, counts, ()), (text,), True)
    return run


def _notes(result: PipelineResult) -> tuple[str, ...]:
    breaks = result.breaks.items()
    return tuple(f"a CUDA graph is interrupted around {op}: {why}" for op, why in breaks)


def _unknown(uncapturable: Mapping[str, str]) -> tuple[str, ...]:
    """What the report says of names that no library has registered: no call can bear them."""
    if not uncapturable:
        return ()
    overloads = torch._C._dispatch_get_all_op_names()
    known = {*overloads, *(name.split(".")[0] for name in overloads)}
    return tuple(
        f"uncapturable names {name}, and no such op is registered{near_miss(name, known)}"
        for name in uncapturable
        if name not in known and name.removesuffix(".default") not in known
    )


def _lower(graph_module: fx.GraphModule, lower: Callable[[fx.GraphModule], object]) -> None:
    try:
        lower(graph_module)
    except Exception as fault:
        raise StageError(getattr(lower, "__name__", "lower"), fault, graph_module) from fault


def _describe(fault: Exception, captured: fx.GraphModule) -> str:
    """The failed pass, the site and the file of graphs, in one line."""
    stage, left, cause = "the pipeline", None, fault
    if isinstance(fault, StageError):
        stage, left = fault.stage, fault.graph_module
        if isinstance(fault.__cause__, Exception):
            cause = fault.__cause__
    site = _site(cause.__traceback__)
    path = _dump(stage, captured, left)
    first = (str(cause).strip().splitlines() or ["no message"])[0]
    at = f" at {site}" if site else ""
    return f"pass {stage} failed{at}: {type(cause).__name__}: {first} (graphs in {path})"


def _site(traceback: TracebackType | None) -> str | None:
    """Place in the model of the node that the innermost function had in hand."""
    found = None
    while traceback is not None:
        for held in traceback.tb_frame.f_locals.values():
            if isinstance(held, fx.Node) and held.op == "call_function":
                found = where_in_model(held)
        traceback = traceback.tb_next
    return found


def _dump(stage: str, captured: fx.GraphModule, left: fx.GraphModule | None) -> str:
    parts = [f"# the graph as captured\n{readable(captured)}"]
    if left is not None:
        parts.append(f"# the graph as {stage} left it\n{readable(left)}")
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"dsa_compile_{stage.replace(' ', '_')}_", suffix=".py", delete=False
    ) as file:
        file.write("\n\n".join(parts))
    return file.name
