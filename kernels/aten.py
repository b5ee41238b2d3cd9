"""The canonical ops as functional ATen that a compiler can trace with symbolic sizes.

A package made of these needs nothing but PyTorch, not even Python. They mean what ``schemas`` says,
to the order of equal scores, on any device. Memory beyond inputs and results does not grow with the
rows: :mod:`aten_rows` scores some at a time, about 256 rows of heads against all positions where an
op is dense, and up to 64 MiB of gathered keys where it is sparse.

Shapes and dtypes are those of the ops; arguments were checked when the call was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import aten_sparse, fused_q_reference, key_cache_reference
from .aten_rank import best, fill_hidden, ranked
from .aten_rows import by_rows, rows_of
from .paged_reference import wide_queries
from .quantise import dequantise_mxfp4
from .reference import NEG_INF, accumulator, fill_value, row_range

Size = Any
_HEAD_ROWS = 256


def in_blocks(ids: Tensor, low: Tensor, positions: Size, block_size: int, anchored: bool) -> Tensor:
    """Bool [B, S, T]: positions in a candidate block of the row; ids [B, S, C], low [B, S]."""
    origin = low if anchored else torch.zeros_like(low)
    offset = torch.arange(positions, device=ids.device) - origin[..., None]
    blocks = (positions + block_size - 1) // block_size
    ids = ids.long()
    ids = torch.where((ids < 0) | (ids >= blocks), blocks, ids)
    flags = torch.zeros(*ids.shape[:2], blocks + 1, dtype=torch.bool, device=ids.device)
    flags = flags.scatter(-1, ids, True)
    block = torch.div(offset, block_size, rounding_mode="floor")
    # What is out of range sets the last flag, which no position reads.
    return flags.gather(-1, block.clamp(min=0)) & (block >= 0)


def _scores(
    row: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    low: Tensor,
    high: Tensor,
    scale: float,
    key_scale: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scores [B, R, T] of some rows and what is visible of them."""
    dtype = accumulator(q, k, weights)
    some = q[:, row].to(dtype)
    batch, rows, heads, dim = some.shape
    keys = k.to(dtype).transpose(1, 2)
    if k.shape[0] == 1:
        product = torch.mm(some.reshape(batch * rows * heads, dim), keys[0])
    else:
        product = torch.bmm(some.reshape(batch, rows * heads, dim), keys)
    product = product.reshape(batch * rows, heads, k.shape[1]).relu()
    weighed = weights[:, row].to(dtype).reshape(batch * rows, 1, heads)
    scores = torch.bmm(weighed, product).reshape(batch, rows, k.shape[1]) * scale
    if key_scale is not None:
        scores = scores * key_scale.to(dtype)[:, None, :]
    if bias is not None:
        scores = scores + rows_of(bias, row).to(dtype)
    position = torch.arange(k.shape[1], device=q.device)
    visible = (position >= low[:, row, None]) & (position < high[:, row, None])
    if mask is not None:
        visible = visible & rows_of(mask, row)
    return scores, visible.expand_as(scores)


