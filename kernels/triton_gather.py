"""Keys out of the pages of a cache, packed one request after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantise import GROUP
from .serving_results import gather_indexer_k as results_of
from .triton_key_cache import no_elements
from .triton_sparse import MAX_DIM
from .triton_tools import at_most, bound, power_of_two, result, wrap_triton
from .validate import Size


@triton.jit
def gather_kernel(
    cache,
    block_table,
    starts,
    values,
    scales,
    count,
    requests,
    pages,
    page,
    stride,
    columns,
    size,
    scale_size,
    table_q,
    table_p,
    starts_q,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE_SIZE: tl.constexpr,
):
    """TOKENS of the workspace a program: the request of each by bisection, its page, its bytes."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = row < count
    low = tl.zeros([TOKENS], tl.int32)
    high = low + requests + 1
    # How many of the starts are at most the token.
    for _ in tl.static_range(STEPS):
        mid = (low + high) // 2
        start = tl.load(starts + mid.to(tl.int64) * starts_q, mask=mid <= requests, other=0)
        below = (mid < high) & (start.to(tl.int64) <= row)
        low, high = tl.where(below, mid + 1, low), tl.where(below, high, mid)
    line = low - 1
    real_line = real & (line >= 0) & (line < requests)
    safe = tl.where(real_line, line, 0).to(tl.int64)
    first = tl.load(starts + safe * starts_q, mask=real_line, other=0).to(tl.int64)
    position = row - first
    block = position // page
    real_line = real_line & (block < columns)
    at = block_table + safe * table_q + tl.where(real_line, block, 0) * table_p
    which = tl.load(at, mask=real_line, other=-1).to(tl.int64)
    found = real_line & (which >= 0) & (which < pages)
    base = tl.where(found, which, 0) * stride
    token = tl.where(found, position % page, 0)
    row64 = row.to(tl.int64)

    byte = tl.arange(0, SIZE)
    wanted = byte[None, :] < size
    data = tl.load(
        cache + (base + token * size)[:, None] + byte[None, :],
        mask=found[:, None] & wanted,
        other=0,
    )
    tl.store(values + row64[:, None] * size + byte[None, :], data, mask=real[:, None] & wanted)
    byte = tl.arange(0, SCALE_SIZE)
    wanted = byte[None, :] < scale_size
    base += tl.cast(page, tl.int64) * size + token * scale_size
    data = tl.load(cache + base[:, None] + byte[None, :], mask=found[:, None] & wanted, other=0)
    to = scales + row64[:, None] * scale_size + byte[None, :]
    tl.store(to, data, mask=real[:, None] & wanted)


def gather_indexer_k(
    cache: Tensor,
    block_table: Tensor,
    starts: Tensor,
    *,
    num_tokens: Size,
    quant: str = "fp8",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys of requests, packed one after the other; see ``dsa::gather_indexer_k``.

    Args:
        out: (values, scales) to write into, contiguous.
    """
    op = "gather_indexer_k"
    shapes = results_of(cache, block_table, starts, num_tokens=num_tokens, quant=quant)
    given = (None, None) if out is None else out
    parts = [result(to, op, cache, *part) for to, part in zip(given, shapes, strict=True)]
    if no_elements(parts[0]):
        return parts[0], parts[1]
    if no_elements(cache, block_table):
        for part in parts:
            part.view(torch.uint8).zero_()
        return parts[0], parts[1]
    width = cache.shape[2]
    size = width - 4 if quant == "fp8" else width // 17 * (GROUP // 2)
    scale_size = width - size
    at_most(op, "the number of bytes of a key", size, MAX_DIM)
    requests = block_table.shape[0]
    tokens = 32
    wrap_triton(gather_kernel)[((num_tokens + tokens - 1) // tokens,)](
        cache,
        block_table,
        starts,
        *(part if part.dtype == torch.uint8 else part.view(torch.uint8) for part in parts),
        num_tokens,
        requests,
        cache.shape[0],
        cache.shape[1],
        cache.stride(0),
        block_table.shape[1],
        size,
        scale_size,
        *block_table.stride(),
        starts.stride(0),
        STEPS=bound(requests, 2**20).bit_length() + 1,
        TOKENS=tokens,
        SIZE=power_of_two(bound(size, 256)),
        SCALE_SIZE=power_of_two(bound(scale_size, 16)),
        num_warps=4,
    )
    return parts[0], parts[1]
