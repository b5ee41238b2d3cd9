"""Registers one implementation of the canonical ops in a namespace of ``torch.ops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def packed(outs: tuple[Tensor, ...]) -> Any:
    """Results as an op returns them: none, one, or a tuple."""
    return outs if len(outs) > 1 else outs[0] if outs else None


def _fake(results: Callable[..., Results]) -> Kernel:
    def fake(*args: Any, **kwargs: Any) -> Any:
        like = _first_tensor(args)
        outs = tuple(like.new_empty(r.shape, dtype=r.dtype) for r in results(*args, **kwargs))
        return packed(outs)

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
        if out is None or not any(t.requires_grad for t in tensors):
            return out
        outs = out if isinstance(out, tuple) else (out,)
        marked = tuple(
            _InferenceOnly.apply(name, t, *tensors) if t.is_floating_point() else t for t in outs
        )
        return marked if isinstance(out, tuple) else marked[0]

    return run


def _versioned(op: Any, mutated: Sequence[int]) -> Kernel:
    """Tells autograd and compilers that the arguments at ``mutated`` were written to."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place in mutated:
            torch.autograd.graph.increment_version(args[place])
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        return op.redispatch(below, *args, **kwargs)

    return run


def define(
    library: torch.library.Library,
    name: str,
    schema: str,
    *,
    kernel: Kernel,
    fake: Kernel,
    dispatch_key: str,
) -> Any:
    """Defines one op in a library, with its kernel and fake, for inference only.

    Arguments that the schema calls mutated must be positional.

    Returns:
        The op's default overload.
    """
    full = f"{library.ns}::{name}"
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, library.ns), name).default
    library.impl(name, kernel, dispatch_key)
    library.impl(name, _autograd(full, op), "Autograd", with_keyset=True)
    mutated = [
        place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if mutated:
        library.impl(name, _versioned(op, mutated), "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(full, fake, lib=library)
    return op


def register(
    namespace: str,
    kernels: Mapping[str, Kernel],
    dispatch_key: str,
    schemas: Mapping[str, str] = SCHEMAS,
    results: Mapping[str, Callable[..., Results]] = RESULTS,
    kind: str = "DEF",
) -> torch.library.Library:
    """Defines every op of ``schemas`` in ``namespace`` with fakes, checks and ``kernels``.

    Args:
        namespace: The name under ``torch.ops``.
        kernels: Op name -> function with the op's signature; one for every op.
        dispatch_key: Where the kernels go: ``"CPU"``, or ``"CompositeExplicitAutograd"`` for all.
        schemas: Op name -> signature.
        results: Op name -> checks, shapes and dtypes of the results.
        kind: ``"DEF"``, or ``"FRAGMENT"`` for more ops of a namespace.

    Returns:
        The library; the ops live as long as it does.
    """
    library = torch.library.Library(namespace, kind)
    for name, schema in schemas.items():
        define(
            library,
            name,
            schema,
            kernel=_checked(results[name], kernels[name]),
            fake=_fake(results[name]),
            dispatch_key=dispatch_key,
        )
    return library
