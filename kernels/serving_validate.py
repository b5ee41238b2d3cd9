"""Argument checks of the serving ops; every error names the op and the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quantise import FP8, GROUP
from .validate import FLOATS, INTS, Size, _at_least, _dtype, _known, _tensor, check_rows

ROPES = ("half", "interleaved", "deinterleaved")
NORMS = ("none", "layer", "rms")
QUANTS = ("none", "fp8", "mxfp4")
BYTES = (torch.uint8,)
WEIGHTS_OUT = (torch.float32, torch.bfloat16)
MAX_FP8_DIM = 128


def _choice(op: str, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {value!r}")


def check_rope(
    op: str,
    dim: Size,
    rows: Sequence[Size],
    device: torch.device,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    rope: str,
    rope_start: int,
    hadamard: bool,
) -> None:
    """Checks the rotation of vectors of ``dim`` dims, laid out in ``rows``."""
    _choice(op, "rope", rope, ROPES)
    if hadamard and isinstance(dim, int) and (dim < 1 or dim & (dim - 1)):
        raise ValueError(f"{op}: hadamard needs a power of two of dims, got {dim}")
    if (cos is None) != (sin is None):
        missing = "sin" if sin is None else "cos"
        raise ValueError(f"{op}: {missing} is missing; cos and sin come together")
    layout = "B|1, S|1" if len(rows) == 2 else "N"
    broadcast = 2 if len(rows) == 2 else 0
    if cos is None or sin is None:
        if positions is not None:
            raise ValueError(f"{op}: positions need cos and sin")
        return
    if positions is None:
        shape = f"[{layout}, R/2]"
        _tensor(op, "cos", cos, FLOATS, (*rows, None), device, shape, broadcast=broadcast)
    else:
        _tensor(op, "positions", positions, INTS, rows, device, f"[{layout}]", broadcast=broadcast)
        shape = "[positions, R/2]"
        _tensor(op, "cos", cos, FLOATS, (None, None), device, shape)
        _at_least(op, "cos: positions of the table", cos.shape[0], 1)
    sizes = (*rows, cos.shape[-1]) if positions is None else tuple(cos.shape)
    _tensor(
        op,
        "sin",
        sin,
        FLOATS,
        sizes,
        device,
        f"like cos, {shape}",
        broadcast=broadcast if positions is None else 0,
    )
    _at_least(op, "rope_start", rope_start, 0)
    rotary = 2 * cos.shape[-1]
    if _known(rotary, dim) and rope_start + rotary > dim:
        raise ValueError(
            f"{op}: rope_start + R = {rope_start} + {rotary} exceeds the head dim {dim}"
        )
    if rope == "interleaved" and rope_start % 2:
        raise ValueError(f"{op}: rope_start must be even for interleaved pairs, got {rope_start}")


def check_quant(op: str, dim: Size, quant: str, floor: float, *, none: bool) -> None:
    """Checks the format that vectors of ``dim`` dims are to be quantised to."""
    _choice(op, "quant", quant, QUANTS if none else QUANTS[1:])
    if not floor > 0:
        raise ValueError(f"{op}: floor must be positive, got {floor}")
    if quant == "fp8" and _known(dim) and dim > MAX_FP8_DIM:
        raise ValueError(
            f"{op}: fp8 has one scale for at most {MAX_FP8_DIM} dims, the head dim is {dim}"
        )
    if quant == "fp8" and _known(dim) and dim % 4:
        raise ValueError(f"{op}: fp8 needs a head dim that is a multiple of 4, got {dim}")
    if quant == "mxfp4" and _known(dim) and (dim % GROUP or dim == 0):
        raise ValueError(f"{op}: mxfp4 needs a head dim that is a multiple of 32, got {dim}")


def check_key(
    op: str, k: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: str, eps: float
) -> None:
    """Checks keys and their normalisation."""
    _tensor(op, "k", k, FLOATS, (None, None), k.device, "[N, D]")
    _choice(op, "norm", norm, NORMS)
    _tensor(op, "norm_weight", norm_weight, FLOATS, (k.shape[1],), k.device, "[D]")
    _tensor(op, "norm_bias", norm_bias, FLOATS, (k.shape[1],), k.device, "[D]")
    if norm == "none" and (norm_weight is not None or norm_bias is not None):
        raise ValueError(f"{op}: norm_weight and norm_bias need norm='layer' or 'rms'")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, got {eps}")


def token_bytes(dim: Size, quant: str) -> Size:
    """Bytes of a token in a cache."""
    return dim + 4 if quant == "fp8" else dim // 2 + dim // GROUP


def head_dim(op: str, cache: Tensor, quant: str) -> Size:
    """Head dim of a cache [pages, page, bytes of a token]."""
    size = cache.shape[-1]
    if quant == "fp8":
        return size - 4
    if _known(size) and size % 17:
        raise ValueError(
            f"{op}: cache has {size} bytes a token, which is no number of MXFP4 groups"
        )
    return size // 17 * GROUP


def check_cache(op: str, cache: Tensor, dim: Size | None, quant: str, device: torch.device) -> None:
    """Checks a cache of tokens of ``dim`` dims (None: of any)."""
    _choice(op, "quant", quant, QUANTS[1:])
    size = None if dim is None else token_bytes(dim, quant)
    layout = f"[pages, page, {'bytes of a token' if size is None else size}]"
    _tensor(op, "cache", cache, BYTES, (None, None, size), device, layout)
    page, width = cache.shape[1:]
    _at_least(op, "cache: tokens of a page", page, 1)
    if dim is None:
        check_quant(op, head_dim(op, cache, quant), quant, 1.0, none=False)
    if not _known(page, width) or 0 in cache.shape:
        return
    stride = cache.stride()
    if (page > 1 and stride[1] != width) or stride[2] != 1:
        raise ValueError(f"{op}: a page of cache must be contiguous, its strides are {stride}")
    if quant == "fp8" and cache.shape[0] > 1 and _known(stride[0]) and stride[0] % 4:
        raise ValueError(
            f"{op}: cache has a page stride of {stride[0]} bytes; fp32 scales need a multiple of 4"
        )
    if cache.shape[0] > 1 and _known(stride[0]) and stride[0] < page * width:
        raise ValueError(f"{op}: pages of cache overlap, the page stride is {stride[0]} bytes")


def check_table(op: str, block_table: Tensor, device: torch.device) -> None:
    """Checks a block table."""
    _tensor(op, "block_table", block_table, INTS, (None, None), device, "[Q, P]")


def check_queries(
    op: str, q: Tensor, weights: Tensor, q_scale: Tensor | None, device: torch.device
) -> Size:
    """Checks the queries of a quantised scorer and returns their dim."""
    _dtype(op, "q", q, (*FLOATS, FP8, torch.uint8))
    _tensor(op, "q", q, (q.dtype,), (None,) * 4, device, "[B, S, H, D]")
    b, s, h, width = q.shape
    packed = q.dtype == torch.uint8
    dim = 2 * width if packed else width
    if packed and q_scale is None:
        raise ValueError(f"{op}: q is packed MXFP4 and needs q_scale")
    if not packed and q_scale is not None:
        raise ValueError(
            f"{op}: q_scale belongs to packed MXFP4 queries; fp8 scales go into the weights"
        )
    if packed and _known(dim) and dim % GROUP:
        raise ValueError(f"{op}: q must hold whole groups of 32 dims, got {dim}")
    _tensor(op, "weights", weights, FLOATS, (b, s, h), device, "[B, S, H]")
    _tensor(op, "q_scale", q_scale, BYTES, (b, s, h, dim // GROUP), device, "[B, S, H, D/32]")
    return dim


def check_requests(op: str, q: Tensor, block_table: Tensor, requests: Tensor | None) -> None:
    """Checks which line of the table is a row's."""
    b, s = q.shape[:2]
    if requests is None:
        if _known(b, block_table.shape[0]) and b != block_table.shape[0]:
            raise ValueError(
                f"{op}: block_table has {block_table.shape[0]} lines, q {b} batch items; "
                "requests must say which line is a row's"
            )
        return
    _tensor(op, "requests", requests, INTS, (b, s), q.device, "[B|1, S|1]", broadcast=2)


def check_row_end(op: str, q: Tensor, row_end: Tensor | None) -> None:
    """Checks the context lengths of rows."""
    check_rows(op, "row_end", row_end, q.device)
    _tensor(op, "row_end", row_end, INTS, q.shape[:2], q.device, "[B|1, S|1]", broadcast=2)
