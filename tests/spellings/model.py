"""A two-level indexer composed of one choice along each axis, and a single-level one.

The source layer scores every visible position, keeps the best ``BLOCKS`` blocks (the newest one
pinned) and publishes them; the consumer layer selects its top-k inside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .candidates import (
    BLOCK_MAXIMA,
    PINS,
    PUBLISHED,
    candidate_mask,
)
from .formats import FORMATS, Operands, quantise
from .masks import INF, VISIBILITIES, Rows, applied, floor, low
from .scorer import HEAD_SUMS, PRODUCTS, RELUS, SCALES, Scorer, scaled, total_scale
from .selection import CASTS, RESULTS, SELECTIONS, Picks

HEADS, HEAD_DIM, HIDDEN = 6, 8, 24
BLOCK, BLOCKS, TOPK = 4, 3, 7


@dataclass(frozen=True)
class Spelling:
    """One choice along each axis; ``source`` is the source layer's scorer where it differs."""

    scorer: Scorer = field(default_factory=Scorer)
    source: Scorer | None = None
    numbers: str = "fp32"
    layout: str = "batched"
    phase: str = "prefill"
    visibility: str = "not at or beyond length"
    form: str = "masked_fill"
    fill: str = "-inf"
    block_max: str = "pad unflatten amax"
    pin: str = "masked_fill"
    publish: str = "table"
    rebuild: str = "scatter with spare column"
    expansion: str = "repeat_interleave"
    candidate_form: str = "masked_fill"
    order: str = "after"
    selection: str = "topk"
    result: str = "-1 by value"
    cast: str = "int64"
    k: str = "min"
    values: str = "unused"


