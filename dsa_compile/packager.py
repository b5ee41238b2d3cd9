"""``package``: an exported program compiled to one file that runs without the model's code."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsa_compile.errors import Need, PackageError, ProviderError
from dsa_compile.host_compiler import compiler_needs
from dsa_compile.package_metadata import (
    FILE,
    KEY,
    PackageMetadata,
    cpu_features,
    our_version,
    provenance_of,
    torch_version,
)
from dsa_compile.portable import (
    argument_names,
    conditions_of,
    foreign_ops,
    input_table,
    library_of,
    make_portable,
    without_infinities,
)
from dsa_compile.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def package(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    portable: bool = True,
    inductor_configs: Mapping[str, Any] | None = None,
) -> PackageMetadata:
    """Compile an exported program through AOTInductor into a ``.pt2`` package.

    Triton kernels are compiled into the package, and the CPU provider's ops become ATen, so that it
    runs with PyTorch alone, from C++ too (``AOTIModelPackageLoader``). Ops that stay outside it are
    named in its metadata, which ``dsa_compile.load`` checks.

    Args:
        program: what ``dsa_compile.export`` gave, or any exported program; left unchanged.
        path: where to write; ends in ``.pt2``.
        target: ``"cpu"``, or ``"sm90"`` and its kin; the device of the program unless given.
            AOTInductor compiles for the machine it runs on, so another one is an error.
        portable: write the CPU provider's ops as ATen. False keeps them: they run on several
            threads within ``working_set`` bytes, and the package needs Python and dsa_compile.
        inductor_configs: further options of Inductor.

    Returns:
        The package's metadata.

    Raises:
        TypeError: ``program`` is no exported program.
        ConfigError: the target is not known.
        ProviderError: the target is not this machine, or there is no C++ compiler.
        PackageError: the program cannot be compiled, or the file not written; says why.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError(
            f"program must be a torch.export.ExportedProgram, got {type(program).__name__}; "
            "dsa_compile.export makes one of a module"
        )
    file = Path(path)
    if file.suffix != ".pt2":
        raise PackageError(f"path must end in .pt2, got {str(file)!r}")
    if not file.parent.is_dir():
        raise PackageError(f"{file.parent}: there is no such folder; make it first")
    if program.example_inputs is None:
        raise PackageError(
            "the program holds no example inputs, which AOTInductor needs; export the model again"
        )
    chosen = _target_of(program, target)
    source = make_portable(program) if portable else program
    source = without_infinities(source)
    ops = foreign_ops(source)
    kernels = any(name.startswith("dsa_triton::") for name in ops)
    outside = tuple(name for name in ops if not name.startswith("dsa_triton::"))
    metadata = PackageMetadata(
        version=our_version(),
        torch=torch_version(),
        target=chosen.name,
        features=cpu_features(),
        triton=chosen.packages.get("triton") if kernels or chosen.name != "cpu" else None,
        ops=outside,
        libraries=tuple(sorted({m for m in map(library_of, outside) if m is not None})),
        arguments=argument_names(program),
        inputs=tuple(input_table(program)),
        provenance=provenance_of(program),
    )
    files = _compile(source, metadata, dict(inductor_configs or {}))
    # What the compiler took for granted about sizes is known only now.
    metadata = replace(metadata, conditions=conditions_of(source))
    _write(file, files, metadata)
    return metadata


def device_of_program(program: ExportedProgram) -> torch.device:
    """The GPU among the devices of a program's tensors, or the CPU."""
    nodes = program.graph_module.graph.nodes
    values = (n.meta.get("val") for n in nodes if n.op == "placeholder")
    devices = [v.device for v in values if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _target_of(program: ExportedProgram, name: str | None) -> Target:
    """The target of a program's device, which the asked one must be.

    Raises:
        ConfigError: the target is not known.
        ProviderError: it is another one than this machine or the program's device.
    """
    asked = None if name is None else Target(name)
    device = device_of_program(program)
    needs = compiler_needs()
    if device.type == "cuda" and not torch.cuda.is_available():
        needs.append(
            Need(
                "the program's tensors are on a GPU, and there is none here",
                "package it on a machine with the GPU that it will run on",
            )
        )
        found = asked
    else:
        found = Target.detect(device)
        if asked is not None and asked.name != found.name:
            mend = (
                "export the model from that device"
                if (asked.name == "cpu") != (found.name == "cpu")
                else "package it on a machine with that GPU"
            )
            needs.append(
                Need(f"the program's tensors are on {device}, which is {found.name} here", mend)
            )
    if needs or found is None:
        raise ProviderError(f"a package for target={name!r}", needs)
    return found


def _compile(program: ExportedProgram, metadata: PackageMetadata, options: dict[str, Any]) -> Any:
    """The files that AOTInductor makes of a program."""
    args, kwargs = program.example_inputs
    marks = {KEY: metadata.version, f"{KEY}_target": metadata.target}
    options["aot_inductor.package"] = True
    options["aot_inductor.metadata"] = {**options.get("aot_inductor.metadata", {}), **marks}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # torch's own deprecations, raised while it copies its tree specifications.
            warnings.filterwarnings("ignore", category=FutureWarning)
            module = program.module(check_guards=False)
            return torch._inductor.aot_compile(module, args, kwargs, options=options)
    except Exception as fault:  # noqa: BLE001 - compilers raise many kinds
        raise PackageError(
            f"AOTInductor could not compile the program: {_reason(fault)}"
        ) from fault


def _write(file: Path, files: Any, metadata: PackageMetadata) -> None:
    """Write the package; a reader never sees half of it, and an old one stays where this fails."""
    from torch.export.pt2_archive._package import package_pt2

    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            draft = os.path.join(folder, file.name)
            package_pt2(draft, aoti_files=files, extra_files={FILE: metadata.to_json()})
            os.replace(draft, file)
    except (OSError, RuntimeError) as fault:
        raise PackageError(f"{file}: the package cannot be written: {fault}") from fault


def _reason(fault: Exception) -> str:
    """An error of the compiler in one line, with what mends it where that is known."""
    text = (str(fault).strip().splitlines() or [""])[0]
    reason = f"{type(fault).__name__}: {text}"
    if "No registered serialization name" in reason:
        return (
            f"{reason}; a package returns tensors in tuples, lists and dicts: export a module that "
            "returns those"
        )
    return reason
