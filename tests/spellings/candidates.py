"""Spellings of candidate blocks: block maxima, the pinned newest block, what is published, and the
mask over positions that a consumer makes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")


def blocks_of(positions: int, block: int) -> int:
    return -(-positions // block)


# ---------------------------------------------------------------------------- block maxima
def pad_unflatten_amax(s: Tensor, block: int, fill: float) -> Tensor:
    return F.pad(s, (0, -s.shape[-1] % block), value=fill).unflatten(-1, (-1, block)).amax(dim=-1)


def pad_view_max(s: Tensor, block: int, fill: float) -> Tensor:
    n = blocks_of(s.shape[-1], block)
    padded = F.pad(s, (0, n * block - s.shape[-1]), value=fill)
    return padded.view(*s.shape[:-1], n, block).max(dim=-1).values


def cat_reshape_amax(s: Tensor, block: int, fill: float) -> Tensor:
    n = blocks_of(s.shape[-1], block)
    tail = s.new_full((*s.shape[:-1], n * block - s.shape[-1]), fill)
    return torch.cat([s, tail], dim=-1).reshape(*s.shape[:-1], n, block).amax(-1)


BLOCK_MAXIMA: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "pad unflatten amax": pad_unflatten_amax,
    "pad view max": pad_view_max,
    "cat reshape amax": cat_reshape_amax,
}


# ---------------------------------------------------------------------------- newest block
def pin_masked_fill(scores: Tensor, newest: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[-1]) == newest, INF)


def pin_where(scores: Tensor, newest: Tensor) -> Tensor:
    return torch.where(newest == torch.arange(scores.shape[-1]), INF, scores)


def pin_scatter(scores: Tensor, newest: Tensor) -> Tensor:
    """Rows that see nothing have no newest block: theirs goes to a spare column."""
    n = scores.shape[-1]
    at = torch.where(newest < 0, n, newest).expand(*scores.shape[:-1], 1)
    return F.pad(scores, (0, 1)).scatter(-1, at, INF)[..., :n]


PINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": pin_masked_fill,
    "where": pin_where,
    "scatter": pin_scatter,
    "none": lambda scores, newest: scores,
}


# ---------------------------------------------------------------------------- published
# (block scores, top values, top indices, floor) -> what travels
def live_table(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, values > floor)


def live_table_functional(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, ids, values > floor)


def additive_table(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return torch.full_like(scores, -INF).scatter(-1, ids, torch.where(values > floor, 0.0, -INF))


def ids_int64(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return torch.where(values > floor, ids, -1)


def ids_int32(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return ids.to(torch.int32).masked_fill_(~(values > floor), -1)


def ids_ascending(scores: Tensor, values: Tensor, ids: Tensor, floor: float) -> Tensor:
    return ids.masked_fill(values <= floor, -1).sort(dim=-1).values


TABLES = {
    "table": live_table,
    "table functional": live_table_functional,
    "position mask": live_table,
    "additive table": additive_table,
}
IDS = {"ids int64": ids_int64, "ids int32": ids_int32, "ids ascending": ids_ascending}
PUBLISHED: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {**TABLES, **IDS}


# ---------------------------------------------------------------------------- ids -> block table
def scatter_spare(ids: Tensor, n: int) -> Tensor:
    at = ids.long().masked_fill(ids < 0, n)
    return torch.zeros(*ids.shape[:-1], n + 1, dtype=torch.bool).scatter(-1, at, True)[..., :n]


def scatter_spare_in_place(ids: Tensor, n: int) -> Tensor:
    flags = torch.zeros(*ids.shape[:-1], n + 1, dtype=torch.bool)
    flags.scatter_(-1, torch.where(ids >= 0, ids, n).to(torch.int64), True)
    return flags[..., :n]


def scatter_float(ids: Tensor, n: int) -> Tensor:
    at = torch.where(ids >= 0, ids, n).long()
    ones = torch.ones(ids.shape)
    return torch.zeros(*ids.shape[:-1], n + 1).scatter_add(-1, at, ones)[..., :n] > 0


def index_put(ids: Tensor, n: int) -> Tensor:
    at = ids.long().masked_fill(ids < 0, n)
    flags = torch.zeros(*ids.shape[:-1], n + 1, dtype=torch.bool)
    rows = [torch.arange(size) for size in ids.shape[:-1]]
    grid = [r.view([-1 if i == j else 1 for i in range(ids.dim())]) for j, r in enumerate(rows)]
    flags[(*grid, at)] = True
    return flags[..., :n]


def one_hot_sum(ids: Tensor, n: int) -> Tensor:
    return F.one_hot(ids.long() + 1, n + 1).sum(-2)[..., 1:] > 0


def compare_table(ids: Tensor, n: int) -> Tensor:
    return (ids.unsqueeze(-1) == torch.arange(n)).any(-2)


ID_TABLES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "scatter with spare column": scatter_spare,
    "scatter_ with spare column": scatter_spare_in_place,
    "scatter_add counts": scatter_float,
    "index_put": index_put,
    "one-hot sum": one_hot_sum,
    "compare with block numbers": compare_table,
}


# ---------------------------------------------------------------------------- block table -> mask
def expand_repeat(table: Tensor, positions: int, block: int) -> Tensor:
    return table.repeat_interleave(block, dim=-1)[..., :positions]


def expand_reshape(table: Tensor, positions: int, block: int) -> Tensor:
    wide = table.unsqueeze(-1).expand(*table.shape, block)
    return wide.reshape(*table.shape[:-1], -1)[..., :positions]


def expand_flatten(table: Tensor, positions: int, block: int) -> Tensor:
    return table[..., None].repeat(*[1] * table.dim(), block).flatten(-2)[..., :positions]


def expand_gather(table: Tensor, positions: int, block: int) -> Tensor:
    at = (torch.arange(positions) // block).expand(*table.shape[:-1], positions)
    return table.gather(-1, at)


def expand_index(table: Tensor, positions: int, block: int) -> Tensor:
    return table[..., torch.arange(positions) // block]


EXPANSIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "repeat_interleave": expand_repeat,
    "unsqueeze expand reshape": expand_reshape,
    "repeat flatten": expand_flatten,
    "gather by position // block": expand_gather,
    "index by position // block": expand_index,
}


# ---------------------------------------------------------------------------- ids -> mask at once
def positions_scatter(ids: Tensor, positions: int, block: int) -> Tensor:
    at = ids.long().unsqueeze(-1) * block + torch.arange(block)
    at = torch.where((at < 0) | (at >= positions), positions, at).flatten(-2)
    flags = torch.zeros(*ids.shape[:-1], positions + 1, dtype=torch.bool)
    return flags.scatter_(-1, at, True)[..., :positions]


def positions_scatter_clamped(ids: Tensor, positions: int, block: int) -> Tensor:
    at = (ids.long().unsqueeze(-1) * block + torch.arange(block)).clamp(max=positions)
    at = at.masked_fill((ids < 0).unsqueeze(-1), positions).flatten(start_dim=-2)
    bias = torch.full((*ids.shape[:-1], positions + 1), -INF)
    return bias.scatter(-1, at, 0.0)[..., :positions] == 0


def compare_any(ids: Tensor, positions: int, block: int) -> Tensor:
    mine = torch.arange(positions) // block
    return (mine == ids.unsqueeze(-1)).any(dim=-2)


def isin_like(ids: Tensor, positions: int, block: int) -> Tensor:
    mine = torch.arange(positions).div(block, rounding_mode="floor")
    return (mine.unsqueeze(-1) == ids.unsqueeze(-2)).sum(-1).bool()


def compare_bounds(ids: Tensor, positions: int, block: int) -> Tensor:
    first = (ids.long() * block).unsqueeze(-1)
    grid = torch.arange(positions)
    return ((grid >= first) & (grid < first + block)).any(-2)


ID_MASKS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "scatter of positions": positions_scatter,
    "scatter of clamped positions": positions_scatter_clamped,
    "compare and any": compare_any,
    "isin-like": isin_like,
    "compare with block bounds": compare_bounds,
}


def candidate_mask(
    published: Tensor, kind: str, rebuild: str, expansion: str, positions: int, block: int
) -> Tensor:
    """Mask over positions, as a consumer makes it; float (0 or -inf) for an additive table."""
    if kind in IDS:
        if rebuild in ID_MASKS:
            return ID_MASKS[rebuild](published, positions, block)
        published = ID_TABLES[rebuild](published, blocks_of(positions, block))
    elif kind == "position mask":
        return published
    return EXPANSIONS[expansion](published, positions, block)
