"""``optimize``: a module with its indexers found, proven and rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dsa_compile import export_host
from dsa_compile.call_inputs import split_examples
from dsa_compile.config import Config, as_config
from dsa_compile.dynamo_host import DynamoHost
from dsa_compile.export_call import ExportedCall
from dsa_compile.optimized_module import Engine, OptimizedModule, check_mode, original_of, wrap
from dsa_compile.session import Session


def optimize(
    model: nn.Module,
    *,
    example_inputs: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> OptimizedModule:
    """Optimise the sparse-attention indexers of a model for inference.

    The result is called as the model is, shares its parameters and buffers (nothing is copied),
    and carries ``.report``. In-place updates of buffers and of caches among the inputs happen as
    in the original. It runs without gradients, whatever mode it is called in.

    Without ``example_inputs`` the model is compiled at its first call, through Dynamo, and again
    when a call differs in what Python sees; its report grows with that. With them it is captured
    at once through torch.export, with every size dynamic that the model allows; ``report.notes``
    says which sizes are not, and a call with another one raises ``InputError``. Sizes 0 and 1
    always need an example, or a first call, of their own.

    Args:
        model: the module, in eval mode when it is called. Indexers only in it are looked for;
            nothing in it is changed.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, the pair
            ``(tuple, dict)`` of both, or a single tensor.
        config: a ``Config``, or a mapping of its options.

    Returns:
        The optimised module, also an instance of the model's class.

    Raises:
        TypeError: ``model`` is not a module.
        ConfigError: an option is unknown or bad, or the model was compiled already.
        ProviderError: the configuration asks for what cannot be served here.
        CaptureError: the model cannot be captured from ``example_inputs``.
        TrainingModeError: the model is captured, or called, in training mode.
        GradientError: at a call, if an input asks for gradients.
        NoMatchError: fewer indexers were matched than ``require_match`` asks for; raised at once
            with example inputs, else when the first call has run.
    """
    original = original_of(model)
    options = as_config(config)
    session = Session(original, options)
    if example_inputs is None:
        dynamo = DynamoHost(original, session.add, options.dynamic)
        return wrap(Engine(original, session, dynamo, lambda: tuple(dynamo.notes)))
    check_mode(original)
    args, kwargs = split_examples(example_inputs)
    exported = export_host.capture(original, args, kwargs, options.dynamic)
    graph = session.add(exported.graph_module)
    session.judge({graph.index})
    modules = (graph.original, graph.result.graph_module)
    host = ExportedCall(exported, graph, modules)
    return wrap(Engine(original, session, host, lambda: exported.notes))
