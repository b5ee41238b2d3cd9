"""What can run here, and for which model."""

from __future__ import annotations

from torch import nn

from dsa_compile.config import Config
from dsa_compile.errors import Need, ProviderError

# Each provider's device types; None serves any device.
SERVED: dict[str, frozenset[str] | None] = {"cpu": frozenset({"cpu"}), "reference": None}


def devices(model: nn.Module) -> frozenset[str]:
    """Device types of the model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(t.device.type for t in tensors)


def choose_provider(config: Config, model: nn.Module) -> str:
    """Name of the provider that serves ``model`` under ``config``.

    Raises:
        ProviderError: lists every unmet need of the request, each with its mend.
    """
    wanted = "cpu" if config.provider == "auto" else config.provider
    needs = []
    if wanted not in SERVED:
        needs.append(
            Need(
                f"provider {wanted!r} has no kernels in this version",
                "ask for provider='cpu', or 'reference' on any device",
            )
        )
    elif (served := SERVED[wanted]) is not None:
        for device in sorted(devices(model) - served):
            needs.append(
                Need(
                    f"the model has tensors on {device!r}, which provider {wanted!r} does not run",
                    "move it with model.to('cpu'), or ask for provider='reference'",
                )
            )
    if config.precision != "preserve":
        needs.append(
            Need(
                f"precision {config.precision!r} has no kernels in this version",
                "ask for precision='preserve'",
            )
        )
    if needs:
        asked = f"provider={config.provider!r}, precision={config.precision!r}"
        raise ProviderError(asked, needs)
    return wanted
