"""Spellings of which positions a query row may see, and of how scores are hidden.

A *visibility* gives the mask of visible positions; a *form* applies a mask to scores. Each
visibility also says, independently of the model and for the oracle, what each row sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")


@dataclass(frozen=True)
class Rows:
    """Sizes as the model sees them: S query rows at the end of T positions."""

    batch: int | None
    rows: int
    positions: int

    @property
    def offset(self) -> int:
        return self.positions - self.rows

    def ends(self) -> Tensor:
        return (torch.arange(self.rows) + (self.offset + 1)).unsqueeze(-1)

    def grid(self) -> Tensor:
        return torch.arange(self.positions)


@dataclass(frozen=True)
class Visibility:
    """``visible(rows, inputs)`` and ``ends(rows, inputs)`` belong to the model, ``make`` and
    ``oracle`` to the test; ``prefix`` says that every row sees exactly ``[0, end)``."""

    visible: Callable[[Rows, tuple[Tensor, ...]], Tensor]
    ends: Callable[[Rows, tuple[Tensor, ...]], Tensor]
    make: Callable[[int, int, int, torch.Generator], tuple[Tensor, ...]]
    oracle: Callable[[Tensor, Tensor, tuple[Tensor, ...]], Tensor]
    inputs: int = 0
    prefix: bool = True
    phases: tuple[str, ...] = ("prefill", "chunk", "decode")
    form: str | None = None


def causal_ends(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return rows.ends()


def nothing(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return ()


def causal(query: Tensor, key: Tensor, _: tuple[Tensor, ...]) -> Tensor:
    return key <= query


# ---------------------------------------------------------------------------- causal, no input
def by_lengths(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return ~(rows.grid() >= rows.ends())


def by_less(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return rows.grid() < rows.ends()


def by_compare(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return rows.grid()[None, :] <= (torch.arange(rows.rows) + rows.offset)[:, None]


def by_difference(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return (torch.arange(rows.rows)[:, None] + rows.offset - rows.grid()[None, :]) >= 0


def by_tril(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return torch.ones(rows.rows, rows.positions, dtype=torch.bool).tril(rows.offset)


def by_triu(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return ~torch.triu(torch.ones(rows.rows, rows.positions), diagonal=rows.offset + 1).bool()


def by_tril_compare(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    return torch.tril(torch.ones(rows.rows, rows.positions), diagonal=rows.offset) != 0


def by_cumsum(rows: Rows, _: tuple[Tensor, ...]) -> Tensor:
    query = torch.ones(rows.rows, dtype=torch.int64).cumsum(0) - 1 + rows.offset
    return rows.grid().unsqueeze(0).le(query.unsqueeze(1))


# ---------------------------------------------------------------------------- from inputs
def make_lengths(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Row lengths up to the causal one, with rows of length zero among them."""
    ends = torch.arange(t - s + 1, t + 1).expand(b, s)
    fewer = torch.randint(0, 4, (b, s), generator=g)
    return ((ends - fewer).clamp(min=0),)


