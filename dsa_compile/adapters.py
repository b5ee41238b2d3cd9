"""The registry of adapters: opaque ops of engines that enter at the canonical ops.

The registry is the only state. It is explicit: entries are listed by ``registered_adapters``, taken
out by ``remove_adapter``, and read once a run of the passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from dsa_compile.config import near_miss
from dsa_compile.errors import ConfigError
from dsa_compile.passes.adapter import OUTPUTS, ROLES, UNWRITTEN, Adapter, full_name

_REGISTERED: dict[str, Adapter] = {}


def register_adapter(
    op: str,
    kind: str,
    roles: Mapping[str, str],
    *,
    masked: float | str = float("-inf"),
    scale: float | str = 1.0,
    block_size: int | str = 0,
    shows: str = "visible",
    outputs: Sequence[str] = OUTPUTS,
    empty: int | None = -1,
    ignored: Sequence[str] = (),
    contract: bool = False,
) -> Adapter:
    """Declare what an opaque op computes, so that models that call it can be rewritten.

    Where the op runs on the CPU, each of its calls is compared with the canonical op on probes, and
    left alone where it differs. Where it has no CPU kernel the declaration is taken at its word,
    and the report says so at every site.

    Args:
        op: ``"namespace::name"``, registered with torch already.
        kind: ``"dense_logits"``, ``"paged_logits"``, ``"candidate_mask"`` or ``"topk"``;
            ``dsa_compile.passes.adapter`` gives roles and layouts of each.
        roles: role -> argument of the op; ``"kv.0"`` is the first of a list ``kv``.
        masked, scale, block_size, shows, outputs, empty, ignored, contract: see ``Adapter``.

    Raises:
        ConfigError: the op is unknown or has an adapter already, a role or an argument is unknown
            (with the nearest known name), or a tensor argument has no role; names each fault.
    """
    adapter = Adapter(
        full_name(op),
        kind,
        tuple(sorted(roles.items())),
        masked,
        scale,
        block_size,
        shows,
        tuple(outputs),
        empty,
        tuple(ignored),
        contract,
    )
    if adapter.op in _REGISTERED:
        raise ConfigError(f"{op} has an adapter already; remove_adapter({op!r}) takes it out")
    faults = [*_option_faults(adapter), *_role_faults(adapter), *_argument_faults(adapter)]
    if faults:
        raise ConfigError(f"bad adapter for {op}: " + "\n  ".join(faults))
    _REGISTERED[adapter.op] = adapter
    return adapter


def remove_adapter(op: str) -> Adapter:
    """Take an adapter out of the registry and return it.

    Raises:
        ConfigError: the op has none.
    """
    try:
        return _REGISTERED.pop(full_name(op))
    except KeyError:
        raise ConfigError(f"{op} has no adapter{near_miss(op, _REGISTERED)}") from None


def registered_adapters() -> Mapping[str, Adapter]:
    """The adapters of now, by name of the op with its overload; a copy."""
    return MappingProxyType(dict(_REGISTERED))


def adapters_text() -> str:
    """What is registered, as stable text for the keys of caches; empty where nothing is."""
    return "\n".join(a.described() for _, a in sorted(_REGISTERED.items()))


def _option_faults(adapter: Adapter) -> list[str]:
    faults = []
    masked = adapter.masked
    if isinstance(masked, str) and masked != UNWRITTEN:
        faults.append(f"masked: must be a number or {UNWRITTEN!r}, got {masked!r}")
    if adapter.shows not in ("visible", "hidden"):
        faults.append(f"shows: must be 'visible' or 'hidden', got {adapter.shows!r}")
    outputs = adapter.outputs
    if not outputs or len(set(outputs)) != len(outputs) or not set(outputs) <= set(OUTPUTS):
        faults.append(f"outputs: must be some of {', '.join(OUTPUTS)}, got {outputs!r}")
    if adapter.empty not in (None, -1):
        faults.append(f"empty: must be -1 or None, got {adapter.empty!r}")
    size = adapter.block_size
    if adapter.kind == "candidate_mask" and isinstance(size, int) and size < 1:
        faults.append("block_size: a candidate mask needs a number or the name of an argument")
    return faults


def _role_faults(adapter: Adapter) -> list[str]:
    if adapter.kind not in ROLES:
        known = ", ".join(map(repr, ROLES))
        return [f"kind: must be one of {known}, got {adapter.kind!r}{_near(adapter.kind, ROLES)}"]
    needed, optional = ROLES[adapter.kind]
    given = [role for role, _ in adapter.roles]
    faults = [
        f"roles: {adapter.kind} has no role {role!r}{_near(role, (*needed, *optional))}"
        for role in given
        if role not in (*needed, *optional)
    ]
    missing = [role for role in needed if role not in given]
    if missing:
        faults.append(f"roles: {adapter.kind} needs {', '.join(map(repr, missing))}")
    if adapter.kind == "paged_logits" and ("row_end" in given) == ("context_lens" in given):
        faults.append("roles: paged_logits needs either 'row_end' or 'context_lens'")
    return faults


def _argument_faults(adapter: Adapter) -> list[str]:
    overload = find_op(adapter.op)
    if overload is None:
        return [f"op: torch knows no {adapter.op}; import what registers it first"]
    schema = overload._schema
    if schema.is_mutable:
        return ["op: it writes to its arguments; only functional ops can be adapted"]
    known = {a.name: a for a in schema.arguments}
    faults = [
        f"roles: the op has no argument {name!r}{_near(name, known)}"
        for name in adapter.named()
        if name not in known
    ]
    for name, argument in known.items():
        if str(argument.type) in ("Tensor", "List[Tensor]") and name not in adapter.named():
            faults.append(
                f"roles: argument {name!r} has no role; name it in ignored if it changes no value"
            )
    return faults


def find_op(name: str) -> Any:
    """The overload that a full name stands for, None where torch has none."""
    space, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), op), overload)
    except (AttributeError, RuntimeError):
        return None


def _near(name: str, known: Any) -> str:
    return near_miss(name, known)
