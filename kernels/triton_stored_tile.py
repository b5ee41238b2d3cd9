"""A tile of stored keys: its products with the queries, and its scores."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mxfp4 import largest_byte, ue8m0
from .triton_scores import weighted_sum


@triton.jit
def product_of(key, query, total, TYPE: tl.constexpr):
    """Products of keys and queries, added to others."""
    if TYPE == tl.float32:
        return tl.dot(key, query, total, input_precision="ieee")
    return tl.dot(key, query, total)


@triton.jit
def finish_tile(
    product,
    weight,
    heads,
    factor,
    found,
    column,
    first,
    valid,
    to,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RELU: tl.constexpr,
):
    """Writes the scores of a tile's products where ``column`` is in [first, valid).

    Args:
        factor: what scores are multiplied with where SCALED: fp32, or, where NARROW, the four
            scales of the key, of which the largest had been made 2**13.
    """
    score = weighted_sum(product, weight, heads, PADDED_HEADS, HEADS, RELU)
    if NARROW:
        score *= ue8m0(largest_byte(factor)) * 0.0001220703125
    elif SCALED:
        score *= factor
    score = tl.where(found, score, float("-inf"))
    here = (column >= first) & (column < valid)
    tl.store(to + column, score.to(to.dtype.element_ty), mask=here)
