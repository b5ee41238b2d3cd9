"""Argument checks shared by the fakes and the kernels; every error names the argument.

Sizes may be symbolic. Only sizes that are plain integers are compared, so a fake adds no guard to
the graph; the kernels run the same checks on real sizes. A wrong dtype is a ``TypeError``, a wrong
shape or number a ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Size: TypeAlias = int | torch.SymInt

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
BOOLS = (torch.bool,)


def _known(a: Size, b: Size = 0) -> bool:
    return isinstance(a, int) and isinstance(b, int)


def _dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{op}: {name} must be one of {names}, got {tensor.dtype}")


def _tensor(
    op: str,
    name: str,
    tensor: Tensor | None,
    allowed: Sequence[torch.dtype],
    sizes: Sequence[Size | None],
    device: torch.device,
    layout: str,
    *,
    broadcast: int = 0,
) -> None:
    """Checks one argument. ``sizes``: None is free; the first ``broadcast`` ones may also be 1."""
    if tensor is None:
        return
    _dtype(op, name, tensor, allowed)
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, the first argument on {device}")
    if tensor.dim() != len(sizes):
        raise ValueError(f"{op}: {name} must be {layout}, got shape {tuple(tensor.shape)}")
    for axis, (got, want) in enumerate(zip(tensor.shape, sizes, strict=True)):
        if want is None or not _known(got, want) or got == want:
            continue
        if axis < broadcast and got == 1:
            continue
        raise ValueError(
            f"{op}: {name} must be {layout}, got shape {tuple(tensor.shape)} (dim {axis} is {got}, "
            f"expected {want}{' or 1' if axis < broadcast else ''})"
        )


def _at_least(op: str, name: str, value: Size, low: int) -> None:
    if _known(value) and value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def _at_most(op: str, name: str, value: Size, high: Size, what: str) -> None:
    if _known(value, high) and value > high:
        raise ValueError(f"{op}: {name} = {value} exceeds {what} = {high}")


def check_scores(
    op: str,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    key_scale: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    columns: Size | None,
) -> None:
    """Checks what every scoring op takes. ``columns`` is the width of mask and bias (None: T)."""
    device = q.device
    _tensor(op, "q", q, FLOATS, (None,) * 4, device, "[B, S, H, D]")
    b, s, h, d = q.shape
    _tensor(op, "k", k, FLOATS, (b, None, d), device, "[B|1, T, D]", broadcast=1)
    t = k.shape[1]
    _tensor(op, "weights", weights, FLOATS, (b, s, h), device, "[B, S, H]")
    _tensor(op, "key_scale", key_scale, FLOATS, (b, t), device, "[B|1, T]", broadcast=1)
    _tensor(op, "row_start", row_start, INTS, (b, s), device, "[B|1, S|1]", broadcast=2)
    _tensor(op, "row_end", row_end, INTS, (b, s), device, "[B|1, S|1]", broadcast=2)
    width, layout = (t, "[B|1, S|1, T]") if columns is None else (columns, "[B|1, S|1, W]")
    _tensor(op, "mask", mask, BOOLS, (b, s, width), device, layout, broadcast=2)
    _tensor(op, "bias", bias, FLOATS, (b, s, width), device, layout, broadcast=2)


def check_select(
    op: str, q: Tensor, k: Tensor, topk: Size, block_ids: Tensor | None, block_size: int
) -> None:
    """Checks top-k and candidates of a dense selection, after :func:`check_scores`."""
    _at_least(op, "topk", topk, 0)
    _at_most(op, "topk", topk, k.shape[1], "the number of key positions T")
    if block_ids is not None:
        _at_least(op, "block_size", block_size, 1)
        sizes = (q.shape[0], q.shape[1], None)
        _tensor(op, "block_ids", block_ids, INTS, sizes, q.device, "[B|1, S|1, C]", broadcast=2)


def check_publish(op: str, k: Tensor, block_size: int, num_blocks: Size | None) -> None:
    """Checks the block arguments of a source layer."""
    _at_least(op, "block_size", block_size, 1)
    if num_blocks is not None:
        _at_least(op, "num_blocks", num_blocks, 0)
        blocks = (k.shape[1] + block_size - 1) // block_size
        _at_most(op, "num_blocks", num_blocks, blocks, "the number of blocks ceil(T / block_size)")


def wider(a: Size, b: Size) -> Size:
    """The size that two sizes broadcast to."""
    if _known(a, b):
        return b if a == 1 else a
    return torch.broadcast_shapes((a,), (b,))[0]


def row_shape(op: str, **tensors: Tensor | None) -> tuple[Size, Size]:
    """Broadcasts the leading [B|1, S|1] of some arguments, naming the one that does not fit."""
    b: Size = 1
    s: Size = 1
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        for axis, have in enumerate((b, s)):
            got = tensor.shape[axis]
            if _known(got, have) and got != have and 1 not in (got, have):
                raise ValueError(f"{op}: {name} dim {axis} is {got}, expected {have} or 1")
        b, s = wider(b, tensor.shape[0]), wider(s, tensor.shape[1])
    return b, s


def check_rows(op: str, name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Checks a bound of rows [B|1, S|1] whose sizes are broadcast later."""
    _tensor(op, name, tensor, INTS, (None, None), device, "[B|1, S|1]")


