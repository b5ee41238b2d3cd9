"""Which namespace of ``torch.ops`` holds each provider's ops, and how to have them registered."""

from __future__ import annotations

import importlib

import torch

# The reference provider runs the canonical ops themselves: they are the oracle.
NAMESPACES = {
    "reference": "dsa",
    "cpu": "dsa_cpu",
    "triton": "dsa_triton",
    "deepgemm": "dsa_deep",
    "deepselect": "dsa_deep",
}
# Ops that a CUDA graph may not capture, by provider, and why. DeepGEMM zeroes a workspace at its
# first call on a stream, which a capture would record; the schedule of the sparse scorer is made
# from sizes that the host reads.
_DEEP = {
    "indexer_select": "DeepGEMM zeroes a workspace at its first call on a stream",
    "indexer_publish": "DeepGEMM zeroes a workspace at its first call on a stream",
    "indexer_block_max": "DeepGEMM zeroes a workspace at its first call on a stream",
    "sparse_mqa_logits": "DeepGEMM makes its schedule outside a capture",
    "mxfp4_sparse_mqa_logits": "DeepGEMM makes its schedule outside a capture",
}
_UNCAPTURABLE = {"deepgemm": _DEEP, "deepselect": _DEEP}
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


def serving_provider(provider: str) -> str:
    """Who runs the ops around the scores (queries, key caches, pages) for a provider.

    DeepGEMM and DeepSelect have none of them: our own kernels run on the same GPU.
    """
    if NAMESPACES.get(provider) != "dsa_deep":
        return provider
    return "triton" if torch.cuda.is_available() else "cpu"


def reads_fp8(provider: str) -> bool:
    """Whether a provider's scorers take fp8 queries and keys as they are."""
    if NAMESPACES.get(provider) == "dsa_deep":
        return True
    if provider != "triton":
        return False
    # Without a GPU the kernels run in Triton's interpreter, or are compiled for another machine.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def uncapturable(provider: str) -> dict[str, str]:
    """Ops of a provider, as ``namespace::op``, that a CUDA graph may not capture, and why."""
    space = NAMESPACES.get(provider, provider)
    return {f"{space}::{op}": why for op, why in _UNCAPTURABLE.get(provider, {}).items()}


def known_uncapturable() -> tuple[str, ...]:
    """The same of every provider, by name alone: what a host must know before it has a graph."""
    return tuple(dict.fromkeys(op for name in NAMESPACES for op in uncapturable(name)))
