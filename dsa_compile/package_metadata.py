"""Where a program or a package comes from, and what it needs to run."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsa_compile.config import Config
from dsa_compile.errors import PackageError
from dsa_compile.report import Report

FORMAT = 1
KEY = "dsa_compile"
FILE = "dsa_compile.json"
"""Name of the metadata among the extra files of a package."""
_LISTS = ("features", "ops", "libraries", "arguments", "inputs", "conditions")
_TEXTS = ("version", "torch", "target", "machine")
# What every text in a list looks like.
_FORMS = {
    "features": r"\w+",
    "ops": r"\w+::\w+(\.\w+)?",
    "libraries": r"dsa_compile(\.\w+)+",
    "arguments": r"\w+",
    "conditions": r".+",
}


def our_version() -> str:
    """Version of the installed distribution."""
    import importlib.metadata

    try:
        return importlib.metadata.version("dsa-compile")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


_USED = re.compile(
    r"(avx|amx|sse|ssse|bmi|fma|f16c|popcnt|movbe|adx|abm|vaes|vpclmul|gfni|sve|asimd|sm[34]|i8mm|bf16)"
    r"\w*"
)


def cpu_features() -> tuple[str, ...]:
    """Names of the processor's instruction sets that a compiler makes use of, as Linux has them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    names = line[1].split() if line else []
    return tuple(sorted(name for name in set(names) if _USED.fullmatch(name)))


def torch_version() -> str:
    """Version of torch without the name of its build."""
    import torch

    return torch.__version__.partition("+")[0]


@dataclass(frozen=True)
class Provenance:
    """What made an exported program.

    Attributes:
        version: of dsa_compile.
        torch: version of torch.
        config: the options, by name.
        report: what was looked at and what became of it.
    """

    version: str
    torch: str
    config: Mapping[str, Any]
    report: Report

    @classmethod
    def of(cls, config: Config, report: Report) -> Provenance:
        """The provenance of a program that is made now."""
        options = json.loads(json.dumps(dataclasses.asdict(config)))
        return cls(our_version(), torch_version(), options, report)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": FORMAT,
            "version": self.version,
            "torch": self.torch,
            "config": dict(self.config),
            "report": self.report.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """What ``to_dict`` gave.

        Raises:
            PackageError: it is of another format, or a part is missing or of another kind.
        """
        _check_format(data)
        try:
            _check_texts(data, ("version", "torch"))
            report = Report.from_dict(data["report"])
            return cls(data["version"], data["torch"], dict(data["config"]), report)
        except (KeyError, TypeError, AttributeError) as fault:
            raise PackageError(
                f"the provenance is damaged: {type(fault).__name__}: {fault}; export the model "
                "again"
            ) from fault


def attach(program: Any, provenance: Provenance) -> None:
    """Write a provenance into a program; ``torch.export`` saves and loads it with the graph."""
    meta = program.graph_module.meta
    meta["custom"] = {**meta.get("custom", {}), KEY: provenance.to_dict()}


def provenance_of(program: Any) -> Provenance | None:
    """The provenance of a program, None if dsa_compile did not make it."""
    data = program.graph_module.meta.get("custom", {}).get(KEY)
    return None if data is None else Provenance.from_dict(data)


def report_of(program: Any) -> Report:
    """What was found in an exported program, and what became of it.

    Raises:
        PackageError: dsa_compile did not export the program.
    """
    made = provenance_of(program)
    if made is None:
        raise PackageError("dsa_compile did not export this program; dsa_compile.export does")
    return made.report


@dataclass(frozen=True)
class PackageMetadata:
    """What a package is made for, what it needs, and where it comes from.

    Attributes:
        version: of dsa_compile; ``torch``: of torch.
        target: ``"cpu"``, or ``"sm90"`` and its kin.
        machine: architecture of the host, such as ``"x86_64"``.
        features: of the host's processor, those that a compiler makes use of.
        triton: version of Triton whose kernels are inside, None if there are none.
        ops: full names of the ops outside PyTorch that are called and not contained.
        libraries: Python modules of dsa_compile that register some of ``ops``.
        arguments: names of the arguments of a call.
        inputs: the tensors among the inputs, in order: name, dtype, and each dimension as a number
            or an expression.
        conditions: what the sizes of a call must meet besides, as Python expressions on the
            arguments ``L``: AOTInductor checks none of it.
        provenance: of the program inside, None if dsa_compile did not export it.
    """

    version: str
    torch: str
    target: str
    machine: str = field(default_factory=platform.machine)
    features: tuple[str, ...] = ()
    triton: str | None = None
    ops: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()
    conditions: tuple[str, ...] = ()
    provenance: Provenance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {name: list(data[name]) for name in _LISTS}
        data["provenance"] = None if self.provenance is None else self.provenance.to_dict()
        return {"format": FORMAT, **data}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> PackageMetadata:
        """What ``to_json`` gave.

        Raises:
            PackageError: it is no such text, of another format, or a part is missing or of another
                kind.
        """
        try:
            data = json.loads(text)
        except ValueError as fault:
            raise PackageError(
                f"the metadata is damaged: {fault}; package the program again"
            ) from fault
        _check_format(data)
        del data["format"]
        try:
            data |= {name: tuple(data[name]) for name in _LISTS}
            _check_kinds(data)
            if data["provenance"] is not None:
                data["provenance"] = Provenance.from_dict(data["provenance"])
            return cls(**data)
        except (KeyError, TypeError, SyntaxError) as fault:
            raise PackageError(
                f"the metadata is damaged: {type(fault).__name__}: {fault}; package the program "
                "again"
            ) from fault


def _check_texts(data: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise TypeError where one of these is no text."""
    if bad := [name for name in names if not isinstance(data[name], str)]:
        raise TypeError(f"{bad[0]} must be a text, got {data[bad[0]]!r}")


def _check_kinds(data: Mapping[str, Any]) -> None:
    """Raise TypeError or SyntaxError where a part is not what a package holds there."""
    _check_texts(data, _TEXTS)
    for name, form in _FORMS.items():
        for text in data[name]:
            if not isinstance(text, str) or not re.fullmatch(form, text):
                raise TypeError(f"{name} cannot hold {text!r}")
    for condition in data["conditions"]:
        compile(condition, "<condition>", "eval")
    for described in data["inputs"]:
        _check_texts(described, ("name", "dtype"))
        if not all(isinstance(size, (int, str)) for size in described["shape"]):
            raise TypeError(f"{described['name']} has the shape {described['shape']!r}")


def _check_format(data: Any) -> None:
    if not isinstance(data, Mapping):
        raise PackageError("the metadata is damaged: it holds no names; package the program again")
    if data.get("format") != FORMAT:
        raise PackageError(
            f"the metadata has format {data.get('format')!r} and this version reads {FORMAT}; "
            f"install the version of dsa-compile that made it ({data.get('version', 'unknown')})"
        )
