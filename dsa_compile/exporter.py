"""``export``: an exported program whose indexers are found, proven and rewritten."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from dsa_compile.call_inputs import CallSignature
from dsa_compile.config import Config, as_config
from dsa_compile.errors import CaptureError, ConfigError
from dsa_compile.export_rewrite import rewrite
from dsa_compile.optimized_module import check_mode, original_of
from dsa_compile.package_metadata import Provenance, attach, provenance_of
from dsa_compile.program_files import read_program
from dsa_compile.state import ModelState
from dsa_compile.target import choose_provider

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export(
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """Export a model ahead of time, with its sparse-attention indexers rewritten.

    The result is an ordinary ``torch.export.ExportedProgram``: ``torch.export`` saves, loads,
    unflattens and exports it again, and ``package`` compiles it. It has the call signature of the
    model, shares its parameters and constants (none is copied), and updates buffers and inputs as
    the model does. Loading one back needs ``import dsa_compile.kernels`` first, which registers the
    ops inside. What was found is in ``dsa_compile.report_of(program)``.

    Args:
        model: a module in eval mode; or an exported program, or the path of one that
            ``torch.export.save`` wrote: then there are no further arguments but ``config``.
        args, kwargs: the arguments of a typical call. Tensor sizes of 0 and 1 are captured as they
            are.
        dynamic_shapes: which sizes stay symbolic, as ``torch.export.export`` takes it. Without it
            ``config.dynamic`` decides: every size that the model allows, or none.
        config: a ``Config``, or a mapping of its options.

    Raises:
        TypeError: ``model`` is none of these, or the arguments do not fit its signature.
        ConfigError: an option is bad, arguments are missing, or given beside a program.
        ProviderError: the configuration asks for what cannot be served here.
        TrainingModeError: the model is in training mode.
        CaptureError: torch.export cannot trace the model; the message holds its reason.
        PackageError: the file is no exported program.
        NoMatchError: fewer indexers were matched than ``require_match`` asks for.
    """
    options = as_config(config)
    if isinstance(model, (str, os.PathLike)):
        model = read_program(model)
    notes: tuple[str, ...] = ()
    if isinstance(model, torch.export.ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None:
            raise ConfigError(
                "args, kwargs and dynamic_shapes belong to the export of a module, and model is "
                "an exported program already; leave them away"
            )
        if (made := provenance_of(model)) is not None:
            raise ConfigError(
                f"the program was rewritten already, by dsa_compile {made.version} for provider "
                f"{made.report.provider!r}; start from the program as torch.export gave it"
            )
        program = model
    else:
        if args is None and kwargs is None:
            raise ConfigError("args: the arguments of a typical call are needed to export a module")
        if not isinstance(args, (tuple, list, type(None))):
            raise ConfigError(
                f"args must be a tuple of positional arguments, got {type(args).__name__}; "
                "arguments by name are kwargs"
            )
        original = original_of(model)
        check_mode(original)
        # Before the capture, which takes long.
        choose_provider(options, original)
        program, notes = _capture(
            original, tuple(args or ()), dict(kwargs or {}), dynamic_shapes, options.dynamic
        )
    if options.chunk_bytes is not None:
        notes += ("chunk_bytes is an option of the running process: the program does not hold it",)
    done, report = rewrite(program, options, notes)
    attach(done, Provenance.of(options, report))
    return done


def _capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    dynamic: bool | None,
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The model as torch.export captures it, and what could not be kept dynamic."""
    bound = CallSignature.of(model).signature.bind(*args, **kwargs).arguments
    attempts: list[tuple[str, Any]] = [("", dynamic_shapes)]
    if dynamic_shapes is None and dynamic is not False:
        every = {name: _every_size(value) for name, value in bound.items()}
        attempts = [("", every), ("no size could be kept dynamic", None)]
    state = ModelState(model, tensors=False)
    fault: Exception | None = None
    for loss, shapes in attempts:
        notes = (f"{loss}: {_first_line(fault)}",) if fault is not None else ()
        try:
            with state.kept(), torch.no_grad(), warnings.catch_warnings():
                # torch's own deprecations, raised while it copies its tree specifications.
                warnings.filterwarnings("ignore", category=FutureWarning)
                # torch.export marks the dynamic tensors themselves: each attempt takes new ones.
                fresh_args, fresh_kwargs = pytree.tree_map_only(
                    torch.Tensor, torch.Tensor.detach, (args, kwargs)
                )
                program = torch.export.export(
                    model, fresh_args, fresh_kwargs, dynamic_shapes=shapes, strict=False
                )
                if changed := state.changed_attributes():
                    raise CaptureError(
                        f"the model's forward changes its attribute {changed[0]}, which a program "
                        "does not repeat; make it a buffer that is updated in place"
                    )
                return program, notes
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - torch.export raises many kinds
            fault = error
    raise CaptureError(
        f"torch.export could not capture the model: {_first_line(fault)}; "
        + _mend(fault, dynamic_shapes is not None)
    ) from fault


def _every_size(value: Any) -> Any:
    """What keeps every size of an argument dynamic; None where it holds no tensor."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        return None
    return pytree.tree_map(_sizes, value)


def _sizes(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        auto = torch.export.Dim.AUTO
        return {axis: auto for axis, size in enumerate(leaf.shape) if size > 1}
    return None


def _first_line(fault: Exception | None) -> str:
    text = str(fault).strip()
    return f"{type(fault).__name__}: {text.splitlines()[0] if text else ''}"


def _mend(fault: Exception | None, named: bool) -> str:
    """What a user can do about an error of torch.export; ``named``: dynamic_shapes was given."""
    text = f"{type(fault).__name__} {fault}"
    if named:
        return "leave dynamic_shapes away to keep every size dynamic that the model allows"
    if "Unsupported input type" in text or "pytree" in text:
        return (
            "pass tensors and plain values, register the argument's class with "
            "torch.utils._pytree.register_pytree_node, or use dsa_compile.optimize, which compiles "
            "at the first call"
        )
    return (
        "change the model where torch's message points, or use dsa_compile.optimize without "
        "example_inputs, which compiles at the first call"
    )
