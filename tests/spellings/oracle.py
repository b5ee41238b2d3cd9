"""Inputs of a composed model and what it must select, in float64, by sets.

A set is a row of a bool tensor over positions. ``draw`` searches seeds until every decision (the
k-th best score against the next, the last kept block against the next) is further apart than
rounding can move it, so that equality of sets is a fair test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .formats import exact_scores
from .masks import INF, VISIBILITIES
from .model import BLOCK, BLOCKS, HEAD_DIM, HIDDEN, TOPK, Indexer, Spelling, compose

TRIES = 3000


@dataclass(frozen=True)
class Sizes:
    rows: int
    positions: int
    batch: int = 2


# Coarser formats need fewer decisions for one of the seeds to be free of near-ties.
POSITIONS = {"bf16": (14, 13, 16), "bf16 product": (21, 18, 23)}


def sizes_of(spelling: Spelling, which: int = 0) -> Sizes:
    """The sizes a model is captured at (0), and two others."""
    positions = POSITIONS.get(spelling.numbers, (29, 22, 37))[which]
    rows = {"prefill": positions, "chunk": (9, 5, 12)[which], "decode": 1}[spelling.phase]
    return Sizes(rows, positions, 2 if spelling.layout == "batched" else 1)


def inputs_of(
    spelling: Spelling, sizes: Sizes, seed: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Model inputs for one seed; the flat form has no batch axis."""
    g = torch.Generator().manual_seed(1000 + seed)
    b, s, t = sizes.batch, sizes.rows, sizes.positions
    made = [torch.randn(b, s, HIDDEN, generator=g).to(dtype)]
    if spelling.phase != "prefill":
        made.append(torch.randn(b, t - s, HEAD_DIM, generator=g).to(dtype))
    made += VISIBILITIES[spelling.visibility].make(b, s, t, g)
    if spelling.layout == "flat":
        made = [x if x.dim() == 1 else x[0] for x in made]
    return tuple(x.contiguous() for x in made)


@dataclass(frozen=True)
class Expected:
    """``selected[layer]``, ``allowed[layer]`` bool and ``scores[layer]`` float64, all [B, S, T]."""

    selected: tuple[Tensor, ...]
    allowed: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    gap: float


def best(scores: Tensor, mass: Tensor, allowed: Tensor, k: int) -> tuple[Tensor, float]:
    """The k best of ``allowed`` and the smallest relative gap at the cut."""
    ranked, order = scores.masked_fill(~allowed, -INF).sort(dim=-1, descending=True)
    chosen = torch.zeros_like(allowed).scatter(-1, order[..., :k], ranked[..., :k] > -INF)
    if k >= scores.shape[-1]:
        return chosen, INF
    size = mass.gather(-1, order)
    apart = (ranked[..., k - 1] - ranked[..., k]) / (size[..., k - 1] + size[..., k] + 1e-30)
    cut = ranked[..., k] > -INF
    return chosen, apart[cut].min().item() if cut.any() else INF


