"""What can go wrong for a user, as one family of exceptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class DsaError(Exception):
    """Base of every error that dsa_compile raises on purpose."""


class ConfigError(DsaError, ValueError):
    """An option is unknown or its value cannot be used; the message names each one."""


class CaptureError(DsaError, RuntimeError):
    """The model could not be captured as a graph."""


class PassError(DsaError, RuntimeError):
    """A pass failed on a captured graph, which is a fault of dsa_compile."""


class InputError(DsaError, ValueError):
    """A call differs from what was captured; the message names the argument."""


class TrainingModeError(DsaError, RuntimeError):
    """The model, or one of its submodules, is in training mode."""


class GradientError(DsaError, RuntimeError):
    """An input asks for gradients; optimised models only run forward."""


class PackageError(DsaError, RuntimeError):
    """A file is no usable program or package, or a package does not fit this machine."""


class NoMatchError(DsaError, RuntimeError):
    """Fewer indexers were matched than ``require_match`` asks for."""


@dataclass(frozen=True)
class Need:
    """One unmet need of a request: what is missing, and how to mend it."""

    what: str
    mend: str


class ProviderError(DsaError, RuntimeError):
    """The requested provider cannot serve the model here.

    Attributes:
        needs: every unmet need, each with its mend.
    """

    def __init__(self, request: str, needs: Iterable[Need]) -> None:
        self.request = request
        self.needs = tuple(needs)
        lines = [f"{request} cannot be served here:"]
        lines += [f"  - {need.what}; {need.mend}" for need in self.needs]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ProviderError], tuple[str, tuple[Need, ...]]]:
        return type(self), (self.request, self.needs)


class NoMatchWarning(UserWarning):
    """Nothing was matched; the message shows the nearest miss."""


class SlowPathWarning(UserWarning):
    """A call ran, wholly or in part, as the unoptimised model."""
