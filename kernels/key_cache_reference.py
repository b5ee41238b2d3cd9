"""Plain PyTorch meaning of the key cache: normalise, rotate, quantise, write, read back.

A page holds the values of all its tokens, then all their scales. LayerNorm has the biased variance
and RMSNorm the mean square, both with ``eps`` added under the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fused_q_reference import angles, turn
from .quantise import GROUP, quantise
from .reference import accumulator


def normalise(
    k: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``"layer"`` or ``"rms"`` normalisation of k [N, D], rounded to k's dtype."""
    if norm == "none":
        return k
    x = k.to(accumulator(k))
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        x = x * weight.to(x.dtype)
    if bias is not None:
        x = x + bias.to(x.dtype)
    return x.to(k.dtype)


def indexer_k_quant(
    k: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "none",
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope: str = "half",
    rope_start: int = 0,
    hadamard: bool = False,
    quant: str = "fp8",
    pow2_scale: bool = True,
    floor: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Quantised keys and their scales; see ``serving_schemas``."""
    k = normalise(k, norm, norm_weight, norm_bias, eps)
    if cos is not None and sin is not None:
        cos, sin = angles(cos, sin, positions, accumulator(k))
    k = turn(k, cos, sin, rope, rope_start, hadamard)
    values, scales = quantise(k, quant, power_of_two=pow2_scale, floor=floor)
    assert scales is not None
    return values.contiguous(), scales.contiguous()


def parts_of_pages(cache: Tensor, quant: str) -> tuple[Tensor, Tensor]:
    """Values uint8 [pages, page, .] and bytes of scales [pages, page, .], as views of the cache."""
    pages, page, width = cache.shape
    size = width - 4 if quant == "fp8" else width // 17 * (GROUP // 2)
    flat = cache.as_strided((pages, page * width), (cache.stride(0), 1), cache.storage_offset())
    values, scales = flat[:, : page * size], flat[:, page * size :]
    return values.unflatten(1, (page, size)), scales.unflatten(1, (page, width - size))


def write_slots(cache: Tensor, values: Tensor, scales: Tensor, slots: Tensor, quant: str) -> None:
    """Writes quantised keys [N, .] to their slots; one out of range writes nothing."""
    pages, page, _ = cache.shape
    slots = slots.long()
    real = ((slots >= 0) & (slots < pages * page)).nonzero().squeeze(-1)
    slot = slots[real]
    for part, data in zip(parts_of_pages(cache, quant), (values, scales), strict=True):
        raw = data.contiguous()[..., None].view(torch.uint8).flatten(1)
        part[slot // page, slot % page] = raw[real]


def indexer_k_quant_and_cache(
    k: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    quant: str = "fp8",
    **options: object,
) -> None:
    """Writes normalised, rotated, quantised keys into pages; see ``serving_schemas``."""
    if k.shape[0] == 0 or 0 in cache.shape:
        return
    values, scales = indexer_k_quant(k, quant=quant, **options)  # type: ignore[arg-type]
    write_slots(cache, values, scales, slots, quant)


def read_tokens(
    cache: Tensor, page: Tensor, token: Tensor, found: Tensor, quant: str
) -> tuple[Tensor, Tensor]:
    """Values and scales of tokens of pages; zero bytes where not ``found``.

    Args:
        page, token, found: of one shape [...]; where not found, page and token may be anything.
    """
    page = torch.where(found, page, 0)
    token = torch.where(found, token, 0)
    values, scales = (
        torch.where(found[..., None], part[page, token], 0) for part in parts_of_pages(cache, quant)
    )
    if quant == "fp8":
        return values.view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32).squeeze(-1)
    return values, scales


def find_pages(
    cache: Tensor, block_table: Tensor, line: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Page, token within it, and whether the cache has it, of positions of lines of the table.

    ``line`` broadcasts to ``position``; a line or position outside the table is not found.
    """
    pages, page, _ = cache.shape
    block = torch.div(position, page, rounding_mode="floor")
    inside = (position >= 0) & (block < block_table.shape[1])
    inside = inside & (line >= 0) & (line < block_table.shape[0])
    if block_table.numel() == 0 or cache.numel() == 0:
        nowhere = torch.zeros_like(block)
        return nowhere, nowhere, torch.zeros_like(inside)
    safe = torch.where(inside, block, 0)
    at = block_table.long()[torch.where(inside, line, 0), safe]
    found = inside & (at >= 0) & (at < pages)
    return at, position - block * page, found


def gather_indexer_k(
    cache: Tensor, block_table: Tensor, starts: Tensor, *, num_tokens: int, quant: str = "fp8"
) -> tuple[Tensor, Tensor]:
    """Keys of requests, packed one after the other; see ``serving_schemas``."""
    token = torch.arange(num_tokens, device=cache.device)
    starts = starts.long()
    line = torch.searchsorted(starts, token, right=True) - 1
    real = (line >= 0) & (line < block_table.shape[0])
    position = token - starts[line.clamp(0, starts.shape[0] - 1)]
    page, inner, found = find_pages(cache, block_table, line, torch.where(real, position, -1))
    if 0 in cache.shape:
        width = cache.shape[2]
        size = width - 4 if quant == "fp8" else width // 17 * (GROUP // 2)
        values = cache.new_zeros((num_tokens, size))
        if quant == "fp8":
            return values.view(torch.float8_e4m3fn), cache.new_zeros(num_tokens).float()
        return values, cache.new_zeros((num_tokens, width - size))
    values, scales = read_tokens(cache, page, inner, found, quant)
    return values.contiguous(), scales.contiguous()