def check_expand(
    op: str,
    block_ids: Tensor,
    row_start: Tensor | None,
    row_end: Tensor | None,
    num_positions: Size,
    block_size: int,
    sparse_block: int,
) -> tuple[Size, Size]:
    """Checks ``candidate_expand`` and returns its (B, S)."""
    _tensor(op, "block_ids", block_ids, INTS, (None,) * 3, block_ids.device, "[B|1, S|1, C]")
    check_rows(op, "row_start", row_start, block_ids.device)
    check_rows(op, "row_end", row_end, block_ids.device)
    _at_least(op, "num_positions", num_positions, 0)
    _at_least(op, "block_size", block_size, 1)
    _at_least(op, "sparse_block", sparse_block, 1)
    if block_size % sparse_block:
        raise ValueError(
            f"{op}: sparse_block = {sparse_block} does not divide block_size = {block_size}"
        )
    return row_shape(op, block_ids=block_ids, row_start=row_start, row_end=row_end)


def check_columns(
    op: str, blocks: Tensor, row_start: Tensor | None, num_positions: Size, sparse_block: int
) -> tuple[Size, Size]:
    """Checks ``candidate_columns`` and returns its (B, S)."""
    _tensor(op, "blocks", blocks, INTS, (None,) * 3, blocks.device, "[B|1, S|1, N]")
    check_rows(op, "row_start", row_start, blocks.device)
    _at_least(op, "num_positions", num_positions, 0)
    _at_least(op, "sparse_block", sparse_block, 1)
    return row_shape(op, blocks=blocks, row_start=row_start)


def sparse_width(op: str, blocks: Tensor, sparse_block: int) -> Size:
    """Columns of a block list, checked as far as that needs."""
    _tensor(op, "blocks", blocks, INTS, (None,) * 3, blocks.device, "[B|1, S|1, N]")
    _at_least(op, "sparse_block", sparse_block, 1)
    return blocks.shape[2] * sparse_block


def check_sparse(op: str, q: Tensor, blocks: Tensor, end: Tensor) -> None:
    """Checks the candidates of ``sparse_mqa_logits`` against checked scores."""
    b, s = q.shape[:2]
    _tensor(op, "blocks", blocks, INTS, (b, s, None), q.device, "[B|1, S|1, N]", broadcast=2)
    _tensor(op, "end", end, INTS, (b, s), q.device, "[B|1, S|1]", broadcast=2)


def check_topk(op: str, logits: Tensor, end: Tensor, topk: Size) -> None:
    """Checks ``topk``."""
    _tensor(op, "logits", logits, FLOATS, (None,) * 3, logits.device, "[B, S, W]")
    b, s = logits.shape[:2]
    _tensor(op, "end", end, INTS, (b, s), logits.device, "[B|1, S|1]", broadcast=2)
    _at_least(op, "topk", topk, 0)


def check_remap(
    op: str,
    values: Tensor,
    columns: Tensor,
    blocks: Tensor,
    row_start: Tensor | None,
    num_positions: Size,
    sparse_block: int,
) -> None:
    """Checks ``topk_remap``: a row must have room for as many distinct positions as slots."""
    device = values.device
    _tensor(op, "values", values, FLOATS, (None,) * 3, device, "[B, S, k]")
    b, s, k = values.shape
    _tensor(op, "columns", columns, INTS, (b, s, k), device, "[B, S, k]")
    _tensor(op, "blocks", blocks, INTS, (b, s, None), device, "[B|1, S|1, N]", broadcast=2)
    _tensor(op, "row_start", row_start, INTS, (b, s), device, "[B|1, S|1]", broadcast=2)
    _at_least(op, "sparse_block", sparse_block, 1)
    _at_most(op, "values: top-k", k, num_positions, "num_positions")
