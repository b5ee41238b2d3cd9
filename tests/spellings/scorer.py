"""Spellings of ``sum_h w[t,h] * relu(q[t,h] . k[s])``: product, relu, scale and head sum.

Queries are ``[B, S, H, D]``, keys ``[B, T, D]``, head weights ``[B, S, H]``; the flat form has
no B.
Axes are named by letters (b, s, t, h, d), so that each choice composes with every other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Scored = tuple[Tensor, str]


def arrange(x: Tensor, have: str, want: str) -> Tensor:
    """Permute axes ``have`` into the order ``want``; the flat form drops b from both."""
    if x.dim() == len(have) - 1:
        have, want = have.replace("b", ""), want.replace("b", "")
    return x if have == want else x.permute([have.index(c) for c in want])


def drop(letter: str, equation: str) -> str:
    return equation.replace(letter, "")


# ---------------------------------------------------------------------------- product
def by_einsum(
    equation: str, query: str, key: str, out: str, batch: str = "b", key_first: bool = False
) -> Callable[[Tensor, Tensor], Scored]:
    """``equation`` as a user letters it; ``query``, ``key`` and ``out`` in canonical letters."""

    def product(q: Tensor, k: Tensor) -> Scored:
        flat = q.dim() == 3
        written = drop(batch, equation) if flat else equation
        operands = [arrange(q, "bshd", query), arrange(k, "btd", key)]
        if key_first:
            operands.reverse()
        return torch.einsum(written, *operands), drop("b", out) if flat else out

    return product


def einsum_ellipsis(q: Tensor, k: Tensor) -> Scored:
    return torch.einsum("...shd,...td->...sht", q, k), "bsht"[4 - q.dim() :]


def einsum_keys_with_heads(q: Tensor, k: Tensor) -> Scored:
    heads = k.unsqueeze(-2).expand(*k.shape[:-1], q.shape[-2], k.shape[-1])
    if q.dim() == 3:
        return torch.einsum("qhd,khd->hqk", q, heads), "hst"
    return torch.einsum("bqhd,bkhd->bhqk", q, heads), "bhst"


def matmul_heads_first(q: Tensor, k: Tensor) -> Scored:
    scores = torch.matmul(q.transpose(-3, -2), k.transpose(-1, -2).unsqueeze(-3))
    return scores, "bhst"[4 - q.dim() :]


def matmul_heads_second(q: Tensor, k: Tensor) -> Scored:
    return q @ k.mT.unsqueeze(-3), "bsht"[4 - q.dim() :]


def matmul_key_first(q: Tensor, k: Tensor) -> Scored:
    return k.unsqueeze(-3) @ q.transpose(-1, -2), "bsth"[4 - q.dim() :]


def matmul_expanded_keys(q: Tensor, k: Tensor) -> Scored:
    heads = k.unsqueeze(-3).expand(*k.shape[:-2], q.shape[-2], *k.shape[-2:])
    return torch.matmul(q.transpose(-3, -2), heads.transpose(-1, -2)), "bhst"[4 - q.dim() :]


def bmm_expanded_keys(q: Tensor, k: Tensor) -> Scored:
    if q.dim() == 3:
        return torch.bmm(q.transpose(0, 1), k.t().expand(q.shape[1], -1, -1)), "hst"
    b, s, h, d = q.shape
    folded = q.transpose(1, 2).reshape(b * h, s, d)
    heads = k.unsqueeze(1).expand(b, h, k.shape[1], d).reshape(b * h, k.shape[1], d)
    return torch.bmm(folded, heads.transpose(1, 2)).view(b, h, s, k.shape[1]), "bhst"


def bmm_repeated_keys(q: Tensor, k: Tensor) -> Scored:
    if q.dim() == 3:
        return torch.bmm(q, k.t().repeat(q.shape[0], 1, 1)), "sht"
    b, s, h, d = q.shape
    heads = k.repeat_interleave(h, dim=0)
    scores = torch.bmm(q.transpose(1, 2).reshape(b * h, s, d), heads.mT)
    return scores.unflatten(0, (b, h)), "bhst"


def bmm_flat_heads(q: Tensor, k: Tensor) -> Scored:
    if q.dim() == 3:
        rows = q.reshape(1, -1, q.shape[-1])
        return torch.bmm(rows, k.t().unsqueeze(0))[0].view(*q.shape[:2], k.shape[0]), "sht"
    b, s, h, d = q.shape
    return torch.bmm(q.reshape(b, s * h, d), k.transpose(1, 2)).view(b, s, h, k.shape[1]), "bsht"


def mm_flat_heads(q: Tensor, k: Tensor) -> Scored:
    """One sequence only: rows and heads folded into one matrix."""
    s, h, d = q.shape[-3:]
    scores = torch.mm(q.reshape(s * h, d), k.reshape(-1, d).t()).view(s, h, -1)
    return (scores, "sht") if q.dim() == 3 else (scores.unsqueeze(0), "bsht")


def linear_by_keys(q: Tensor, k: Tensor) -> Scored:
    """One sequence only: the keys are the weight of a linear layer."""
    return F.linear(q, k if q.dim() == 3 else k[0]), "bsht"[4 - q.dim() :]


def multiply_sum(q: Tensor, k: Tensor) -> Scored:
    return (q.unsqueeze(-2) * k[..., None, None, :, :]).sum(-1), "bsht"[4 - q.dim() :]


def multiply_sum_heads_first(q: Tensor, k: Tensor) -> Scored:
    pairs = q.transpose(-3, -2).unsqueeze(-2) * k.unsqueeze(-3).unsqueeze(-3)
    return pairs.sum(dim=-1), "bhst"[4 - q.dim() :]


def stack_heads(q: Tensor, k: Tensor) -> Scored:
    scores = [torch.matmul(q[..., h, :], k.transpose(-1, -2)) for h in range(q.shape[-2])]
    return torch.stack(scores, dim=-2), "bsht"[4 - q.dim() :]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Scored]] = {
    "einsum bshd,btd->bsht": by_einsum("bshd,btd->bsht", "bshd", "btd", "bsht"),
    "einsum bqhd,bkd->bhqk": by_einsum("bqhd,bkd->bhqk", "bshd", "btd", "bhst"),
    "einsum sbhd,tbd->sbht": by_einsum("sbhd,tbd->sbht", "sbhd", "tbd", "sbht"),
    "einsum bhsd,btd->bhst": by_einsum("bhsd,btd->bhst", "bhsd", "btd", "bhst"),
    "einsum bshd,btd->bsth": by_einsum("bshd,btd->bsth", "bshd", "btd", "bsth"),
    "einsum btd,bshd->bhst": by_einsum("btd,bshd->bhst", "bshd", "btd", "bhst", key_first=True),
    "einsum bmhd,bdn->bhmn": by_einsum("bmhd,bdn->bhmn", "bshd", "bdt", "bhst"),
    "einsum zthd,znd->zthn": by_einsum("zthd,znd->zthn", "bshd", "btd", "bsht", batch="z"),
    "einsum ellipsis": einsum_ellipsis,
    "einsum keys with heads": einsum_keys_with_heads,
    "matmul heads first": matmul_heads_first,
    "matmul heads second": matmul_heads_second,
    "matmul key first": matmul_key_first,
    "matmul expanded keys": matmul_expanded_keys,
    "bmm expanded keys": bmm_expanded_keys,
    "bmm repeated keys": bmm_repeated_keys,
    "bmm flat heads": bmm_flat_heads,
    "mm flat heads": mm_flat_heads,
    "linear": linear_by_keys,
    "multiply sum": multiply_sum,
    "multiply sum heads first": multiply_sum_heads_first,
    "stack of heads": stack_heads,
    "loop over heads": stack_heads,
    "loop over head chunks": by_einsum("bshd,btd->bsht", "bshd", "btd", "bsht"),
}
ONE_SEQUENCE = {"mm flat heads", "linear"}


# ---------------------------------------------------------------------------- relu
RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "relu_": lambda x: x.relu_(),
    "F.relu inplace": lambda x: F.relu(x, inplace=True),
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clamp(min=0.0, max=None)": lambda x: torch.clamp(x, 0.0, None),
    "clamp_min": lambda x: torch.clamp_min(x, 0),
    "clamp_min_": lambda x: x.clamp_min_(0.0),
    "where zero": lambda x: torch.where(x > 0, x, 0),
    "where zeros_like": lambda x: torch.where(x >= 0, x, torch.zeros_like(x)),
    "maximum": lambda x: torch.maximum(x, x.new_zeros(())),
    "max zeros_like": lambda x: torch.max(torch.zeros_like(x), x),
    "masked_fill below zero": lambda x: x.masked_fill(x < 0, 0.0),
}


# ---------------------------------------------------------------------------- scale
# Where the softmax scale D**-0.5 ("d") and the head scale H**-0.5 ("h") are multiplied in.
SCALES: dict[str, dict[str, tuple[str, ...]]] = {
    "weights": {"weights": ("dh",)},
    "weights twice": {"weights": ("h", "d")},
    "before relu": {"before": ("d",), "weights": ("h",)},
    "both before relu": {"before": ("dh",)},
    "after relu": {"after": ("d",), "weights": ("h",)},
    "both after relu": {"after": ("d", "h")},
    "after sum": {"sum": ("dh",)},
    "after sum twice": {"sum": ("d", "h")},
    "query": {"query": ("d",), "weights": ("h",)},
    "key": {"key": ("dh",)},
    "divided": {"before": ("/d",), "sum": ("h",)},
    "none": {},
}


def scaled(x: Tensor, factors: tuple[str, ...], d: float, h: float) -> Tensor:
    for name in factors:
        x = x / (1.0 / d) if name == "/d" else x * {"d": d, "h": h, "dh": d * h}[name]
    return x


def total_scale(scale: str, d: float, h: float) -> float:
    total = 1.0
    for factors in SCALES[scale].values():
        for name in factors:
            total *= {"d": d, "/d": d, "h": h, "dh": d * h}[name]
    return total


# ---------------------------------------------------------------------------- head sum
def aligned(w: Tensor, axes: str) -> Tensor:
    """Head weights broadcastable to scores with ``axes``."""
    return arrange(w, "bsh", axes.replace("t", "")).unsqueeze(axes.index("t"))


def as_rows(x: Tensor, axes: str) -> Tensor:
    return arrange(x, axes, "bst" if "b" in axes else "st")


def multiply_then_sum(s: Tensor, axes: str, w: Tensor) -> Tensor:
    return as_rows((s * aligned(w, axes)).sum(dim=axes.index("h")), axes.replace("h", ""))


def weights_left(s: Tensor, axes: str, w: Tensor) -> Tensor:
    total = torch.sum(aligned(w, axes) * s, axes.index("h") - len(axes))
    return as_rows(total, axes.replace("h", ""))


def multiply_in_place(s: Tensor, axes: str, w: Tensor) -> Tensor:
    return as_rows(s.mul_(aligned(w, axes)).sum(axes.index("h")), axes.replace("h", ""))


def sum_einsum(s: Tensor, axes: str, w: Tensor) -> Tensor:
    return torch.einsum(f"{axes},bsh->bst" if "b" in axes else f"{axes},sh->st", s, w)


def sum_einsum_weights_first(s: Tensor, axes: str, w: Tensor) -> Tensor:
    return torch.einsum(f"bsh,{axes}->bst" if "b" in axes else f"sh,{axes}->st", w, s)


def matmul_weights_left(s: Tensor, axes: str, w: Tensor) -> Tensor:
    rows = arrange(s, axes, "bsht" if "b" in axes else "sht")
    return torch.matmul(w.unsqueeze(-2), rows).squeeze(-2)


def matmul_weights_right(s: Tensor, axes: str, w: Tensor) -> Tensor:
    rows = arrange(s, axes, "bsth" if "b" in axes else "sth")
    return (rows @ w.unsqueeze(-1)).squeeze(-1)


def bmm_weights(s: Tensor, axes: str, w: Tensor) -> Tensor:
    rows = arrange(s, axes, "bsht" if "b" in axes else "sht")
    h, t = rows.shape[-2:]
    return torch.bmm(w.reshape(-1, 1, h), rows.reshape(-1, h, t)).view(*rows.shape[:-2], t)


HEAD_SUMS: dict[str, Callable[[Tensor, str, Tensor], Tensor]] = {
    "mul sum": multiply_then_sum,
    "weights left": weights_left,
    "mul_ sum": multiply_in_place,
    "einsum": sum_einsum,
    "einsum weights first": sum_einsum_weights_first,
    "matmul weights left": matmul_weights_left,
    "matmul weights right": matmul_weights_right,
    "bmm weights": bmm_weights,
}


@dataclass(frozen=True)
class Scorer:
    """One choice along each axis of the scorer."""

    product: str = "einsum bshd,btd->bsht"
    relu: str = "F.relu"
    scale: str = "weights"
    head_sum: str = "mul sum"
