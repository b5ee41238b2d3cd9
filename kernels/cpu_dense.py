"""Dense scores on the CPU, tile by tile, written where the caller wants them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cpu_plan import Part, dense_tile, parts, scratch
from .reference import NEG_INF, accumulator, row_range


@dataclass(frozen=True)
class Problem:
    """Arguments of a scoring op with the broadcast dimensions written out (as views)."""

    q: Tensor
    k: Tensor
    weights: Tensor
    scale: float
    key_scale: Tensor | None
    low: Tensor
    high: Tensor
    mask: Tensor | None
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return accumulator(self.q, self.k, self.weights)

    @property
    def whole(self) -> Part:
        return Part(0, self.q.shape[0], 0, self.q.shape[1])

    def restrict(self, part: Part) -> Problem:
        """The same problem for some of the rows."""
        items = slice(part.b0, part.b1)
        return replace(
            self,
            q=part.of(self.q),
            k=self.k if self.k.shape[0] == 1 else self.k[items],
            weights=part.of(self.weights),
            key_scale=None if self.key_scale is None else self.key_scale[items],
            low=part.of(self.low),
            high=part.of(self.high),
            mask=None if self.mask is None else part.of(self.mask),
            bias=None if self.bias is None else part.of(self.bias),
        )


def problem(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    scale: float,
    key_scale: Tensor | None,
    row_start: Tensor | None,
    row_end: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> Problem:
    """Collects the arguments; nothing is copied but the bounds of the rows."""
    batch, rows = q.shape[:2]
    if q.shape[3] == 0:
        q, k = pad(q, (0, 1)), pad(k, (0, 1))
    low, high = row_range(row_start, row_end, k.shape[1], q.device)
    return Problem(
        q=q,
        k=k,
        weights=weights,
        scale=scale,
        key_scale=None if key_scale is None else key_scale.expand(batch, -1),
        low=low.expand(batch, rows),
        high=high.expand(batch, rows),
        mask=None if mask is None else mask.expand(batch, rows, -1),
        bias=None if bias is None else bias.expand(batch, rows, -1),
    )


def head_sum(q: Tensor, keys: Tensor, weights: Tensor, buffer: Tensor) -> Tensor:
    """Weighted sum over heads of relu(q . keys) as [b, s, n].

    Args:
        q: [b, s, H, D] contiguous.
        keys: [b|1, n, D] of the same dtype.
        weights: [b, s, H] contiguous.
        buffer: flat, at least b * s * H * n elements; overwritten.
    """
    batch, rows, heads, dim = q.shape
    n = keys.shape[1]
    products = buffer[: batch * rows * heads * n]
    if rows == 1 and keys.shape[0] == batch:
        # One row an item: keys times its few heads is the form that BLAS packs least for.
        tall = products.view(batch, n, heads)
        if batch == 1:
            torch.mm(keys[0], q[0, 0].t(), out=tall[0])
        else:
            torch.bmm(keys, q[:, 0].transpose(1, 2), out=tall)
        return torch.bmm(tall.relu_(), weights.transpose(1, 2)).transpose(1, 2)
    if keys.shape[0] == 1:
        flat = products.view(batch * rows * heads, n)
        torch.mm(q.view(batch * rows * heads, dim), keys[0].t(), out=flat)
    else:
        flat = products.view(batch, rows * heads, n)
        torch.bmm(q.view(batch, rows * heads, dim), keys.transpose(1, 2), out=flat)
    products.relu_()
    summed = torch.bmm(weights.view(batch * rows, 1, heads), products.view(batch * rows, heads, n))
    return summed.view(batch, rows, n)


def _sight(low: list[int], high: list[int], c0: int, c1: int) -> tuple[bool, bool]:
    """Whether any row sees any of the positions [c0, c1), and whether all rows see all."""
    seen = any(a < c1 and b > c0 and a < b for a, b in zip(low, high, strict=True))
    return seen, seen and max(low) <= c0 and min(high) >= c1


def dense_into(
    out: Tensor,
    problem: Problem,
    part: Part,
    c0: int,
    c1: int,
    *,
    high: Tensor | None = None,
    columns: bool = False,
) -> None:
    """Writes the scores of positions [c0, c1) to ``out`` [b, s, c1 - c0], -inf where hidden.

    Args:
        high: Another upper bound [B, S] of the rows, at most the problem's own.
        columns: Mask and bias of the problem are laid out by column: leave them to the caller.
    """
    dtype = problem.dtype
    heads = problem.q.shape[2]
    q, weights = part.of(problem.q).to(dtype), part.of(problem.weights).to(dtype)
    low_rows = part.of(problem.low)
    high_rows = part.of(problem.high if high is None else high)
    tile_rows, strip = dense_tile(heads, part.batch * part.rows)
    buffer = scratch(q, tile_rows * heads * min(strip, max(c1 - c0, 1)), dtype)
    local = Part(0, part.batch, 0, part.rows)
    items = max(1, tile_rows // max(part.rows, 1))
    bounds = list(zip(low_rows.tolist(), high_rows.tolist(), strict=True))
    for b in range(0, local.b1, items):
        group = Part(b, min(b + items, local.b1), 0, part.rows)
        tiles = list(parts(group, tile_rows))
        shared = problem.k.shape[0] == 1
        b0, b1 = (0, 1) if shared else (part.b0 + group.b0, part.b0 + group.b1)
        for c in range(c0, c1, strip):
            end = min(c + strip, c1)
            keys: Tensor | None = None
            for tile in tiles:
                target = tile.of(out)[..., c - c0 : end - c0]
                pairs = bounds[tile.b0 : tile.b1]
                low_list = [x for rows, _ in pairs for x in rows[tile.s0 : tile.s1]]
                high_list = [x for _, rows in pairs for x in rows[tile.s0 : tile.s1]]
                seen, clear = _sight(low_list, high_list, c, end)
                if not seen:
                    target.fill_(NEG_INF)
                    continue
                if keys is None:
                    keys = problem.k[b0:b1, c:end].to(dtype)
                scores = head_sum(
                    tile.of(q).contiguous(), keys, tile.of(weights).contiguous(), buffer
                )
                if problem.scale != 1.0:
                    scores.mul_(problem.scale)
                absolute = Part(
                    part.b0 + tile.b0, part.b0 + tile.b1, part.s0 + tile.s0, part.s0 + tile.s1
                )
                if problem.key_scale is not None:
                    factors = problem.key_scale[absolute.b0 : absolute.b1, None, c:end]
                    scores.mul_(factors.to(dtype))
                if problem.bias is not None and not columns:
                    scores.add_(absolute.of(problem.bias)[..., c:end].to(dtype))
                if problem.mask is not None and not columns:
                    scores.masked_fill_(~absolute.of(problem.mask)[..., c:end], NEG_INF)
                if not clear:
                    position = torch.arange(c, end, device=q.device)
                    hidden = position < tile.of(low_rows)[..., None]
                    hidden |= position >= tile.of(high_rows)[..., None]
                    scores.masked_fill_(hidden, NEG_INF)
                target.copy_(scores)
