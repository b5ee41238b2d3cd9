"""``explain``: what ``optimize`` would do with a model, without doing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dsa_compile.call_inputs import clone_inputs
from dsa_compile.config import Config, as_config
from dsa_compile.dynamo_host import DynamoHost
from dsa_compile.optimized_module import check_mode, original_of
from dsa_compile.report import Report
from dsa_compile.session import Session
from dsa_compile.state import ModelState


def explain(
    model: nn.Module,
    /,
    *inputs: Any,
    config: Config | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """The report that ``optimize`` would attach, for one call of the model.

    The model runs once, as it is, on copies of the inputs; caches among them stay untouched, and
    buffers and attributes of the model are put back. ``require_match`` is not enforced.

    Args:
        model: the module, in eval mode; of an optimised module, its original is explained.
        inputs, kwargs: the arguments of the call.
        config: a ``Config``, or a mapping of its options.

    Raises:
        TypeError: ``model`` is not a module.
        ConfigError: an option is unknown or bad.
        ProviderError: the configuration asks for what cannot be served here.
        TrainingModeError: the model is in training mode.
    """
    original = original_of(model)
    options = as_config(config)
    session = Session(original, options, rewrite=False)
    check_mode(original)
    host = DynamoHost(original, session.add, options.dynamic)
    copied_args, copied_kwargs = clone_inputs(inputs, kwargs, original)
    with torch.no_grad(), ModelState(original).kept():
        host(*copied_args, **copied_kwargs)
    return session.report(tuple(host.notes))
