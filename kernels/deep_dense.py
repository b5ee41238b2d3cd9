"""Dense indexer scores through DeepGEMM: on Hopper, and with bf16 results on SM100.

Releases differ in where a row's scores are: column j is position ``ks + j`` in 2.8.2 and position j
before. Columns outside of a row's range hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import deep_needs
from .deep_package import DeepGemm, bound, check_compiled, require
from .deep_plan import request_of
from .deep_requests import round_up
from .deep_scales import UNIT, for_tma, head_weights, pack_ue8m0, pad_heads
from .reference import NEG_INF, row_range


@dataclass(frozen=True)
class DenseScores:
    """Scores as the kernel leaves them.

    Attributes:
        logits: [B, S, T] fp32 (sm90) or bf16 (sm100); rows are padded (``stride(1) > T``).
        shift: [B, S] int64, position of column 0 of each row; None where it is 0 for all.
        length: [B, S] int64, columns of a row that hold scores: from ``start`` on.
        start: [B, S] int64, the first of them; 0 where ``shift`` is given.
    """

    logits: Tensor
    shift: Tensor | None
    start: Tensor
    length: Tensor


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        raise ValueError(f"dense_scores: DeepGEMM has no kernels for device {device}")
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def dense_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    key_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    capability: tuple[int, int] | None = None,
    package: DeepGemm | None = None,
) -> DenseScores:
    """Scores of every position of a row's range.

    Args:
        q: [B, S, H, D] float8_e4m3fn; int8 [B, S, H, D / 2] (MXFP4) on sm100.
        k: [B|1, T, D] like q.
        weights: [B, S, H]; without the query scale if ``q_scale`` is given.
        key_scale: [B|1, T]; float32 on sm90; UE8M0 or float32 powers of two on sm100.
        q_scale: [B, S, H] UE8M0 or float32; folded into the weights on sm90.
        row_start, row_end: [B|1, S|1] the range of a row.
        capability: of the device; asked of it when None.
        package: the bound DeepGEMM; the installed one when None.

    Raises:
        ValueError: DeepGEMM does not take the call; the message lists every unmet need.
    """
    gemm = require(package)
    device = _capability(q.device) if capability is None else capability
    request = request_of(
        q, k, capability=device, sparse_block=None, key_scale=key_scale, q_scale=q_scale
    )
    unmet = deep_needs.dense_needs(request, gemm.compact_dense)
    if unmet:
        raise ValueError(deep_needs.describe("dense_scores cannot be served by DeepGEMM", unmet))
    batch, rows, heads = q.shape[:3]
    positions = k.shape[1]
    low, high = row_range(row_start, row_end, positions, q.device)
    low = low.expand(batch, rows)
    length = (high - low).clamp(min=0).expand(batch, rows)
    blackwell = device[0] == 10
    compact = gemm.compact_dense
    if 0 in (batch, rows, positions):
        dtype = torch.bfloat16 if blackwell else torch.float32
        empty = torch.empty(batch, rows, positions, dtype=dtype, device=q.device)
        return DenseScores(empty, None, low, torch.zeros_like(length))
    if blackwell:
        kernel_heads = round_up(heads, 4)
        scales = pack_ue8m0(q_scale, tuple(q.shape[:3]), q.device).flatten(0, 1)
        query_scale: Tensor | None = pad_heads(scales, kernel_heads, UNIT)
        key_scales = pack_ue8m0(key_scale, tuple(k.shape[:2]), k.device)
        given, dtype = weights, torch.bfloat16
    else:
        kernel_heads, query_scale, dtype = heads, None, torch.float32
        given = weights.float() if q_scale is None else weights.float() * q_scale.float()
        unit = torch.ones(k.shape[:2], device=k.device)
        key_scales = unit if key_scale is None else key_scale
    query = pad_heads(q.flatten(0, 1), kernel_heads)
    weight = head_weights(given.flatten(0, 1), kernel_heads, dtype)
    parts = []
    for item in range(k.shape[0]):
        # One launch a batch of keys: a launch over all keys would be B times as wide.
        part = slice(None) if k.shape[0] == 1 else slice(item * rows, (item + 1) * rows)
        first = low.flatten()[part].to(torch.int32).contiguous()
        last = (low + length).flatten()[part].to(torch.int32).contiguous()
        parts.append(
            _launch(
                gemm,
                query[part],
                None if query_scale is None else query_scale[part],
                (for_tma(k[item]), for_tma(key_scales[item])),
                weight[part],
                first,
                last,
            )
        )
    logits = parts[0].unflatten(0, (-1, rows)) if len(parts) == 1 else torch.stack(parts)
    start = torch.zeros_like(low) if compact else low
    return DenseScores(logits, low if compact else None, start, length)


def _launch(
    gemm: DeepGemm,
    query: Tensor,
    query_scale: Tensor | None,
    keys: tuple[Tensor, Tensor],
    weights: Tensor,
    first: Tensor,
    last: Tensor,
) -> Tensor:
    kernel = bound(gemm.dense_logits)
    check_compiled(gemm, ("dense", query.dtype, *query.shape[1:], query_scale is None))
    positions = keys[0].shape[0]
    options: dict[str, int | bool] = {}
    if gemm.compact_dense:
        options["max_seqlen_k"] = positions
    elif "clean_logits" in kernel.roles:
        options["clean_logits"] = False
    return kernel(q=(query, query_scale), kv=keys, weights=weights, ks=first, ke=last, **options)[
        :, :positions
    ]


def dense_mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    scale: float = 1.0,
    key_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    row_start: Tensor | None = None,
    row_end: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    capability: tuple[int, int] | None = None,
    package: DeepGemm | None = None,
) -> Tensor:
    """Scores float32 [B, S, T] by position, -inf where hidden; arguments as :func:`dense_scores`.

    ``mask`` and ``bias`` are [B|1, S|1, T]; they, ``scale``, and on sm100 a float32 ``key_scale``
    of any value, are applied to the kernel's result in fp32.
    """
    device = _capability(q.device) if capability is None else capability
    late = device[0] == 10 and key_scale is not None and key_scale.dtype == torch.float32
    found = dense_scores(
        q,
        k,
        weights,
        key_scale=None if late else key_scale,
        q_scale=q_scale,
        row_start=row_start,
        row_end=row_end,
        capability=device,
        package=package,
    )
    low, high = row_range(row_start, row_end, k.shape[1], q.device)
    position = torch.arange(k.shape[1], device=q.device)
    logits = found.logits.float()
    if found.shift is not None and row_start is not None:
        column = (position - found.shift[..., None]).clamp(min=0)
        logits = logits.gather(-1, column)
    if scale != 1.0:
        logits = logits * scale
    if late:
        assert key_scale is not None
        logits = logits * key_scale[:, None]
    if bias is not None:
        logits = logits + bias
    hidden = (position < low[..., None]) | (position >= high[..., None])
    logits = logits.masked_fill(hidden, NEG_INF)
    return logits if mask is None else logits.masked_fill(~mask, NEG_INF)
