"""``load``: a package of ``package``, once it is known to fit this machine."""

from __future__ import annotations

import importlib
import math
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from dsa_compile.errors import InputError, Need, PackageError, ProviderError
from dsa_compile.package_metadata import PackageMetadata, cpu_features, torch_version
from dsa_compile.program_files import read_metadata
from dsa_compile.report import Report
from dsa_compile.target import Target


class LoadedPackage:
    """A compiled model, called as the model is.

    Attributes:
        metadata: what it was made for and where it comes from.
    """

    def __init__(self, model: Any, metadata: PackageMetadata) -> None:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        self._model = model
        self.metadata = metadata
        self._scope = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch}
        # The arguments of a call: a tuple and a dict.
        self._spec = pytree.treespec_loads(model.loader.get_call_spec()[0])
        self._conditions = [(c, compile(c, "<condition>", "eval")) for c in metadata.conditions]

    @property
    def report(self) -> Report | None:
        """What was found in the model, None if dsa_compile did not export it."""
        made = self.metadata.provenance
        return None if made is None else made.report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            InputError: an argument is missing or nested otherwise, or a tensor has another dtype,
                rank, size or stride than the package serves; names it.
        """
        args, kwargs, leaves = self._arranged(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted, names = self.metadata.inputs, self.metadata.arguments
        if len(given) != len(wanted):
            raise InputError(
                f"the package takes {len(wanted)} tensors in the arguments {', '.join(names)}, got "
                f"{len(given)}"
            )
        for value, described in zip(given, wanted, strict=True):
            _check_input(value, described, self.metadata.target)
        self._check_strides(given)
        scope = {**self._scope, "L": dict(zip(names, args, strict=False)) | kwargs}
        for text, code in self._conditions:
            if not eval(code, scope):
                what = "sizes" if ".size()" in text else "values"
                raise InputError(
                    f"the package serves only {what} where {_readable(text)}; export and package "
                    f"with examples of such {what}"
                )
        return self._model(*args, **kwargs)

    def _arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """The arguments as they were captured, and their leaves in that order.

        PyTorch takes the tensors of a call as they come, in whatever dict or order they are.
        """
        names, (first, named) = self.metadata.arguments, self._spec.children()
        if len(names) == first.num_children + named.num_children:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            if set(arguments) != set(names) or len(args) + len(kwargs) != len(names):
                tensors = [v for v in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(v)]
                by_name = f", by name {', '.join(kwargs)}" if kwargs else ""
                raise InputError(
                    f"the package takes {len(self.metadata.inputs)} tensors in the arguments "
                    f"{', '.join(names)}, got {len(tensors)} in {len(args) + len(kwargs)}{by_name}"
                )
            args = tuple(arguments[name] for name in names[: first.num_children])
            kwargs = {name: arguments[name] for name in names[first.num_children :]}
        try:
            leaves = self._spec.flatten_up_to((args, kwargs))
        except (TypeError, ValueError) as fault:
            raise InputError(
                f"the arguments {', '.join(names)} are nested otherwise than packaged: {fault}"
            ) from fault
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, leaves

    def _check_strides(self, given: list[torch.Tensor]) -> None:
        """The compiled code reads memory as the example was laid out, whatever it is given."""
        scope = dict(self._scope)
        for value, described in zip(given, self.metadata.inputs, strict=True):
            scope |= dict(zip(map(str, described["shape"]), value.shape, strict=True))
        for value, described in zip(given, self.metadata.inputs, strict=True):
            wanted = [eval(str(stride), scope) for stride in described.get("stride", ())]
            places = zip(value.shape, value.stride(), wanted, strict=False)
            if any(size > 1 and got != stride for size, got, stride in places):
                raise InputError(
                    f"argument {described['name']}: packaged with strides {tuple(wanted)}, got "
                    f"{value.stride()}; pass a copy that is laid out so: .contiguous() gives one "
                    "where the example was contiguous"
                )


def _readable(condition: str) -> str:
    """A condition in the terms of a call."""
    named = re.sub(r"L\['(\w+)'\]", r"\1", condition)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".shape[\1]", named)


def _check_input(value: torch.Tensor, described: Mapping[str, Any], target: str) -> None:
    name, sizes = described["name"], described["shape"]
    if value.layout != torch.strided or (target == "cpu" and value.device.type != "cpu"):
        raise InputError(
            f"argument {name}: packaged for target {target} with plain tensors, got one of layout "
            f"{value.layout} on {value.device}"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != described["dtype"]:
        raise InputError(f"argument {name}: packaged with dtype {described['dtype']}, got {dtype}")
    fits = value.dim() == len(sizes) and all(
        size == got if isinstance(size, int) else got > 0
        for size, got in zip(sizes, value.shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"argument {name}: packaged with shape [{', '.join(map(str, sizes))}], got "
            f"{tuple(value.shape)}; export and package with examples of that size"
        )


def load(path: str | os.PathLike[str]) -> LoadedPackage:
    """Load a package, with the ops that it needs.

    The file is read whole and held against its checksums. Nothing of it runs before everything that
    it needs was found here.

    Raises:
        PackageError: the file is no whole package of dsa_compile, or torch refuses it.
        ProviderError: the package needs another target, another torch, or ops that are not here;
            lists every need with its mend.
    """
    metadata = read_metadata(path)
    needs = [*_machine_needs(metadata), *_op_needs(metadata)]
    if needs:
        raise ProviderError(f"the package {os.fspath(path)}", needs)
    try:
        model = torch._inductor.aoti_load_package(os.fspath(path))
    except Exception as fault:  # noqa: BLE001 - torch raises many kinds
        text = (str(fault).strip().splitlines() or [""])[0]
        raise PackageError(
            f"{path}: torch cannot load this package: {text}; package the program again here"
        ) from fault
    return LoadedPackage(model, metadata)


def _machine_needs(metadata: PackageMetadata) -> list[Need]:
    needs = []
    here = torch_version()
    if here.split(".")[:2] != metadata.torch.split(".")[:2]:
        needs.append(
            Need(
                f"it was made with torch {metadata.torch}, and this is {here}",
                f"package the program with torch {here}, or run torch {metadata.torch}",
            )
        )
    again = "package the program on a machine of this kind"
    if metadata.machine != platform.machine():
        needs.append(
            Need(f"it was made for {metadata.machine}, and this is {platform.machine()}", again)
        )
    elif missing := sorted({*metadata.features} - {*cpu_features()}):
        needs.append(
            Need(
                f"it was made on a processor with {', '.join(missing)}, which this one lacks", again
            )
        )
    if metadata.target != "cpu":
        if not torch.cuda.is_available():
            needs.append(
                Need(
                    f"it was made for target {metadata.target}, and there is no GPU here",
                    "run it on such a GPU, or package the program from the CPU",
                )
            )
        elif (found := Target.detect("cuda").name) != metadata.target:
            needs.append(
                Need(f"it was made for target {metadata.target}, and the GPU is {found}", again)
            )
    return needs


def _op_needs(metadata: PackageMetadata) -> list[Need]:
    """Load the libraries that a package names, and look for its ops."""
    failed = {}
    for name in metadata.libraries:
        try:
            importlib.import_module(name)
        except ImportError as fault:
            failed[name] = str(fault)
    needs = [
        Need(
            f"the op library {name} cannot be imported ({why})",
            f"install dsa-compile {metadata.version}, which has it",
        )
        for name, why in failed.items()
    ]
    for op in metadata.ops:
        name, _, overload = op.partition(".")
        if torch._C._dispatch_has_kernel(f"{name}.{overload}" if overload else name):
            continue
        needs.append(
            Need(
                f"the op {op} is not registered here",
                "import the library that registers it before dsa_compile.load",
            )
        )
    return needs