class Indexer(nn.Module):
    """What the composed models share; sub-classes fix the signature of ``forward``."""

    def __init__(self, spelling: Spelling, seed: int = 0, layers: int = 2) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        fmt = FORMATS[spelling.numbers]

        def projection(width: int) -> nn.Parameter:
            weight = torch.randn(width, HIDDEN, generator=g) * HIDDEN**-0.5
            return nn.Parameter(weight.to(fmt.params))

        self.spelling, self.format = spelling, fmt
        self.layers = layers
        self.wq = nn.ParameterList([projection(HEADS * HEAD_DIM) for _ in range(layers)])
        self.ww = nn.ParameterList([projection(HEADS) for _ in range(layers)])
        self.wk = projection(HEAD_DIM)
        self.softmax_scale, self.head_scale = HEAD_DIM**-0.5, HEADS**-0.5
        self.topk, self.block, self.blocks = TOPK, BLOCK, BLOCKS

    def scorer(self, layer: int) -> Scorer:
        mine = self.spelling.source if layer == 0 and self.layers > 1 else None
        return mine or self.spelling.scorer

    def total_scale(self, layer: int) -> float:
        return total_scale(self.scorer(layer).scale, self.softmax_scale, self.head_scale)

    # -- scores ----------------------------------------------------------------------------
    def operands(self, x: Tensor, keys: Tensor, layer: int) -> Operands:
        q = F.linear(x, self.wq[layer]).unflatten(-1, (HEADS, HEAD_DIM))
        return quantise(self.format, q, keys, F.linear(x, self.ww[layer]))

    def scale(self, x: Tensor, layer: int, place: str) -> Tensor:
        factors = SCALES[self.scorer(layer).scale].get(place, ())
        return scaled(x, factors, self.softmax_scale, self.head_scale)

    def score(self, x: Tensor, keys: Tensor, layer: int) -> Tensor:
        fmt, scorer = self.format, self.scorer(layer)
        given = self.operands(x, keys, layer)
        q, k = given.query, given.key
        if fmt.operands is not None:
            q, k = q.to(fmt.operands), k.to(fmt.operands)
        q, k = self.scale(q, layer, "query"), self.scale(k, layer, "key")
        w = given.weights if fmt.weights is None else given.weights.to(fmt.weights)
        w = self.scale(w, layer, "weights")
        if scorer.product == "loop over heads":
            total = self.loop_over_heads(q, k, w, layer)
        elif scorer.product == "loop over head chunks":
            half = HEADS // 2
            total = self.reduced(q[..., :half, :], k, w[..., :half], layer)
            total = total + self.reduced(q[..., half:, :], k, w[..., half:], layer)
        else:
            total = self.reduced(q, k, w, layer)
        total = self.scale(total, layer, "sum")
        if given.key_scale is not None:
            total = total * given.key_scale.unsqueeze(-2)
        return total

    def reduced(self, q: Tensor, k: Tensor, w: Tensor, layer: int) -> Tensor:
        scorer = self.scorer(layer)
        parts, axes = PRODUCTS[scorer.product](q, k)
        if self.format.scores is not None:
            parts = parts.to(self.format.scores)
        parts = self.activate(self.scale(parts, layer, "before"), axes, w, layer)
        return HEAD_SUMS[scorer.head_sum](self.scale(parts, layer, "after"), axes, w)

    def activate(self, parts: Tensor, axes: str, w: Tensor, layer: int) -> Tensor:
        return RELUS[self.scorer(layer).relu](parts)

    def loop_over_heads(self, q: Tensor, k: Tensor, w: Tensor, layer: int) -> Tensor:
        total = None
        for h in range(HEADS):
            part = q[..., h, :] @ k.transpose(-1, -2)
            if self.format.scores is not None:
                part = part.to(self.format.scores)
            part = RELUS[self.scorer(layer).relu](self.scale(part, layer, "before"))
            part = self.scale(part, layer, "after") * w[..., h].unsqueeze(-1)
            total = part if total is None else total + part
        assert total is not None
        return total

    # -- masks -----------------------------------------------------------------------------
    def hide(self, s: Tensor, ok: Tensor, rows: Rows, inputs: tuple[Tensor, ...]) -> Tensor:
        spelling = self.spelling
        if VISIBILITIES[spelling.visibility].form is not None:
            bias = inputs[0]
            return s + (bias if bias.dim() == s.dim() else bias.squeeze(-3)).to(s.dtype)
        if spelling.form == "add full triu":
            full = torch.full((rows.rows, rows.positions), low(spelling.fill, s), dtype=s.dtype)
            return s + full.triu(rows.offset + 1)
        return applied(spelling.form, s, ok, spelling.fill)

    def restrict(
        self, s: Tensor, published: Tensor, ok: Tensor, rows: Rows, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Causal and candidate masks applied to ``s``, in the order of the spelling."""
        p = self.spelling
        mask = self.candidates(published, rows)
        if p.publish == "additive table":
            s = self.hide(s, ok, rows, inputs) if p.order != "before" else s
            s = s + mask.to(s.dtype)
            s = self.hide(s, ok, rows, inputs) if p.order == "before" else s
            return s, mask == 0
        if p.order == "joint":
            return applied(p.form, s, ok & mask, self.fill), mask
        if p.order == "before":
            return self.hide(applied(p.candidate_form, s, mask, self.fill), ok, rows, inputs), mask
        return applied(p.candidate_form, self.hide(s, ok, rows, inputs), mask, self.fill), mask

    def candidates(self, published: Tensor, rows: Rows) -> Tensor:
        p = self.spelling
        return candidate_mask(
            published, p.publish, p.rebuild, p.expansion, rows.positions, self.block
        )

    def publish(self, s: Tensor, ends: Tensor, rows: Rows) -> Tensor:
        p = self.spelling
        best = BLOCK_MAXIMA[p.block_max](s, self.block, low(self.fill, s))
        newest = torch.div(ends - 1, self.block, rounding_mode="floor")
        best = PINS[p.pin](best, newest)
        top = best.topk(self.count(self.blocks, best.shape[-1]), dim=-1)
        made = PUBLISHED[p.publish](best, top.values, top.indices, floor(self.fill, s))
        if p.publish == "position mask":
            made = made.repeat_interleave(self.block, dim=-1)[..., : rows.positions]
        return made

    # -- selection -------------------------------------------------------------------------
    @property
    def fill(self) -> str:
        form = VISIBILITIES[self.spelling.visibility].form
        return self.spelling.fill if form is None else form.removeprefix("input ")

    def count(self, k: int, available: int) -> int:
        return min(k, available) if self.spelling.k == "min" else k

    def select(
        self, s: Tensor, ok: Tensor, cand: Tensor | None, ends: Tensor
    ) -> tuple[Tensor, ...]:
        p = self.spelling
        values, indices = SELECTIONS[p.selection](s, self.count(self.topk, s.shape[-1]))
        picks = Picks(s, values, CASTS[p.cast](indices), ok, cand, ends, floor(self.fill, s))
        made = RESULTS[p.result](picks)
        return (made,) if p.values == "unused" else (made, values)

    # -- forward ---------------------------------------------------------------------------
    def keys(self, x: Tensor, past: Tensor | None) -> Tensor:
        new = F.linear(x, self.wk)
        return new if past is None else torch.cat([past, new], dim=-2)

    def run(self, x: Tensor, past: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        keys = self.keys(x, past)
        batch = x.shape[0] if x.dim() == 3 else None
        rows = Rows(batch, x.shape[-2], keys.shape[-2])
        seen = VISIBILITIES[self.spelling.visibility]
        ok, ends = seen.visible(rows, inputs), seen.ends(rows, inputs)
        first = self.hide(self.score(x, keys, 0), ok, rows, inputs)
        out = self.select(first, ok, None, ends)
        if self.layers == 1:
            return out
        published = self.publish(first, ends, rows)
        for layer in range(1, self.layers):
            s, cand = self.restrict(self.score(x, keys, layer), published, ok, rows, inputs)
            out = (*out, *self.select(s, ok, cand, ends))
        return out


class Plain(Indexer):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, None)


class OneInput(Indexer):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, None, mask)


class TwoInputs(Indexer):
    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, None, start, end)


class Cached(Indexer):
    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, past)


class CachedOneInput(Indexer):
    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, past, mask)


class CachedTwoInputs(Indexer):
    def forward(self, x: Tensor, past: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, ...]:
        return self.run(x, past, start, end)


def compose(spelling: Spelling, layers: int = 2) -> Indexer:
    """The model of ``spelling``: a source and ``layers - 1`` consumers, or a single-level one."""
    inputs = VISIBILITIES[spelling.visibility].inputs
    kinds = (
        (Plain, OneInput, TwoInputs)
        if spelling.phase == "prefill"
        else (Cached, CachedOneInput, CachedTwoInputs)
    )
    return kinds[inputs](spelling, layers=layers).eval()


__all__ = ["BLOCK", "BLOCKS", "HEADS", "HEAD_DIM", "INF", "TOPK", "Indexer", "Spelling", "compose"]