def pool(
    scores: Tensor, mass: Tensor, visible: Tensor, ends: Tensor, pinned: bool
) -> tuple[Tensor, float]:
    """Positions of the candidate blocks: the best blocks by their best visible score."""
    n = -(-scores.shape[-1] // BLOCK)
    spare = n * BLOCK - scores.shape[-1]
    masked = torch.nn.functional.pad(scores.masked_fill(~visible, -INF), (0, spare), value=-INF)
    block_scores, at = masked.unflatten(-1, (n, BLOCK)).max(-1)
    at = (at + torch.arange(n) * BLOCK).clamp(max=scores.shape[-1] - 1)
    block_mass = mass.gather(-1, at)
    newest = torch.arange(n) == torch.div(ends - 1, BLOCK, rounding_mode="floor").unsqueeze(-1)
    if pinned:
        block_scores = block_scores.masked_fill(newest, INF)
        block_mass = block_mass.masked_fill(newest, 1.0)
    kept, gap = best(block_scores, block_mass, block_scores > -INF, min(BLOCKS, n))
    inside = kept.repeat_interleave(BLOCK, -1)[..., : scores.shape[-1]]
    return inside & visible, gap


def expect(model: Indexer, inputs: tuple[Tensor, ...], sizes: Sizes) -> Expected:
    """Apply the rule to the model's own operands, in float64."""
    p = model.spelling
    if p.layout == "flat":
        inputs = tuple(x if x.dim() == 1 and x.numel() == 1 else x[None] for x in inputs)
    x, *rest = inputs
    past = rest.pop(0) if p.phase != "prefill" else None
    given = tuple(rest)
    b, s, t = sizes.batch, sizes.rows, sizes.positions
    query = torch.arange(t - s, t).view(1, s, 1).expand(b, s, 1)
    seen = VISIBILITIES[p.visibility]
    visible = seen.oracle(query, torch.arange(t).view(1, 1, t), given).expand(b, s, t)
    ends = query.squeeze(-1) + 1
    if p.visibility == "row lengths":
        ends = given[0]
    elif p.visibility in ("context lengths", "start and end bounds"):
        ends = torch.where(visible.any(-1), t - visible.flip(-1).int().argmax(-1), 0)
    selected, allowed, exact, gap = [], [], [], INF
    inside = visible
    with torch.no_grad():
        keys = model.keys(x, past)
        for layer in range(len(model.spellings)):
            scores, mass = exact_scores(model.operands(x, keys, layer), model.total_scale(layer))
            picked, apart = best(scores, mass, inside, min(TOPK, t))
            gap = min(gap, apart)
            selected.append(picked), allowed.append(inside), exact.append(scores)
            if layer == 0 and len(model.spellings) > 1:
                inside, apart = pool(scores, mass, visible, ends, p.pin != "none")
                gap = min(gap, apart)
    return Expected(tuple(selected), tuple(allowed), tuple(exact), gap)


@dataclass(frozen=True)
class Case:
    """A model, inputs without ties, and what they must give."""

    model: Indexer
    inputs: tuple[Tensor, ...]
    sizes: Sizes
    expected: Expected


def draw(model: Indexer, sizes: Sizes) -> Case:
    for seed in range(TRIES):
        inputs = inputs_of(model.spelling, sizes, seed, model.format.params)
        expected = expect(model, inputs, sizes)
        if expected.gap > model.format.tolerance:
            return Case(model, inputs, sizes, expected)
    raise RuntimeError(f"no inputs without near-ties in {TRIES} seeds for {model.spelling}")


@cache
def case_of(*spellings: Spelling) -> Case:
    """The composed model at its first sizes; one spelling stands for source and consumer."""
    both = spellings * 2 if len(spellings) == 1 else spellings
    return draw(compose(*both), sizes_of(both[0]))


@cache
def other_sizes(*spellings: Spelling) -> tuple[Case, Case]:
    """The same model at two other sizes."""
    model = case_of(*spellings).model
    return draw(model, sizes_of(spellings[0], 1)), draw(model, sizes_of(spellings[0], 2))


# ---------------------------------------------------------------------------- reading a result
def as_sets(out: Tensor, sizes: Sizes, allowed: Tensor, result: str) -> Tensor:
    """What a layer returned, as bool [B, S, T]; malformed selections fail here."""
    shape = (sizes.batch, sizes.rows, -1)
    out = out.reshape(shape)
    if out.dtype == torch.bool:
        return out
    if out.is_floating_point():
        assert ((out == 0) | (out < -1e4)).all(), "an additive bias holds 0 or a fill"
        return out == 0
    assert (out >= (0 if result == "raw" else -1)).all(), "picks below range"
    assert (out < sizes.positions).all(), "picks beyond the context"
    wide = torch.zeros(*out.shape[:2], sizes.positions + 1, dtype=torch.int64)
    at = torch.where(out < 0, sizes.positions, out).long()
    wide.scatter_add_(-1, at, torch.ones_like(at))
    assert (wide[..., : sizes.positions] <= 1).all(), "a position was picked twice"
    picked = wide[..., : sizes.positions] > 0
    return picked & allowed if result == "raw" else picked


def check(case: Case, out: tuple[tuple[Tensor, ...], ...]) -> None:
    """Every layer's sets equal the oracle's; returned values equal its scores, in order."""
    assert len(out) == len(case.model.spellings)
    for layer in range(len(out)):
        check_layer(case, out, layer)


def check_layer(case: Case, out: tuple[tuple[Tensor, ...], ...], layer: int) -> None:
    expected, result = case.expected, case.model.spellings[layer].result
    got = as_sets(out[layer][0], case.sizes, expected.allowed[layer], result)
    wrong = (got != expected.selected[layer]).nonzero()
    assert not len(wrong), (
        f"layer {layer}: {len(wrong)} positions differ, first (batch, row, position) "
        f"{wrong[0].tolist()}"
    )
    if len(out[layer]) == 2:
        check_values(case, out[layer][1], layer)


def check_values(case: Case, values: Tensor, layer: int) -> None:
    expected, p = case.expected, case.model.spellings[layer]
    want = expected.scores[layer].masked_fill(~expected.selected[layer], -INF)
    want = want.sort(dim=-1, descending=True).values[..., : values.shape[-1]]
    got = values.reshape(want.shape).double()
    if p.selection == "topk unsorted":
        got = got.sort(dim=-1, descending=True).values
    found = want > -INF
    tolerance = max(case.model.format.tolerance, 1e-5)
    torch.testing.assert_close(got[found], want[found], rtol=tolerance, atol=tolerance)
    assert (got[~found] < -1e8).all(), "slots that found nothing hold the fill"
