"""What a user declares about an opaque op, so that graphs that call it enter at the canonical ops.

An adapter says which argument plays which role. Layouts, with ``L`` the rows [S] or [B, S]:

``dense_logits``: ``query`` [*L, H, D], ``key`` [T, D] or [B, T, D], ``weights`` [*L, H]; optional
``key_scale`` [T] or [B, T], ``row_start`` and ``row_end`` [*L]. Column c of the result [*L, T] is
position c: ``scale * key_scale[c] * sum_h weights[h] * relu(query[h] . key[c])``.

``paged_logits``: ``query`` [Q, S, H, D], ``weights`` [Q, S, H], ``cache`` uint8
[pages, page, D + 4] (the page layout of ``kernels.serving_schemas``), ``block_table`` [Q, P] and
either ``row_end`` [Q, S] or ``context_lens`` [Q], where row j of S sees the positions below
``context_lens - (S - 1 - j)``. Column c of the result [Q, S, T] is position c of the request.

``candidate_mask``: ``block_ids`` [*L, C], negative where unused, in blocks of ``block_size``
positions counted from 0; optional ``row_start`` and ``row_end``. With ``logits`` [*L, T] the result
is those logits, masked; without, a bool mask [*L, T].

``topk``: ``logits`` [*L, T] and the number ``topk``; optional ``row_start`` and ``row_end``.

Dims of rows may be flattened ([B * S, ...]), and dims of size 1 may be added anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dense_logits": (("query", "key", "weights"), ("key_scale", "row_start", "row_end")),
    "paged_logits": (
        ("query", "cache", "weights", "block_table"),
        ("row_end", "context_lens"),
    ),
    "candidate_mask": (("block_ids",), ("logits", "row_start", "row_end")),
    "topk": (("logits", "topk"), ("row_start", "row_end")),
}
"""Kind -> roles that must be there, roles that may."""

OUTPUTS = ("values", "indices")
UNWRITTEN = "unwritten"


@dataclass(frozen=True)
class Adapter:
    """One opaque op and the roles of its arguments; see the module for layouts.

    Attributes:
        op: name of the op, ``"namespace::name"`` or ``"namespace::name.overload"``.
        kind: ``"dense_logits"``, ``"paged_logits"``, ``"candidate_mask"`` or ``"topk"``.
        roles: pairs of a role and an argument of the op; ``"kv.0"`` is the first of a list ``kv``.
        masked: what columns outside of a row's range hold: a number, or ``"unwritten"`` where they
            may hold anything and the model never looks.
        scale: constant factor of the scores, a number or the name of an argument.
        block_size: positions a candidate block, a number or the name of an argument.
        shows: what True means in a candidate mask: ``"visible"`` or ``"hidden"``.
        outputs: what a top-k returns, in order.
        empty: what a slot of a top-k that found nothing holds; None: any hidden position.
        ignored: arguments that change no value that the model looks at.
        contract: take the declaration at its word where the op cannot be run on the CPU although
            it has a kernel there.
    """

    op: str
    kind: str
    roles: tuple[tuple[str, str], ...]
    masked: float | str = -math.inf
    scale: float | str = 1.0
    block_size: int | str = 0
    shows: str = "visible"
    outputs: tuple[str, ...] = OUTPUTS
    empty: int | None = -1
    ignored: tuple[str, ...] = ()
    contract: bool = False

    def argument(self, role: str) -> str | None:
        """The argument that plays a role, None where none does."""
        return dict(self.roles).get(role)

    def named(self) -> tuple[str, ...]:
        """Every argument of the op that the declaration speaks of."""
        numbers = (n for n in (self.scale, self.block_size) if isinstance(n, str))
        played = (argument.partition(".")[0] for _, argument in self.roles)
        return tuple(dict.fromkeys((*played, *numbers, *self.ignored)))

    def described(self) -> str:
        """One stable line, equal exactly for equal declarations."""
        roles = ", ".join(f"{role}={argument}" for role, argument in sorted(self.roles))
        rest = (self.masked, self.scale, self.block_size, self.shows, self.outputs, self.empty)
        return f"{self.op} {self.kind}({roles}) {rest!r} {sorted(self.ignored)!r} {self.contract}"


def full_name(op: str) -> str:
    """The name of an op with its overload."""
    return op if "." in op.partition("::")[2] else f"{op}.default"
