"""Top-k of score rows through DeepSelect on SM100, and columns back to positions.

DeepSelect stops at a NaN: it traps, or leaves a mark and an unwritten row. Our ops rank NaN first,
so it is given +inf for NaN, and the largest finite number for +inf, and what a slot holds is read
from the scores themselves afterwards. Ties at the k-th score fall as DeepSelect lets them; within a
sorted row they stand in the order of their columns. Importing needs no DeepSelect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import deep_needs
from .deep_binding import Bound, Package, Spec, bind, open_package
from .deep_needs import Need, Needs
from .deep_requests import TopkRequest, round_up
from .reference import NEG_INF, fill_value, row_range

_TOPK = Spec(
    ("topk",),
    (
        "input",
        "topk",
        "sorted",
        "end",
        "indices_type",
        "sorted_index",
        "idx_oob_fill_value",
        "return_value",
        "abort_when_nan_found",
    ),
)


@dataclass(frozen=True)
class DeepSelect:
    """An installed DeepSelect: its function and the bytes that row strides are multiples of."""

    version: str
    topk: Bound | Need
    input_stride: int
    output_stride: int


def bind_select(package: Package) -> DeepSelect | Need:
    """Binds the function of an opened package; nothing of it runs but the question for strides."""
    ask = getattr(package.sources[0], "get_stride_requirement", None)
    if ask is None:
        return Need(
            "DeepSelect has no get_stride_requirement",
            "install DeepSelect 1.0 or newer, or use provider='triton'",
        )
    strides = tuple(int(size) for size in ask())
    return DeepSelect(package.version, bind("DeepSelect", _TOPK, package.sources[:1]), *strides)


@cache
def find(module: ModuleType | None = None) -> DeepSelect | Need:
    """The installed DeepSelect, imported and bound once, or why there is none.

    Args:
        module: the package, where it goes by another name than ``deep_select``.
    """
    package = open_package("deep_select", module)
    return package if isinstance(package, Need) else bind_select(package)


def _require(package: DeepSelect | None) -> DeepSelect:
    found = find() if package is None else package
    if isinstance(found, Need):
        raise ImportError(f"{found.what}; {found.mend}")
    return found


def needs(request: TopkRequest, package: DeepSelect | Need | None = None) -> Needs:
    """Every unmet need of a call of DeepSelect, each with its mend; empty when it can be made."""
    found = find() if package is None else package
    unmet: list[Need] = []
    if isinstance(found, Need):
        unmet.append(found)
    elif isinstance(found.topk, Need):
        unmet.append(found.topk)
    return (*unmet, *deep_needs.topk_needs(request))


def selectable(logits: Tensor, stride_bytes: int) -> Tensor:
    """Rows [R, W] that DeepSelect can take, with the order of ``logits`` [B, S, W].

    bf16 or fp32, NaN as +inf and +inf as the largest finite number, rows a multiple of
    ``stride_bytes`` apart. The width is never taken for the stride.
    """
    dtype = torch.float32 if logits.dtype == torch.float16 else logits.dtype
    batch, rows, width = logits.shape
    step = stride_bytes // dtype.itemsize
    room = torch.empty(batch * rows, round_up(width, step), dtype=dtype, device=logits.device)
    out = room[:, :width]
    largest = torch.finfo(dtype).max
    scores = logits.to(dtype).flatten(0, 1)
    torch.nan_to_num(scores, nan=float("inf"), posinf=largest, neginf=NEG_INF, out=out)
    return out


def select_columns(
    logits: Tensor, end: Tensor, count: int, sorted: bool, package: DeepSelect | None
) -> tuple[Tensor, Tensor]:
    """The best ``count`` columns of every row below ``end``; see :func:`topk`."""
    select = _require(package)
    batch, rows, width = logits.shape
    request = TopkRequest(deep_needs.SELECT_CAPABILITIES[0], logits.dtype, count, width)
    unmet = needs(request, select)
    if unmet:
        raise ValueError(deep_needs.describe("topk cannot be served by DeepSelect", unmet))
    if 0 in (batch * rows, width, count):
        values = torch.full((batch, rows, count), NEG_INF, device=logits.device)
        return values, torch.full_like(values, -1, dtype=torch.int32)
    assert isinstance(select.topk, Bound)
    ends = end.long().clamp(0, width).expand(batch, rows).flatten().to(torch.int32).contiguous()
    _, found = select.topk(
        input=selectable(logits, select.input_stride),
        topk=count,
        # Values are read from the scores, where NaN is still NaN; bf16 rows cannot be sorted there.
        sorted=False,
        end=ends,
        indices_type=torch.int32,
        sorted_index=sorted,
        idx_oob_fill_value=-1,
        return_value=False,
        abort_when_nan_found=False,
    )
    # Beyond a short row the index is what DeepSelect was told to fill with.
    columns = found.unflatten(0, (batch, rows)).long()
    values = logits.gather(-1, columns.clamp(0, width - 1)).float()
    # -inf counts as hidden: nothing after the selection could tell them apart.
    empty = (columns < 0) | (values == NEG_INF)
    values = values.masked_fill(empty, NEG_INF)
    columns = columns.masked_fill(empty, -1)
    if sorted:
        values, order = values.sort(dim=-1, descending=True, stable=True)
    else:
        order = empty.to(torch.uint8).sort(dim=-1, stable=True).indices
        values = values.gather(-1, order)
    return values, columns.gather(-1, order).to(torch.int32)


def topk(
    logits: Tensor,
    end: Tensor,
    *,
    topk: int,
    sorted: bool = True,
    package: DeepSelect | None = None,
) -> tuple[Tensor, Tensor]:
    """Best columns below ``end``; see ``dsa::topk``.

    Args:
        logits: [B, S, W] bf16, fp32 or fp16, any strides; columns from ``end`` on are not looked
            at and may hold anything. W under 2**23.
        end: [B|1, S|1] int32 or int64.
        topk: at most 4,096; may exceed W.
        sorted: descending, NaN first, ties by column. Otherwise only empty slots come last.
        package: the bound DeepSelect; the installed one when None.

    Returns:
        values [B, S, topk] fp32 and columns [B, S, topk] int32, -1 where none was left.

    Raises:
        ValueError: DeepSelect does not take the call; the message lists every unmet need.
    """
    return select_columns(logits, end, topk, sorted, package)


def topk_remap(
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Columns back to positions; see ``dsa::topk_remap``. Memory grows with k, not with positions.

    A row with e empty slots among k gets the e largest positions that it did not select. At most
    k - e were, so these lie among its last k positions.
    """
    batch, rows, slots = columns.shape
    scores = values.float()
    if scores.numel() == 0:
        return torch.empty_like(scores), torch.empty_like(columns, dtype=torch.int64)
    low, _ = row_range(row_start, None, num_positions, values.device)
    empty = columns < 0
    if blocks.shape[2] == 0:
        place = torch.zeros_like(columns, dtype=torch.int64)
        empty = torch.ones_like(empty)
    else:
        shift = low % sparse_block if anchored else torch.zeros_like(low)
        column = columns.long().clamp(0, blocks.shape[2] * sparse_block - 1)
        block = blocks.expand(batch, rows, -1).gather(-1, column // sparse_block).long()
        # Junk must not overflow: one block past either end is clamped all the same.
        block = block.clamp(-1, num_positions // sparse_block + 1)
        place = block * sparse_block + column % sparse_block + shift[..., None]
        place = place.clamp(0, max(num_positions - 1, 0))
    first = num_positions - slots
    taken = torch.zeros(batch, rows, slots + 1, dtype=torch.bool, device=values.device)
    at = torch.where(empty | (place < first), slots, place - first)
    taken.scatter_(-1, at, True)
    turn = torch.arange(slots, device=values.device)
    free = torch.where(taken[..., :slots], -1, first + turn)
    hidden = free.sort(dim=-1, descending=True).values
    rank = (empty.cumsum(-1) - 1).clamp(min=0)
    place = torch.where(empty, hidden.gather(-1, rank), place)
    return scores.masked_fill(empty, fill_value(fill)), place


def topk_positions(
    logits: Tensor,
    end: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    topk: int,
    num_positions: int,
    sparse_block: int,
    anchored: bool = False,
    fill: float | None = None,
    sorted: bool = True,
    package: DeepSelect | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`topk` and :func:`topk_remap`: values fp32 and positions int64 [B, S, topk]."""
    values, columns = select_columns(logits, end, topk, sorted, package)
    return topk_remap(
        values,
        columns,
        blocks,
        row_start,
        num_positions=num_positions,
        sparse_block=sparse_block,
        anchored=anchored,
        fill=fill,
    )
