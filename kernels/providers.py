"""Which namespace of ``torch.ops`` holds each provider's ops, and how to have them registered."""

from __future__ import annotations

import importlib

# The reference provider runs the canonical ops themselves: they are the oracle.
NAMESPACES = {
    "reference": "dsa",
    "cpu": "dsa_cpu",
    "triton": "dsa_triton",
    "deepgemm": "dsa_deep",
    "deepselect": "dsa_deep",
}
_LATE = {"triton": "triton", "deepgemm": "deep", "deepselect": "deep"}


def load(provider: str) -> str:
    """The namespace of a provider, its ops registered.

    Raises:
        ValueError: the provider is not known.
        ImportError: a package that it needs is missing.
    """
    if provider not in NAMESPACES:
        known = ", ".join(sorted(NAMESPACES))
        raise ValueError(f"provider {provider!r} is not known; known are {known}")
    if provider in _LATE:
        importlib.import_module(f"{__package__}.{_LATE[provider]}")
    return NAMESPACES[provider]
