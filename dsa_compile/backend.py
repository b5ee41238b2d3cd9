"""``torch.compile(model, backend="dsa")``: Inductor, with the passes in its hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from dsa_compile import compile_caches
from dsa_compile.compiled_reports import forget, merged, remember
from dsa_compile.config import Config, as_config, near_miss
from dsa_compile.errors import ConfigError, NoMatchError, NoMatchWarning, SlowPathWarning
from dsa_compile.inductor_hooks import IndexerPass, devices_of, hook_options
from dsa_compile.kernels.cpu import limit_working_set
from dsa_compile.logs import log_sites, trace_report
from dsa_compile.pass_runner import PassSettings
from dsa_compile.report import Report

Compiled = Callable[..., Any]


def dsa(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Config | Mapping[str, Any] | None = None,
) -> Compiled:
    """Backend of ``torch.compile``: compile a graph of Dynamo with its indexers rewritten.

    The passes run in one of Inductor's hooks, for this graph alone, before what is in it already.
    ``compiled_report(model)`` gives the report; ``TORCH_LOGS="+dsa_compile"`` prints it. Gradients
    are left to the model: call it under ``torch.no_grad()`` or ``torch.inference_mode()``.

    Args:
        graph_module, example_inputs: from Dynamo.
        mode: as for ``torch.compile`` with Inductor.
        options: fields of ``Config``, and ``mode``, since ``torch.compile`` takes one of the two
            only. ``dynamic`` is an argument of ``torch.compile`` and refused here;
            ``require_match`` is held against each graph that has a selection.

    Raises:
        ConfigError: an option or the mode is unknown or bad.
        ProviderError: the configuration asks for what cannot be served on the graph's device.
        PassError: a pass failed, and ``on_error`` is ``"raise"``.
        NoMatchError: fewer indexers were matched than ``require_match`` asks for.
    """
    from torch._inductor.compile_fx import compile_fx

    config, mode = backend_options(options, mode)
    settings = PassSettings.of(config, *devices_of(example_inputs))
    indexers = IndexerPass(config, settings)
    patches = {**mode_options(mode), **hook_options(indexers)}
    key, identity = None, indexers.uuid()
    if compile_caches.enabled() and identity is not None:
        recorded = _recorded(graph_module, example_inputs)
        key = compile_caches.graph_key(graph_module, recorded, identity)
    # Inductor owns the graph from here on.
    spare = _copied(graph_module)
    compiled: Any = compile_fx(graph_module, list(example_inputs), config_patches=patches)
    if indexers.reports:
        report = indexers.report
        if key is not None and indexers.uuid() is not None:
            compile_caches.store(key, report)
    else:
        found = None if key is None else compile_caches.restore(key)
        report = found or _looked_at_again(spare, _recorded(spare, example_inputs), indexers, key)
        log_sites(report)
    trace_report("dsa_compile", report)
    _judge(report, config)
    remember(report, spare)
    return compiled if config.chunk_bytes is None else _limited(compiled, config.chunk_bytes)


def backend_options(
    options: Config | Mapping[str, Any] | None, mode: str | None = None
) -> tuple[Config, str | None]:
    """The configuration and the mode that ``options=`` and ``mode=`` of ``torch.compile`` mean.

    Raises:
        ConfigError: an option is unknown, bad, or an argument of ``torch.compile`` itself.
    """
    named = isinstance(options, Mapping) and "dynamic" in options
    if isinstance(options, Mapping) and "mode" in options:
        options = dict(options)
        mode = options.pop("mode")
    config = as_config(options)
    if named or config.dynamic != Config().dynamic:
        raise ConfigError("dynamic is an argument of torch.compile: give it there, not in options")
    return config, mode


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options of a mode of ``torch.compile``.

    Raises:
        ConfigError: the mode is not known.
    """
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode is None or mode == "default":
        return {}
    if not isinstance(mode, str) or mode not in known:
        names = ", ".join(map(repr, known))
        raise ConfigError(f"mode must be one of {names}, got {mode!r}{near_miss(mode, known)}")
    return dict(known[mode])


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph once more, with the same tensors."""
    graph = copy.copy(graph_module)
    graph.graph = copy.deepcopy(graph_module.graph)
    return graph


def _recorded(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs as Dynamo recorded them, with symbolic sizes."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, example_inputs, strict=True)
    return [node.meta.get("example_value", value) for node, value in pairs]


def _looked_at_again(
    graph_module: fx.GraphModule, inputs: Sequence[Any], indexers: IndexerPass, key: str | None
) -> Report:
    """The report on a graph that PyTorch's cache gave without one: traced anew, compiled not."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import detect_fake_mode
    from torch._guards import TracingContext, tracing
    from torch._inductor.decomposition import select_decomp_table

    def look(functional: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        indexers(functional.graph)
        return functional

    def with_gradients(functional: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        indexers.leave(functional.graph)
        return functional

    host = aot_autograd(
        fw_compiler=with_gradients,
        inference_compiler=look,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with tracing(TracingContext(detect_fake_mode(inputs))):
        host(graph_module, list(inputs))
    report = merged(indexers.reports)
    if key is not None and indexers.uuid() is not None:
        compile_caches.store(key, report)
    return report


def _judge(report: Report, config: Config) -> None:
    """Hold a graph with a selection against ``require_match``; say where it asks for gradients."""
    if any("gradients" in note for note in report.notes):
        text = "a graph was compiled with gradients on and runs unoptimised; call the model under "
        warnings.warn(f"{text}torch.no_grad()", SlowPathWarning, stacklevel=2)
    if not report.sites:
        return
    found, needed = len(report.matched), config.matches_needed
    if found < needed:
        raise NoMatchError(
            f"{found} indexers were matched in a graph and require_match={config.require_match} "
            f"asks for {needed}; {report.explain_miss()}"
        )
    if not found:
        text = f"no indexer was matched in a graph, it runs as it was; {report.explain_miss()}"
        warnings.warn(text, NoMatchWarning, stacklevel=2)


def _limited(compiled: Compiled, size: int) -> Compiled:
    def limited(*args: Any) -> Any:
        with limit_working_set(size):
            return compiled(*args)

    return limited


# Dynamo calls it when it is reset itself.
dsa.reset = forget  # type: ignore[attr-defined]