def make_context(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Context lengths of the sequences, some shorter than the query rows they carry."""
    lengths = torch.tensor([t, max(s - 2, 1)] * b)[:b]
    return (lengths.to(torch.int32),)


def make_bounds(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """Packed sequences of odd lengths, laid end to end."""
    position = torch.arange(t - s, t).expand(b, s)
    first = torch.tensor([0, 5, 18]) if t < 40 else torch.tensor([0, 5, 18, 37])
    start = first[torch.searchsorted(first, position.contiguous(), right=True) - 1]
    return start.to(torch.int32), (position + 1).to(torch.int32)


def make_segments(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    position = torch.arange(t).expand(b, t).contiguous()
    return (torch.searchsorted(torch.tensor([0, 5, 18]), position, right=True),)


def make_padding(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """The last sequence starts three positions late (left padding), so that its first rows see
    nothing."""
    first = torch.tensor([0] * (b - 1) + [3])
    return (torch.arange(t) >= first.unsqueeze(-1),)


def make_mask(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    """A causal mask with holes, as a model receives it."""
    mask = torch.arange(t)[None, :] <= torch.arange(t - s, t)[:, None]
    return (mask.expand(b, s, t) & (torch.rand(b, s, t, generator=g) > 0.15),)


def hidden_mask(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return (~make_mask(b, s, t, g)[0],)


def mask_with_heads(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return (make_mask(b, s, t, g)[0].unsqueeze(1),)


def float_mask(low: float, heads: bool) -> Callable[..., tuple[Tensor, ...]]:
    def make(b: int, s: int, t: int, g: torch.Generator) -> tuple[Tensor, ...]:
        bias = torch.zeros(b, s, t).masked_fill(~make_mask(b, s, t, g)[0], low)
        return (bias.unsqueeze(1) if heads else bias,)

    return make


def context_ends(rows: Rows, inputs: tuple[Tensor, ...]) -> Tensor:
    """Length - rows + row + 1, never below zero."""
    length = inputs[0].long()
    if rows.batch is None:
        length = length[0]
    else:
        length = length[:, None, None]
    return (length - rows.rows + torch.arange(1, rows.rows + 1)[:, None]).clamp(min=0)


def within(rows: Rows, x: tuple[Tensor, ...]) -> Tensor:
    grid = rows.grid()
    return (grid >= x[0].unsqueeze(-1)) & (grid < x[1].unsqueeze(-1))


def same_segment(rows: Rows, x: tuple[Tensor, ...]) -> Tensor:
    mine = x[0].narrow(-1, rows.offset, rows.rows)
    return (mine.unsqueeze(-1) == x[0].unsqueeze(-2)) & by_compare(rows, x)


def oracle_segments(query: Tensor, key: Tensor, x: tuple[Tensor, ...]) -> Tensor:
    segment = x[0][:, None, :]
    return (key <= query) & (segment == segment.transpose(1, 2)[:, -query.shape[1] :])


def oracle_context(query: Tensor, key: Tensor, x: tuple[Tensor, ...]) -> Tensor:
    s = query.shape[1]
    ends = x[0].long()[:, None] - s + torch.arange(1, s + 1)
    return key < ends.unsqueeze(-1)


VISIBILITIES: dict[str, Visibility] = {
    name: Visibility(spelled, causal_ends, nothing, causal)
    for name, spelled in {
        "not at or beyond length": by_lengths,
        "below length": by_less,
        "position compare": by_compare,
        "position difference": by_difference,
        "tril": by_tril,
        "triu": by_triu,
        "tril compare": by_tril_compare,
        "cumsum positions": by_cumsum,
    }.items()
}
VISIBILITIES |= {
    "row lengths": Visibility(
        lambda r, x: r.grid() < x[0].unsqueeze(-1),
        lambda r, x: x[0].unsqueeze(-1),
        make_lengths,
        lambda q, k, x: k < x[0].unsqueeze(-1),
        inputs=1,
    ),
    "context lengths": Visibility(
        lambda r, x: r.grid() < context_ends(r, x), context_ends, make_context, oracle_context, 1
    ),
    "start and end bounds": Visibility(
        within,
        lambda r, x: x[1].unsqueeze(-1),
        make_bounds,
        lambda q, k, x: (k >= x[0].unsqueeze(-1)) & (k < x[1].unsqueeze(-1)),
        inputs=2,
        prefix=False,
    ),
    "segments": Visibility(
        same_segment, causal_ends, make_segments, oracle_segments, inputs=1, prefix=False
    ),
    "padding": Visibility(
        lambda r, x: by_compare(r, x) & x[0].unsqueeze(-2),
        causal_ends,
        make_padding,
        lambda q, k, x: (k <= q) & x[0][:, None, :],
        inputs=1,
        prefix=False,
    ),
    "bool input": Visibility(
        lambda r, x: x[0], causal_ends, make_mask, lambda q, k, x: x[0], 1, False
    ),
    "bool input of hidden": Visibility(
        lambda r, x: ~x[0], causal_ends, hidden_mask, lambda q, k, x: ~x[0], 1, False
    ),
    "bool input with heads": Visibility(
        lambda r, x: x[0].squeeze(-3),
        causal_ends,
        mask_with_heads,
        lambda q, k, x: x[0][:, 0],
        inputs=1,
        prefix=False,
    ),
    "float input": Visibility(
        lambda r, x: x[0] == 0,
        causal_ends,
        float_mask(-INF, heads=False),
        lambda q, k, x: x[0] == 0,
        inputs=1,
        prefix=False,
        form="input -inf",
    ),
    "float input with heads": Visibility(
        lambda r, x: x[0].squeeze(-3) > -1.0,
        causal_ends,
        float_mask(-1e30, heads=True),
        lambda q, k, x: x[0][:, 0] == 0,
        inputs=1,
        prefix=False,
        form="input -1e30",
    ),
}


# ---------------------------------------------------------------------------- forms
def low(value: str, x: Tensor) -> float:
    return torch.finfo(x.dtype).min if value == "finfo.min" else float(value)


def additive(s: Tensor, ok: Tensor, fill: float) -> Tensor:
    return torch.zeros(ok.shape, dtype=s.dtype).masked_fill(~ok, fill)


def add_in_place(s: Tensor, ok: Tensor, fill: float) -> Tensor:
    return s.add_(additive(s, ok, fill))


def add_where(s: Tensor, ok: Tensor, fill: float) -> Tensor:
    return s + torch.where(ok, 0.0, fill)


def one_minus(s: Tensor, ok: Tensor, fill: float) -> Tensor:
    return s + (1.0 - ok.to(s.dtype)) * fill


APPLIED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "masked_fill": lambda s, ok, fill: s.masked_fill(~ok, fill),
    "masked_fill_": lambda s, ok, fill: s.masked_fill_(~ok, fill),
    "masked_fill equals zero": lambda s, ok, fill: s.masked_fill(ok == 0, fill),
    "where": lambda s, ok, fill: torch.where(ok, s, fill),
    "where full_like": lambda s, ok, fill: torch.where(~ok, torch.full_like(s, fill), s),
    "add": lambda s, ok, fill: s + additive(s, ok, fill),
    "add_": add_in_place,
    "add where": add_where,
    "one minus": one_minus,
}
FILLS = ("-inf", "finfo.min", "-1e9", "-3e38")


def applied(form: str, s: Tensor, ok: Tensor, fill: str) -> Tensor:
    return APPLIED[form](s, ok, low(fill, s))


def floor(fill: str, s: Tensor) -> float:
    """Scores at or below this are hidden ones; real scores are far above."""
    value = low(fill, s)
    return value if value == -INF else value / 2
