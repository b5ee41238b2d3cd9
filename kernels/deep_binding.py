"""Finds the functions of an installed DeepGEMM or DeepSelect and learns how each is called.

Releases and rebuilds spell the same function as a Python function, as a pybind11 function (whose
signature is the first line of its docstring) or as an operator of ``torch.ops``; a tensor and its
scale are one tuple or two arguments. A signature is read once, its parameters are given *roles*
whose names do not change, and calls name roles. What cannot be read is a need with its mend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .deep_needs import Need, Needs

_ROLES: Mapping[str, tuple[str, ...]] = {
    "q": ("q", "q_values", "q_fp"),
    "q_scale": ("q_sf", "q_scale"),
    "kv": ("kv", "kv_packed", "kv_fp"),
    "kv_scale": ("kv_sf", "kv_scale", "kv_scales"),
    "kv_cache": ("kv_cache", "fused_kv_cache"),
    "weights": ("weights",),
    "ks": ("cu_seq_len_k_start", "cu_seqlen_ks", "ks"),
    "ke": ("cu_seq_len_k_end", "cu_seqlen_ke", "ke"),
    "num_kv_tokens": ("num_kv_tokens",),
    "sparse_indices": ("sparse_kv_block_indices", "sparse_indices"),
    "qk_dtype": ("qk_dtype",),
    "sparse_block_kv": ("sparse_block_kv",),
    "use_unaligned_ks": ("use_unaligned_ks",),
    "metadata": ("metadata",),
    "num_max_sparse_blocks": ("num_max_sparse_blocks",),
    "context_lens": ("context_lens",),
    "block_table": ("block_table", "block_tables"),
    "indices": ("indices",),
    "page_kv": ("page_kv",),
    "max_seqlen_k": ("max_seqlen_k",),
    "clean_logits": ("clean_logits",),
    "logits_dtype": ("logits_dtype", "logits_type"),
    "schedule_meta": ("schedule_meta",),
    # DeepSelect
    "input": ("input",),
    "topk": ("topk",),
    "sorted": ("sorted",),
    "end": ("end",),
    "indices_type": ("indices_type",),
    "sorted_index": ("sorted_index",),
    "idx_oob_fill_value": ("idx_oob_fill_value",),
    "return_value": ("return_value",),
    "abort_when_nan_found": ("abort_when_nan_found",),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_PAIRS = {"q": "q_scale", "kv": "kv_scale"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a bound function; ``role`` is None where its meaning is not known."""

    name: str
    role: str | None
    required: bool


@dataclass(frozen=True)
class Spec:
    """A function that is looked for.

    Attributes:
        names: newest first.
        roles: those that every call gives.
        options: those that a call gives where the function asks for them.
        plain_q: the names whose queries come without a scale, not even in a tuple.
    """

    names: tuple[str, ...]
    roles: tuple[str, ...]
    options: tuple[str, ...] = ()
    plain_q: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bound:
    """A function of the installed package, called by roles."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    plain_q: bool = False

    @property
    def roles(self) -> frozenset[str]:
        """Roles that the function has a parameter for."""
        return frozenset(p.role for p in self.parameters if p.role is not None)

    def __call__(self, **values: Any) -> Any:
        """Calls the function; ``q`` and ``kv`` are tuples of data and scale (None: no scale).

        Roles that the function does not have must not be given; optional ones may be left out.
        """
        given = dict(values)
        for whole, part in _PAIRS.items():
            if whole not in given:
                continue
            if part in self.roles:
                given[whole], given[part] = given[whole]
            elif whole == "q" and self.plain_q:
                given[whole] = given[whole][0]
        named = {p.name: given.pop(p.role) for p in self.parameters if p.role in given}
        if given:
            raise TypeError(f"{self.name} has no parameter for {', '.join(sorted(given))}")
        return self.function(**named)


def _split(text: str) -> list[str]:
    """Splits parameters at commas outside of brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, ""
    for at, char in enumerate(text):
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _from_docstring(function: Any) -> list[tuple[str, bool]] | None:
    """Names of pybind11 parameters, and whether each is required."""
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    found = re.match(r"\w+\((.*)\)\s*->", lines[0].strip()) if lines else None
    if found is None:
        return None
    parameters = []
    for part in _split(found[1]):
        name = re.match(r"\w+", part)
        if name is None:
            return None
        # A default follows the annotation, whose own brackets may hold an equals sign.
        parameters.append((name[0], not re.search(r"=[^\]]*$", part)))
    return parameters


