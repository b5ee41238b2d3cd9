"""What a command works on: a file, or a model named as ``module:attribute``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsa_compile.config import Config, near_miss
from dsa_compile.errors import ConfigError


def is_file(source: str) -> bool:
    """Whether a source names a ``.pt2`` file and no attribute of a module."""
    return source.endswith(".pt2") or Path(source).is_file()


def attribute(name: str) -> Any:
    """The object that ``module:attribute`` or ``file.py:attribute`` names.

    Raises:
        ConfigError: it is not spelled so, the module cannot be imported, or lacks the attribute.
    """
    place, colon, path = name.rpartition(":")
    if not colon or not place or not path:
        raise ConfigError(
            f"{name!r} is neither a .pt2 file nor of the form module:attribute or file.py:attribute"
        )
    found: Any = _module(place)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{name!r}: {getattr(found, '__name__', place)} has no attribute {part!r}"
                + near_miss(part, dir(found))
            )
        found = getattr(found, part)
    return found


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        file = Path(place).resolve()
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        # Its neighbours can be imported, as when it is run.
        sys.path.insert(0, str(file.parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        return module
    # A script that ends the process would leave the command undone, and as if it were done.
    except (Exception, SystemExit) as fault:
        raise ConfigError(
            f"{place!r} cannot be imported: {type(fault).__name__}: {fault}; name a module that "
            "can be imported from this folder"
        ) from fault


def model_and_inputs(
    source: str, inputs: str | None
) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The model that ``source`` names and the arguments of a typical call.

    ``source`` names a module, or a function without arguments that gives a module, or a module and
    its arguments. ``inputs`` names the arguments, or a function that gives them; see
    ``example_inputs`` of ``dsa_compile.optimize`` for their form.

    Raises:
        ConfigError: there is no such model, or its arguments are missing.
    """
    from torch import nn

    from dsa_compile.call_inputs import CallSignature, split_examples

    found = attribute(source)
    if isinstance(found, type) or not isinstance(found, nn.Module):
        if not callable(found):
            raise ConfigError(
                f"{source!r} is a {type(found).__name__}; name a module, or a function that makes "
                "one"
            )
        found = _called(source, found)
    given: Any = None
    if isinstance(found, (tuple, list)) and len(found) == 2:
        found, given = found
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"{source!r} gave a {type(found).__name__}; it must give a module, or a module and its "
            "arguments"
        )
    if inputs is not None:
        given = attribute(inputs)
        if callable(given) and not isinstance(given, nn.Module):
            given = _called(inputs, given)
    if given is None:
        raise ConfigError(
            f"the arguments of a typical call of {source!r} are needed: name them with --inputs "
            "module:attribute, or let the function give the pair (module, arguments)"
        )
    args, kwargs = split_examples(given)
    try:
        CallSignature.of(found).bind(args, kwargs)
    except TypeError as fault:
        raise ConfigError(
            f"{source!r} cannot be called with these arguments: {fault}; give a tuple of all of "
            "them, or a dict by name"
        ) from fault
    return found.eval(), (args, kwargs)


def _called(name: str, function: Any) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as fault:
        raise ConfigError(
            f"{name!r} failed: {type(fault).__name__}: {fault}; it is called without arguments"
        ) from fault


def config_of(
    options: Sequence[str], provider: str | None = None, require_match: int = 0, **more: Any
) -> Config:
    """The configuration of ``name=value`` options, whose values are JSON or plain words.

    Raises:
        ConfigError: an option is not of that form, unknown, or its value is bad.
    """
    named: dict[str, Any] = dict(more)
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"--config {option!r} must be of the form name=value")
        try:
            named[name.strip().replace("-", "_")] = json.loads(text)
        except ValueError:
            named[name.strip().replace("-", "_")] = text
    if provider is not None:
        named["provider"] = provider
    if require_match:
        named["require_match"] = require_match
    return Config.from_options(named)
