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
from .masks import VISIBILITIES, Rows, applied, floor, low
from .scorer import HEAD_SUMS, PRODUCTS, RELUS, SCALES, Scorer, scaled, total_scale
from .selection import CASTS, RESULTS, SELECTIONS, Picks

HEADS, HEAD_DIM, HIDDEN = 6, 8, 24
BLOCK, BLOCKS, TOPK = 4, 3, 7


Selected = tuple[Tensor, ...]


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
    """What the composed models share; sub-classes fix the signature of ``forward``.

    ``spellings`` has one entry a layer: the source (or the only layer), then the consumers, which
    agree on everything but the axes of a consumer. Consumers hold equal values in parameters of
    their own, so that one oracle serves them all.
    """

    def __init__(self, *spellings: Spelling, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        fmt = FORMATS[spellings[0].numbers]

        def projections(width: int) -> nn.ParameterList:
            first, other = (torch.randn(width, HIDDEN, generator=g) * HIDDEN**-0.5 for _ in "ab")
            each = [first, *(other for _ in spellings[1:])]
            return nn.ParameterList([nn.Parameter(w.to(fmt.params, copy=True)) for w in each])

        self.spellings, self.format = spellings, fmt
        self.spelling = spellings[0]
        self.wq, self.ww = projections(HEADS * HEAD_DIM), projections(HEADS)
        self.wk = projections(HEAD_DIM)[0]
        self.softmax_scale, self.head_scale = HEAD_DIM**-0.5, HEADS**-0.5
        self.topk, self.block, self.blocks = TOPK, BLOCK, BLOCKS

    def scorer(self, layer: int) -> Scorer:
        p = self.spellings[layer]
        return p.source if layer == 0 and p.source is not None else p.scorer

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
    @property
    def fill(self) -> str:
        form = VISIBILITIES[self.spelling.visibility].form
        return self.spelling.fill if form is None else form.removeprefix("input ")

    def hide(self, s: Tensor, ok: Tensor, rows: Rows, inputs: tuple[Tensor, ...]) -> Tensor:
        p = self.spelling
        if VISIBILITIES[p.visibility].form is not None:
            bias = inputs[0]
            return s + (bias if bias.dim() == s.dim() else bias.squeeze(-3)).to(s.dtype)
        if p.form == "add full triu":
            full = torch.full((rows.rows, rows.positions), low(p.fill, s), dtype=s.dtype)
            return s + full.triu(rows.offset + 1)
        return applied(p.form, s, ok, p.fill)

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        p = self.spellings[layer]
        return candidate_mask(
            published, p.publish, p.rebuild, p.expansion, rows.positions, self.block
        )

    def restrict(
        self,
        s: Tensor,
        published: Tensor,
        ok: Tensor,
        rows: Rows,
        inputs: tuple[Tensor, ...],
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Causal and candidate masks applied to ``s``, in the order of the spelling."""
        p, mask = self.spellings[layer], self.candidates(published, rows, layer)
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

    def publish(self, s: Tensor, ends: Tensor, rows: Rows) -> Tensor:
        p = self.spelling
        best = BLOCK_MAXIMA[p.block_max](s, self.block, low(self.fill, s))
        newest = torch.div(ends - 1, self.block, rounding_mode="floor")
        best = PINS[p.pin](best, newest)
        top = best.topk(self.count(self.blocks, best.shape[-1], 0), dim=-1)
        made = PUBLISHED[p.publish](best, top.values, top.indices, floor(self.fill, s))
        if p.publish == "position mask":
            made = made.repeat_interleave(self.block, dim=-1)[..., : rows.positions]
        return made

    # -- selection -------------------------------------------------------------------------
    def count(self, k: int, available: int, layer: int) -> int:
        return min(k, available) if self.spellings[layer].k == "min" else k

    def select(
        self, s: Tensor, ok: Tensor, cand: Tensor | None, ends: Tensor, layer: int
    ) -> tuple[Tensor, ...]:
        p = self.spellings[layer]
        values, indices = SELECTIONS[p.selection](s, self.count(self.topk, s.shape[-1], layer))
        picks = Picks(s, values, CASTS[p.cast](indices), ok, cand, ends, floor(self.fill, s))
        made = RESULTS[p.result](picks)
        return (made,) if values is None or p.values == "unused" else (made, values)

    # -- forward ---------------------------------------------------------------------------
    def keys(self, x: Tensor, past: Tensor | None) -> Tensor:
        new = F.linear(x, self.wk)
        return new if past is None else torch.cat([past, new], dim=-2)

    def run(self, x: Tensor, past: Tensor | None, *inputs: Tensor) -> tuple[Selected, ...]:
        """What each layer selects, and its values where they are used."""
        keys = self.keys(x, past)
        batch = x.shape[0] if x.dim() == 3 else None
        rows = Rows(batch, x.shape[-2], keys.shape[-2])
        seen = VISIBILITIES[self.spelling.visibility]
        ok, ends = seen.visible(rows, inputs), seen.ends(rows, inputs)
        first = self.hide(self.score(x, keys, 0), ok, rows, inputs)
        out = (self.select(first, ok, None, ends, 0),)
        if len(self.spellings) == 1:
            return out
        published = self.publish(first, ends, rows)
        for layer in range(1, len(self.spellings)):
            s = self.score(x, keys, layer)
            s, cand = self.restrict(s, published, ok, rows, inputs, layer)
            out = (*out, self.select(s, ok, cand, ends, layer))
        return out


class Plain(Indexer):
    def forward(self, x: Tensor) -> tuple[Selected, ...]:
        return self.run(x, None)


class OneInput(Indexer):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Selected, ...]:
        return self.run(x, None, mask)


class TwoInputs(Indexer):
    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> tuple[Selected, ...]:
        return self.run(x, None, start, end)


class Cached(Indexer):
    def forward(self, x: Tensor, past: Tensor) -> tuple[Selected, ...]:
        return self.run(x, past)


class CachedOneInput(Indexer):
    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> tuple[Selected, ...]:
        return self.run(x, past, mask)


class CachedTwoInputs(Indexer):
    def forward(self, x: Tensor, past: Tensor, start: Tensor, end: Tensor) -> tuple[Selected, ...]:
        return self.run(x, past, start, end)


def compose(*spellings: Spelling) -> Indexer:
    """The model of a source layer and its consumers, or of a single-level indexer."""
    p = spellings[0]
    inputs = VISIBILITIES[p.visibility].inputs
    plain, cached = (Plain, OneInput, TwoInputs), (Cached, CachedOneInput, CachedTwoInputs)
    return (plain if p.phase == "prefill" else cached)[inputs](*spellings).eval()
