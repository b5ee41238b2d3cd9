"""Dense scores on the CPU, tile by tile, written where the caller wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cpu_plan import Part, dense_tile, parts, scratch
from .cpu_threads import for_each
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


@dataclass(frozen=True)
class _Strip:
    """Some tiles of rows of one group of batch items against key positions [first, stop)."""

    group: Part
    tiles: tuple[Part, ...]
    first: int
    stop: int


class _Scorer:
    """Writes the scores of one part of the rows, strip by strip."""

    def __init__(self, out: Tensor, problem: Problem, part: Part, high: Tensor, origin: int):
        self.out, self.part, self.origin = out, part, origin
        self.problem, self.dtype = problem.restrict(part), problem.dtype
        self.q, self.weights = self.problem.q.to(self.dtype), self.problem.weights.to(self.dtype)
        self.high = part.of(high)
        self.lows: list[list[int]] = self.problem.low.tolist()
        self.highs: list[list[int]] = self.high.tolist()

    def operations(self) -> int:
        """Multiplications and additions of all visible scores."""
        heads, dim = self.q.shape[2:]
        return 2 * heads * dim * int((self.high - self.problem.low).clamp(min=0).sum())

    def sight(self, tile: Part, first: int, stop: int) -> tuple[bool, bool]:
        """Whether any row of ``tile`` sees any of the positions, and whether all see all."""
        bounds = [
            pair
            for lows, highs in zip(
                self.lows[tile.b0 : tile.b1], self.highs[tile.b0 : tile.b1], strict=True
            )
            for pair in zip(lows[tile.s0 : tile.s1], highs[tile.s0 : tile.s1], strict=True)
        ]
        some = any(low < stop and high > first and low < high for low, high in bounds)
        return some, some and all(low <= first and high >= stop for low, high in bounds)

    def write(self, strip: _Strip, buffer: Tensor, columns: bool) -> None:
        """Scores of a strip, its keys widened once for all its tiles."""
        keys: Tensor | None = None
        for tile in strip.tiles:
            target = tile.of(self.out)[..., strip.first - self.origin : strip.stop - self.origin]
            some, clear = self.sight(tile, strip.first, strip.stop)
            if not some:
                target.fill_(NEG_INF)
                continue
            if keys is None:
                keys = self.problem.k
                keys = keys if keys.shape[0] == 1 else keys[strip.group.b0 : strip.group.b1]
                keys = keys[:, strip.first : strip.stop].to(self.dtype)
            q, weights = tile.of(self.q).contiguous(), tile.of(self.weights).contiguous()
            scores = head_sum(q, keys, weights, buffer)
            self.adjust(scores, tile, strip.first, strip.stop, columns)
            if not clear:
                position = torch.arange(strip.first, strip.stop)
                hidden = position < tile.of(self.problem.low)[..., None]
                hidden |= position >= tile.of(self.high)[..., None]
                scores.masked_fill_(hidden, NEG_INF)
            target.copy_(scores)

    def adjust(self, scores: Tensor, tile: Part, first: int, stop: int, columns: bool) -> None:
        """Applies scale and key scale, and bias and mask unless they are laid out by column."""
        given = self.problem
        if given.scale != 1.0:
            scores.mul_(given.scale)
        if given.key_scale is not None:
            scores.mul_(given.key_scale[tile.b0 : tile.b1, None, first:stop].to(self.dtype))
        if given.bias is not None and not columns:
            scores.add_(tile.of(given.bias)[..., first:stop].to(self.dtype))
        if given.mask is not None and not columns:
            scores.masked_fill_(~tile.of(given.mask)[..., first:stop], NEG_INF)


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
    heads = problem.q.shape[2]
    scorer = _Scorer(out, problem, part, problem.high if high is None else high, c0)
    tile_rows, width = dense_tile(heads, part.batch * part.rows)
    items = max(1, tile_rows // max(part.rows, 1))
    strips: list[_Strip] = []
    for b in range(0, part.batch, items):
        group = Part(b, min(b + items, part.batch), 0, part.rows)
        tiles = tuple(parts(group, tile_rows))
        # Few strips keep few threads busy: then every tile is on its own.
        chunks = [tiles] if c1 - c0 > 16 * width else [(tile,) for tile in tiles]
        for c in range(c0, c1, width):
            strips += [_Strip(group, some, c, min(c + width, c1)) for some in chunks]

    def worker() -> Callable[[_Strip], None]:
        buffer = scratch(out, tile_rows * heads * min(width, c1 - c0), scorer.dtype)
        return lambda strip: scorer.write(strip, buffer, columns)

    for_each(strips, worker, scorer.operations())
