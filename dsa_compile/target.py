"""What can run here, and for which model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from dsa_compile.config import Config, near_miss
from dsa_compile.errors import ConfigError, Need, ProviderError

# Each provider's device types; None serves any device.
SERVED: dict[str, frozenset[str] | None] = {
    "cpu": frozenset({"cpu"}),
    "reference": None,
    "triton": frozenset({"cuda"}),
    "deepgemm": frozenset({"cuda"}),
    "deepselect": frozenset({"cuda"}),
}
_DEEP = ("deepgemm", "deepselect")
ARCHITECTURES = tuple(f"sm{n}" for n in (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121))
PACKAGES = ("torch", "triton", "deep_gemm", "deep_select")
_OLDEST_TRITON = (3, 4)


@cache
def _installed() -> Mapping[str, str]:
    """Version of each package of PACKAGES that can be imported; nothing is imported."""
    distributions = importlib.metadata.packages_distributions()
    found = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        names = distributions.get(package, [])
        found[package] = importlib.metadata.version(names[0]) if names else "unknown"
    return found


@dataclass(frozen=True)
class Target:
    """A device to compile for, and the packages that were found for it.

    Attributes:
        name: ``"cpu"``, or ``"sm90"`` and its kin.
        device: what the device calls itself; empty where it was only named.
        packages: version of each installed package that a provider may need.
    """

    name: str
    device: str = ""
    packages: Mapping[str, str] = field(default_factory=_installed)

    def __post_init__(self) -> None:
        known = ("cpu", *ARCHITECTURES)
        if self.name not in known:
            raise ConfigError(
                f"target must be one of {', '.join(map(repr, known))}, got {self.name!r}"
                + near_miss(self.name, known)
            )

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Target:
        """The target of a device: the current GPU if there is one, else the CPU.

        Raises:
            ConfigError: the device is of a kind, or of a compute capability, that is not known.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cpu":
            return cls("cpu", "CPU")
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"no target is known for device {str(device)!r} here")
        major, minor = torch.cuda.get_device_capability(device)
        return cls(f"sm{major}{minor}", torch.cuda.get_device_name(device))

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, None for the CPU."""
        number = re.fullmatch(r"sm(\d+)(\d)", self.name)
        return (int(number[1]), int(number[2])) if number else None

    def needs(self, provider: str) -> tuple[Need, ...]:
        """What a provider lacks on this target, each with its mend."""
        if provider in ("cpu", "reference"):
            return ()
        if provider == "triton":
            return tuple(self._triton_needs())
        from dsa_compile.kernels.deep_package import provider_needs

        return tuple(Need(*need) for need in provider_needs(self.capability, self.packages))

    def _triton_needs(self) -> list[Need]:
        needs = []
        version = self.packages.get("triton")
        if version is None:
            needs.append(Need("Triton is not installed", "install it: pip install triton"))
        elif _numbers(version) < _OLDEST_TRITON:
            oldest = ".".join(map(str, _OLDEST_TRITON))
            needs.append(Need(f"Triton {version} is too old", f"install {oldest} or newer"))
        if self.capability is not None and self.capability < (8, 0):
            needs.append(
                Need(
                    f"the Triton kernels run on GPUs from sm80 on, and the target is {self.name}",
                    "ask for provider='reference'",
                )
            )
        if self.capability is None and not interpreted():
            needs.append(
                Need(
                    "the Triton kernels run on NVIDIA GPUs from sm80 on, and the target is the CPU",
                    "use a GPU, or ask for provider='cpu'",
                )
            )
        return needs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def interpreted() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's own interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def devices(model: nn.Module) -> frozenset[str]:
    """Device types of the model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(t.device.type for t in tensors)


def device_of(model: nn.Module) -> torch.device:
    """The GPU that a model is on, or the CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def choose_provider(config: Config, model: nn.Module) -> str:
    """Name of the provider that serves ``model`` under ``config``.

    Raises:
        ProviderError: lists every unmet need of the request, each with its mend.
    """
    return provider_for(config, devices(model), device_of(model))


def provider_for(config: Config, held: frozenset[str], device: torch.device) -> str:
    """Name of the provider that serves tensors on devices of the types ``held``, under ``config``.

    Args:
        config: options.
        held: device types of the tensors that matter.
        device: the GPU among them, or the CPU.

    Raises:
        ProviderError: lists every unmet need of the request, each with its mend.
    """
    automatic = "triton" if held == {"cuda"} else "cpu"
    wanted = automatic if config.provider == "auto" else config.provider
    target = Target.detect(device)
    needs = list(target.needs(wanted))
    served = SERVED.get(wanted)
    if wanted == "triton" and interpreted():
        served = None
    if served is not None:
        # Of its own device the target has spoken already.
        for kind in sorted(held - served - {target.name}):
            needs.append(
                Need(
                    f"the model has tensors on {kind!r}, which provider {wanted!r} does not run",
                    f"move it with model.to({min(served)!r}), or ask for provider='reference'",
                )
            )
    if wanted in _DEEP and "cuda" in held:
        around = "; it runs what DeepGEMM and DeepSelect have no kernels for"
        needs += [Need(need.what + around, need.mend) for need in target.needs("triton")]
    capability = target.capability
    if wanted == "triton" and config.precision == "fp8" and capability and capability < (8, 9):
        needs.append(
            Need(
                f"fp8 operands need a GPU from sm89 on, and the target is {target.name}",
                "ask for precision='mxfp4' or 'preserve'",
            )
        )
    if needs:
        asked = f"provider={config.provider!r}, precision={config.precision!r}"
        raise ProviderError(asked, needs)
    return wanted
