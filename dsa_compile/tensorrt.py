"""Torch-TensorRT 2.14: everything but our ops is free to go into engines.

The one file that touches ``torch_tensorrt``, and only when ``compile`` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsa_compile.config import Config
from dsa_compile.errors import ConfigError, Need, ProviderError
from dsa_compile.exporter import export
from dsa_compile.package_metadata import provenance_of
from dsa_compile.tensorrt_lowering import lowering_pass, ops_in_pytorch

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.export import ExportedProgram

__all__ = ["compile", "lowering_pass"]


def compile(
    program: ExportedProgram | nn.Module,
    arg_inputs: Sequence[Any] | None = None,
    kwarg_inputs: Mapping[str, Any] | None = None,
    *,
    config: Config | Mapping[str, Any] | None = None,
    **options: Any,
) -> fx.GraphModule:
    """Compile a program with Torch-TensorRT, its indexers rewritten.

    The rewrite runs first, on the program as it was exported; Torch-TensorRT then lowers the rest,
    keeps our ops in PyTorch segments and builds engines of everything else that it converts.

    Args:
        program: what ``dsa_compile.export`` gave, another exported program, or a module in eval
            mode; on a GPU.
        arg_inputs, kwarg_inputs: as ``torch_tensorrt.dynamo.compile`` takes them, and for a module
            as its export does; the program's own arguments unless given.
        config: options of the rewrite, for a program that is not rewritten yet.
        options: all else that ``torch_tensorrt.dynamo.compile`` takes.

    Raises:
        ProviderError: Torch-TensorRT or its libraries are missing.
        ConfigError: ``require_full_compilation`` is asked for, which leaves our ops no place.
    """
    if options.get("require_full_compilation"):
        raise ConfigError(
            "require_full_compilation leaves no PyTorch segment, and the indexer's ops run in one; "
            "leave it away"
        )
    torch_tensorrt = _library()
    from torch.export import ExportedProgram

    if not isinstance(program, ExportedProgram):
        program = export(program, arg_inputs, kwarg_inputs, config=config)
    elif provenance_of(program) is None:
        program = export(program, config=config)
    if arg_inputs is None and kwarg_inputs is None and program.example_inputs is not None:
        arg_inputs, kwarg_inputs = program.example_inputs
    kept = {*(options.pop("torch_executed_ops", None) or ()), *ops_in_pytorch(program.graph_module)}
    return torch_tensorrt.dynamo.compile(
        program,
        arg_inputs=list(arg_inputs or ()),
        kwarg_inputs=dict(kwarg_inputs or {}),
        torch_executed_ops=kept,
        **options,
    )


def _library() -> Any:
    try:
        import torch_tensorrt
    except (ImportError, OSError) as fault:
        raise ProviderError(
            "tensorrt.compile",
            [
                Need(
                    f"Torch-TensorRT cannot be imported ({type(fault).__name__}: {fault})",
                    "install torch-tensorrt 2.14 and the libraries of TensorRT 11.1",
                )
            ],
        ) from fault
    return torch_tensorrt
