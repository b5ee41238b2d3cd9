"""The options of ``optimize``, ``explain``, ``verify`` and of ``backend="dsa"``."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.errors import ConfigError

PROVIDERS = ("auto", "cpu", "reference", "triton", "deepgemm", "deepselect")
PRECISIONS = ("preserve", "fp8", "mxfp4")
ON_ERROR = ("raise", "warn")
_OP = re.compile(r"\w+::\w+(\.\w+)?")


def _choice(value: object, known: tuple[str, ...]) -> str | None:
    if isinstance(value, str) and value in known:
        return None
    wanted = f"must be one of {', '.join(map(repr, known))}, got {value!r}"
    return wanted + near_miss(value, known)


def near_miss(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name nearest to ``name``, or nothing."""
    close = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _op_names(value: object) -> str | None:
    if not isinstance(value, tuple):
        return f"must be a tuple of names of ops, got {value!r}"
    bad = [name for name in value if not (isinstance(name, str) and _OP.fullmatch(name))]
    return f"must hold names like 'namespace::op', got {', '.join(map(repr, bad))}" if bad else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Config:
    """Options, checked when the object is made.

    Attributes:
        provider: whose kernels run. ``"auto"`` takes what fits the model's device, ``"cpu"`` or
            ``"triton"``; ``"reference"`` (plain PyTorch, slow, for comparison), and ``"deepgemm"``
            or ``"deepselect"`` (one and the same: both packages, on Blackwell, for fp8 or MXFP4
            operands) are asked for by name.
        precision: ``"preserve"`` multiplies in the model's own dtype and accumulates in fp32.
            ``"fp8"`` and ``"mxfp4"`` quantise the queries and keys of every matched indexer, which
            changes picks: ``verify`` says how many.
        require_match: ``True`` demands at least one matched indexer, a number demands that many;
            ``False`` only warns when nothing matched.
        dynamic: whether sizes stay symbolic. ``None`` lets PyTorch decide size by size.
        probe_memory_bytes: most memory that one proof's probe may take. Static sizes that need
            more are proven on smaller ones that stand for them, where there are such.
        probe_seed: seed of the probes.
        probe_draws: number of random probes that a proposal must pass.
        chunk_bytes: what one CPU kernel may hold beyond its inputs and results while the model
            runs; None leaves the kernels' own limit.
        on_error: what happens when a pass fails: ``"raise"``, or ``"warn"``, which leaves the graph
            as it was.
        uncapturable: ops that no CUDA graph may capture, as ``"namespace::op"`` or
            ``"namespace::op.overload"``, besides those that are known not to be.

    Raises:
        ConfigError: names every option whose value cannot be used.
    """

    provider: str = "auto"
    precision: str = "preserve"
    require_match: bool | int = False
    dynamic: bool | None = True
    probe_memory_bytes: int = 2 << 30
    probe_seed: int = 0
    probe_draws: int = 3
    chunk_bytes: int | None = None
    on_error: str = "raise"
    uncapturable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = {
            "provider": _choice(self.provider, PROVIDERS),
            "precision": _choice(self.precision, PRECISIONS),
            "require_match": None
            if isinstance(self.require_match, bool)
            or (_is_int(self.require_match) and self.require_match >= 0)
            else f"must be True, False or a number of indexers, got {self.require_match!r}",
            "on_error": _choice(self.on_error, ON_ERROR),
            "uncapturable": _op_names(self.uncapturable),
            "dynamic": None
            if self.dynamic is None or isinstance(self.dynamic, bool)
            else f"must be True, False or None, got {self.dynamic!r}",
        }
        for name, least in (("probe_memory_bytes", 1), ("probe_seed", 0), ("probe_draws", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                faults[name] = f"must be a whole number of at least {least}, got {value!r}"
        if self.chunk_bytes is not None and (not _is_int(self.chunk_bytes) or self.chunk_bytes < 1):
            faults["chunk_bytes"] = (
                f"must be None or a whole number of at least 1, got {self.chunk_bytes!r}"
            )
        bad = [f"{name}: {fault}" for name, fault in faults.items() if fault]
        if bad:
            raise ConfigError("bad configuration: " + "\n  ".join(bad))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Config:
        """A configuration from plain names and values.

        Raises:
            ConfigError: an option is unknown (with the nearest known name) or its value is bad.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            lines = [f"unknown option {name!r}{near_miss(name, known)}" for name in unknown]
            lines.append(f"known options: {', '.join(known)}")
            raise ConfigError("\n  ".join(lines))
        plain = dict(options)
        if isinstance(plain.get("uncapturable"), list):
            plain["uncapturable"] = tuple(plain["uncapturable"])
        return cls(**plain)

    @property
    def matches_needed(self) -> int:
        """How many indexers must be matched."""
        return int(self.require_match)


def as_config(config: Config | Mapping[str, Any] | None) -> Config:
    """The configuration meant by ``config``: None is the default, a mapping names options.

    Raises:
        ConfigError: ``config`` is something else, or holds an unknown or bad option.
    """
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config.from_options(config)
    raise ConfigError(f"config must be a Config, a mapping or None, got {type(config).__name__}")