class Aten:
    """The ops, for graphs whose inputs have the given sizes (see :func:`by_rows`)."""

    def __init__(self, sizes: Sequence[Size] = ()) -> None:
        self._sizes = tuple(sizes)

    def table(self) -> dict[str, Callable[..., Any]]:
        """Op name -> function with the op's own signature."""
        return {
            "indexer_select": self.indexer_select,
            "indexer_block_max": self.indexer_block_max,
            "indexer_publish": self.indexer_publish,
            "candidate_expand": aten_sparse.candidate_expand,
            "candidate_columns": aten_sparse.candidate_columns,
            "sparse_mqa_logits": self.sparse_mqa_logits,
            "topk": self.topk,
            "topk_remap": aten_sparse.topk_remap,
            "fused_indexer_q": fused_q_reference.fused_indexer_q,
            "indexer_k_quant": key_cache_reference.indexer_k_quant,
            "mxfp4_sparse_mqa_logits": self.mxfp4_sparse_mqa_logits,
        }

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        finish: Callable[..., tuple[Tensor, ...]],
        numbers: Sequence[Size],
        *,
        scale: float = 1.0,
        key_scale: Tensor | None = None,
        row_start: Tensor | None = None,
        row_end: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """``finish(scores, visible, low, high, ids, *numbers)`` of all rows."""
        batch, rows, heads, dim = q.shape
        low, high = row_range(row_start, row_end, k.shape[1], q.device)
        low, high = low.expand(batch, rows), high.expand(batch, rows)
        optional = {"key_scale": key_scale, "mask": mask, "bias": bias, "ids": ids}
        names = [name for name, tensor in optional.items() if tensor is not None]
        more = [tensor for tensor in optional.values() if tensor is not None]

        def step(row: Tensor, *args: Any) -> tuple[Tensor, ...]:
            q, k, weights, low, high = args[:5]
            found = dict(zip(names, args[5 : 5 + len(names)], strict=True))
            some = found.pop("ids", None)
            scores, visible = _scores(
                row,
                q,
                k,
                weights,
                low,
                high,
                scale,
                found.get("key_scale"),
                found.get("mask"),
                found.get("bias"),
            )
            if some is not None:
                some = rows_of(some, row).expand(*scores.shape[:2], -1)
            counts = args[len(tensors) :]
            return finish(scores, visible, low[:, row], high[:, row], some, *counts)

        chunk = max(1, _HEAD_ROWS // max(1, heads)) if isinstance(heads, int) else 1
        tensors = [q, k, weights, low, high, *more]
        return by_rows(step, tensors, numbers, batch, rows, chunk, self._sizes)

    def indexer_select(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        *,
        topk: Size,
        block_ids: Tensor | None = None,
        block_size: int = 0,
        anchored: bool = False,
        fill: float | None = None,
        sorted: bool = True,
        **rows: Any,
    ) -> tuple[Tensor, Tensor]:
        def finish(
            scores: Tensor,
            visible: Tensor,
            low: Tensor,
            high: Tensor,
            ids: Tensor | None,
            topk: Size,
        ) -> tuple[Tensor, ...]:
            if ids is not None:
                inside = in_blocks(ids, low, scores.shape[-1], block_size, anchored)
                visible = visible & inside
            return select(scores, visible, topk, fill)

        values, indices = self._dense(q, k, weights, finish, [topk], ids=block_ids, **rows)
        return values, indices

    def indexer_block_max(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        *,
        topk: Size,
        block_size: int,
        fill: float | None = None,
        sorted: bool = True,
        **rows: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def finish(
            scores: Tensor, visible: Tensor, low: Tensor, high: Tensor, ids: None, topk: Size
        ) -> tuple[Tensor, ...]:
            maxima = block_maxima(scores, visible, block_size, fill)
            return (*select(scores, visible, topk, fill), maxima)

        values, indices, maxima = self._dense(q, k, weights, finish, [topk], **rows)
        return values, indices, maxima

    def indexer_publish(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        *,
        topk: Size,
        num_blocks: Size,
        block_size: int,
        pin_newest: bool = True,
        pin_value: float | None = None,
        fill: float | None = None,
        sorted: bool = True,
        **rows: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def finish(
            scores: Tensor,
            visible: Tensor,
            low: Tensor,
            high: Tensor,
            ids: None,
            topk: Size,
            num_blocks: Size,
        ) -> tuple[Tensor, ...]:
            maxima = block_maxima(scores, visible, block_size, fill)
            if pin_newest:
                newest = torch.div(high - 1, block_size, rounding_mode="floor")[..., None]
                block = torch.arange(maxima.shape[-1], device=maxima.device)
                pin = -NEG_INF if pin_value is None else pin_value
                maxima = maxima.masked_fill(block == newest, pin)
            return (*select(scores, visible, topk, fill), *best(maxima, num_blocks))

        counts = [topk, num_blocks]
        values, indices, kept, blocks = self._dense(q, k, weights, finish, counts, **rows)
        return values, indices, kept, blocks

    def sparse_mqa_logits(self, *args: Any, **kwargs: Any) -> Tensor:
        return aten_sparse.sparse_mqa_logits(*args, sizes=self._sizes, **kwargs)

    def mxfp4_sparse_mqa_logits(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        *args: Any,
        q_scale: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        wide = dequantise_mxfp4(k, k_scale)
        return self.sparse_mqa_logits(wide_queries(q, q_scale), wide, *args, **kwargs)

    def topk(
        self, logits: Tensor, end: Tensor, *, topk: Size, sorted: bool = True
    ) -> tuple[Tensor, Tensor]:
        return aten_sparse.topk(logits, end, topk=topk, sizes=self._sizes)


def select(
    scores: Tensor, visible: Tensor, topk: Size, fill: float | None
) -> tuple[Tensor, Tensor]:
    """Best visible scores of every row and their positions, empty slots filled."""
    values, indices = ranked(torch.where(visible, scores, NEG_INF), topk)
    return fill_hidden(values, indices, scores.shape[-1], fill_value(fill))


def block_maxima(scores: Tensor, visible: Tensor, block_size: int, fill: float | None) -> Tensor:
    """Best visible score of every block [B, S, blocks]; what is hidden or missing is ``fill``."""
    positions, hidden = scores.shape[-1], fill_value(fill)
    blocks = (positions + block_size - 1) // block_size
    shown = torch.where(visible, scores, hidden)
    shown = pad(shown, (0, blocks * block_size - positions), value=hidden)
    return shown.reshape(*scores.shape[:2], blocks, block_size).amax(-1)
