"""Draw the caches that a read of pages is proven on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.key_cache_reference import parts_of_pages
from dsa_compile.kernels.quantise import dequantise_mxfp4


@dataclass(frozen=True)
class CacheDraw:
    """A drawn cache.

    Attributes:
        cache: as the model takes it.
        rows: its numbers, a row a token.
        factors: scales of the rows, fp32; empty where they are in the numbers.
    """

    cache: Tensor
    rows: Tensor
    factors: Tensor


def draw_numbers(
    generator: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scales: torch.dtype | None,
) -> CacheDraw:
    """Rows of numbers of many sizes; some hold a NaN or an infinity, as unwritten ones do.

    Args:
        generator: of the draw.
        shape, dtype: of the cache.
        scales: dtype of the cache of scales beside it, None where there is none.
    """
    numbers = torch.randn(shape, generator=generator) * _sizes(generator, (*shape[:-1], 1))
    odd = torch.rand(shape, generator=generator)
    numbers = numbers.masked_fill(odd < 0.01, torch.nan).masked_fill(odd > 0.99, torch.inf)
    cache = numbers.to(dtype)
    rows = cache.reshape(-1, shape[-1])
    factors = _sizes(generator, (rows.shape[0],))
    return CacheDraw(cache, rows, factors if scales is None else factors.to(scales))


def draw_fused(
    generator: torch.Generator, shape: tuple[int, ...], page: int, quant: str
) -> CacheDraw:
    """Fused pages of bytes, with scales of many sizes.

    Args:
        generator: of the draw.
        shape: of the cache; its first dim are the pages, its last one the bytes of a token.
        page: tokens a page.
        quant: ``"fp8"`` or ``"mxfp4"``.
    """
    drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    cache = drawn.reshape(shape[0], page, shape[-1])
    values, scales = parts_of_pages(cache, quant)
    if quant == "fp8":
        factors = _sizes(generator, tuple(scales.shape[:2]))
        scales.copy_(factors[..., None].view(torch.uint8))
        numbers = values.contiguous().view(torch.float8_e4m3fn).float()
        return CacheDraw(cache.reshape(shape), numbers.flatten(0, 1), factors.flatten())
    # The smallest code is below what fp32 holds with all its bits, the largest is no number.
    scales.clamp_(1, 254)
    numbers = dequantise_mxfp4(values.contiguous(), scales.contiguous())
    return CacheDraw(cache.reshape(shape), numbers.flatten(0, 1), numbers.new_zeros(0))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, and a NaN at the same places."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _sizes(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Positive numbers, half of them ordinary, so that nothing which bounds keys can hide."""
    power = torch.rand(shape, generator=generator) - 0.5
    wide = torch.rand(shape, generator=generator) < 0.5
    return 10 ** torch.where(wide, 60 * power, power)