def read_signature(function: Any) -> list[tuple[str, bool]] | None:
    """Parameter names of a function and whether each is required; None if it does not say."""
    overloads = getattr(function, "overloads", None)
    if callable(overloads):
        names = overloads()
        if len(names) != 1:
            return None
        schema = getattr(function, names[0])._schema
        return [(a.name, not a.has_default_value()) for a in schema.arguments]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _from_docstring(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.kind in kinds for p in signature.parameters.values()):
        return _from_docstring(function)
    empty = inspect.Parameter.empty
    return [(p.name, p.default is empty) for p in signature.parameters.values()]


def bind(package: str, spec: Spec, sources: Iterable[Any]) -> Bound | Need:
    """Binds the first of ``spec.names`` that a source has.

    Args:
        package: name of the package, for the need.
        spec: what is looked for.
        sources: where to look, best first: a module, a namespace of ``torch.ops``.

    Returns:
        The bound function, or the need that is unmet: the function is missing, or it has a
        signature whose meaning is not known.
    """
    mend = f"install a release of {package} that is known here, or use provider='triton'"
    for name in spec.names:
        for source in sources:
            function = getattr(source, name, None)
            if function is None:
                continue
            signature = read_signature(function)
            if signature is None:
                return Need(f"{package}: {name} does not say what it takes", mend)
            parameters = tuple(Parameter(n, _ROLE_OF.get(n), need) for n, need in signature)
            unknown = [p.name for p in parameters if p.required and p.role is None]
            known = {p.role for p in parameters}
            missing = [role for role in spec.roles if role not in known]
            if unknown or missing:
                faults = [f"parameter {n!r} is not known" for n in unknown]
                faults += [f"none is {role!r}" for role in missing]
                taken = ", ".join(n for n, _ in signature)
                return Need(f"{package}: {name}({taken}): {'; '.join(faults)}", mend)
            given = {*spec.roles, *spec.options, *_PAIRS.values()}
            extra = [p.name for p in parameters if p.required and p.role not in given]
            if extra:
                return Need(f"{package}: {name} asks for {', '.join(extra)}", mend)
            return Bound(name, function, parameters, name in spec.plain_q)
    return Need(f"{package} has no {' or '.join(spec.names)}", mend)


@dataclass(frozen=True)
class Package:
    """An imported package: its version and where its functions are, best first."""

    name: str
    version: str
    sources: tuple[Any, ...]


def open_package(
    name: str, module: ModuleType | None = None, operator: str | None = None
) -> Package | Need:
    """Imports a package, or takes the operators of its name that something else registered.

    Args:
        name: ``"deep_gemm"`` or ``"deep_select"``.
        module: the package itself, where it goes by another name.
        operator: one of ``torch.ops.<name>`` that serves where the package cannot be imported.
    """
    operators = getattr(torch.ops, name)
    failure = ""
    if module is None:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # An extension may fail in any way for want of a driver.
            failure = f"{type(error).__name__}: {error}"
    if module is not None:
        version = str(getattr(module, "__version__", "") or _installed_version(name))
        return Package(name, version, (module, operators))
    if operator is not None and hasattr(operators, operator):
        return Package(name, "unknown", (operators,))
    return Need(
        f"package {name} cannot be imported ({failure})",
        f"install a build of {name} for this PyTorch and CUDA, or use provider='triton'",
    )


def _installed_version(name: str) -> str:
    owners = importlib.metadata.packages_distributions().get(name, [])
    return importlib.metadata.version(owners[0]) if owners else "unknown"


def compiler_needs() -> Needs:
    """Whether a CUDA compiler is there: DeepGEMM compiles its kernels when they are first used."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [os.path.join(root, "bin", "nvcc") for root in roots if root]
    if shutil.which("nvcc") or any(os.path.exists(path) for path in paths):
        return ()
    for name in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        try:
            if importlib.util.find_spec(name) is not None:
                return ()
        except ModuleNotFoundError:
            continue
    return (
        Need(
            "DeepGEMM compiles at run time, and neither nvcc nor NVRTC was found",
            "install the CUDA toolkit and set CUDA_HOME, or pip install nvidia-cuda-nvrtc",
        ),
    )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, at most three."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
