"""Random arguments for the canonical ops, with everything that callers are known to send."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .oracle import Case

JUNK = (-1, -7, -(2**30), 2**30, 2**31 - 1, -(2**31))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def restride(tensor: Tensor, how: int) -> Tensor:
    """The same values under other strides.

    How: 0 as they are, 1 a slice of a wider tensor, 2 transposed, 3 the head of a longer cache.
    """
    if how == 1:
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), 99, dtype=torch.float64)
        wide = wide.to(tensor.dtype)
        wide[..., 2:-1] = tensor
        return wide[..., 2:-1]
    if how == 2 and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == 3 and tensor.dim() > 1:
        spare = tensor.new_full((*tensor.shape[:-2], 5, tensor.shape[-1]), 99)
        return torch.cat((tensor, spare), dim=-2)[..., : tensor.shape[-2], :]
    return tensor


def integers(rng: random.Random, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(low, high + 1, shape, generator=generator)


def row_bound(rng: random.Random, batch: int, rows: int, n: int) -> Tensor:
    shape = (rng.choice((1, batch)), rng.choice((1, rows)) if rows else rng.choice((0, 1)))
    dtype = rng.choice((torch.int32, torch.int64))
    return integers(rng, -3, n + 3, *shape).to(dtype)


def random_ids(rng: random.Random, batch: int, rows: int, n: int, block_size: int) -> Tensor:
    shape = (rng.choice((1, batch)), rng.choice((1, rows)) if rows else rng.choice((0, 1)))
    count = rng.choice((0, 1, 2, 3, 5, 9))
    blocks = -(-n // block_size)
    ids = integers(rng, 0, blocks + 1, *shape, count)
    junk = torch.tensor(JUNK)[integers(rng, 0, len(JUNK) - 1, *shape, count)]
    ids = torch.where(integers(rng, 0, 3, *shape, count) == 0, junk, ids)
    if rng.random() < 0.5:
        ids = ids.to(torch.int32)
    elif count and ids.numel():
        ids.view(-1)[0] = rng.choice((2**62, -(2**62), 2**63 - 1))
    return ids


def exact_case(seed: int, *, candidates: bool) -> Case:
    """Small integers everywhere, so that every dtype computes every score exactly; many ties."""
    rng = random.Random(seed)
    batch, rows = rng.choice((1, 1, 2, 3)), rng.choice((0, 1, 1, 2, 5))
    n, heads, dim = rng.choice((1, 2, 7, 16, 29, 40)), rng.randint(1, 5), rng.randint(1, 6)
    span = rng.choice((1, 2, 3))

    def floats(*shape: int) -> Tensor:
        values = integers(rng, -span, span, *shape).to(rng.choice(FLOATS))
        return restride(values, rng.choice((0, 0, 1, 2, 3)))

    kwargs: dict[str, object] = {}
    if rng.random() < 0.5:
        kwargs["scale"] = rng.choice((0.5, 0.25, 2.0, -1.0, 0.0))
    if rng.random() < 0.3:
        powers = torch.tensor([0.25, 0.5, 1.0, 2.0])
        kwargs["key_scale"] = powers[integers(rng, 0, 3, rng.choice((1, batch)), n)]
    if rng.random() < 0.6:
        kwargs["row_end"] = row_bound(rng, batch, rows, n)
    if rng.random() < 0.4:
        kwargs["row_start"] = row_bound(rng, batch, rows, n)
    shape = (rng.choice((1, batch)), rng.choice((1, rows)) if rows else rng.choice((0, 1)), n)
    if rng.random() < 0.3:
        kwargs["mask"] = restride(integers(rng, 0, 2, *shape) > 0, rng.choice((0, 1, 2)))
    if rng.random() < 0.3:
        bias = integers(rng, -2, 2, *shape).to(rng.choice(FLOATS))
        if rng.random() < 0.3:
            bias = bias.masked_fill(bias == 2, -torch.inf)
        kwargs["bias"] = restride(bias, rng.choice((0, 1, 2)))
    keys = floats(rng.choice((1, batch)), n, dim)
    if rng.random() < 0.2:
        keys = keys.expand(batch, -1, -1)
    case = Case(
        floats(batch, rows, heads, dim),
        keys,
        floats(batch, rows, heads),
        kwargs,
    )
    if not candidates:
        return case
    block_size = rng.choice((1, 2, 3, 4, 8, 8, 16))
    ids = random_ids(rng, batch, rows, n, block_size)
    anchored = rng.random() < 0.4
    return Case(case.q, case.k, case.weights, kwargs, ids, block_size, anchored)
