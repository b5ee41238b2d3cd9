"""Registers one implementation of the canonical ops in a namespace of ``torch.ops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .results import RESULTS, Results
from .schemas import SCHEMAS

Kernel = Callable[..., Any]


class _InferenceOnly(torch.autograd.Function):
    """Identity on values whose backward says that a selection has no gradient."""

    @staticmethod
    def forward(ctx: Any, name: str, values: Tensor, *inputs: Tensor) -> Tensor:
        ctx.op_name = name
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.op_name} has no gradient: the compiled indexer is for inference. "
            "Detach its values, or run the uncompiled model for training."
        )


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    first = args[0]
    assert isinstance(first, Tensor)
    return first


def _fake(results: Callable[..., Results]) -> Kernel:
    def fake(*args: Any, **kwargs: Any) -> Any:
        like = _first_tensor(args)
        outs = tuple(like.new_empty(r.shape, dtype=r.dtype) for r in results(*args, **kwargs))
        return outs if len(outs) > 1 else outs[0]

    return fake


def _checked(results: Callable[..., Results], kernel: Kernel) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        results(*args, **kwargs)
        device = _first_tensor(args).device.type
        if torch.is_autocast_enabled(device):
            # Scores are promised in fp32: an autocast region must not lower the products inside.
            with torch.autocast(device, enabled=False):
                return kernel(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def _autograd(name: str, op: Any) -> Kernel:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if not any(t.requires_grad for t in tensors):
            return out
        outs = out if isinstance(out, tuple) else (out,)
        marked = tuple(
            _InferenceOnly.apply(name, t, *tensors) if t.is_floating_point() else t for t in outs
        )
        return marked if isinstance(out, tuple) else marked[0]

    return run


def register(
    namespace: str, kernels: Mapping[str, Kernel], dispatch_key: str
) -> torch.library.Library:
    """Defines every canonical op in ``namespace`` with fakes, checks and ``kernels``.

    Args:
        namespace: The name under ``torch.ops``.
        kernels: Op name -> function with the op's signature; one for every canonical op.
        dispatch_key: Where the kernels go: ``"CPU"``, or ``"CompositeExplicitAutograd"`` for all.

    Returns:
        The library; the ops live as long as it does.
    """
    library = torch.library.Library(namespace, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        op = getattr(getattr(torch.ops, namespace), name).default
        library.impl(name, _checked(RESULTS[name], kernels[name]), dispatch_key)
        library.impl(name, _autograd(f"{namespace}::{name}", op), "Autograd", with_keyset=True)
        torch.library.register_fake(f"{namespace}::{name}", _fake(RESULTS[name]), lib=library)
    return library
