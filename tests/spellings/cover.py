"""Which compositions are tested: each choice alone on the default, and a seeded pairwise cover."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from .candidates import BLOCK_MAXIMA, EXPANSIONS, ID_MASKS, ID_TABLES, PINS, PUBLISHED
from .formats import FORMATS
from .masks import APPLIED, FILLS, VISIBILITIES
from .model import Spelling
from .scorer import HEAD_SUMS, ONE_SEQUENCE, PRODUCTS, RELUS, SCALES, Scorer
from .selection import (
    BY_VISIBILITY,
    CASTS,
    NEEDS_INFINITE,
    NEEDS_VALUES,
    RESULTS,
    SELECTIONS,
    WITHOUT_VALUES,
)

SCORER_AXES: dict[str, tuple[str, ...]] = {
    "product": tuple(PRODUCTS),
    "relu": tuple(RELUS),
    "scale": tuple(SCALES),
    "head_sum": tuple(HEAD_SUMS),
}
AXES: dict[str, tuple[str, ...]] = {
    "numbers": tuple(FORMATS),
    "layout": ("batched", "one", "flat"),
    "phase": ("prefill", "chunk", "decode"),
    "visibility": tuple(VISIBILITIES),
    "form": (*APPLIED, "add full triu"),
    "fill": FILLS,
    "block_max": tuple(BLOCK_MAXIMA),
    "pin": tuple(PINS),
    "publish": tuple(PUBLISHED),
    "rebuild": (*ID_TABLES, *ID_MASKS),
    "expansion": tuple(EXPANSIONS),
    "candidate_form": tuple(APPLIED),
    "order": ("after", "before", "joint"),
    "selection": tuple(SELECTIONS),
    "result": tuple(RESULTS),
    "cast": tuple(CASTS),
    "k": ("min", "const"),
    "values": ("unused", "used"),
}
EVERY = {**SCORER_AXES, **AXES}
CONSUMER_AXES = {
    *SCORER_AXES,
    *("rebuild", "expansion", "candidate_form", "order", "selection", "result", "cast", "values"),
}
# A choice that needs another one beside it.
TOGETHER: dict[tuple[str, str], dict[str, str]] = {
    ("form", "one minus"): {"fill": "finfo.min"},
    ("candidate_form", "one minus"): {"fill": "-1e9"},
    ("candidate_form", "where full_like"): {"publish": "ids int64"},
    **{("product", name): {"layout": "one"} for name in ONE_SEQUENCE},
    **{("rebuild", name): {"publish": "ids int64"} for name in (*ID_TABLES, *ID_MASKS)},
    **{("selection", name): {"result": "-1 by gathered score"} for name in WITHOUT_VALUES},
    ("selection", "topk unsorted, sorted by index"): {"result": "-1 by index"},
    ("order", "before"): {"publish": "ids int32"},
}


def problem(p: Spelling) -> str | None:
    """Why a composition means something else than the oracle, or None."""
    seen = VISIBILITIES[p.visibility]
    fill = p.fill if seen.form is None else seen.form
    scorers = [s for s in (p.scorer, p.source) if s is not None]
    if p.layout == "batched" and any(s.product in ONE_SEQUENCE for s in scorers):
        return "one sequence only"
    if p.fill == "-inf" and "one minus" in (p.form, p.candidate_form):
        return "0 * inf"
    if seen.form is not None and (p.order == "joint" or p.fill != "-inf" or "minus" in p.form):
        return "the mask is added as it comes"
    if p.form == "add full triu" and (seen.inputs or p.order == "joint"):
        return "triangular masks are causal"
    if p.order == "joint" and p.publish == "additive table":
        return "an additive table is added"
    if p.selection in WITHOUT_VALUES and (p.result in NEEDS_VALUES or p.values == "used"):
        return "no values"
    if p.result in NEEDS_INFINITE and not fill.endswith("-inf"):
        return "hidden scores are finite"
    if p.result in BY_VISIBILITY and not seen.prefix:
        return "picks outside the candidates may be visible"
    if p.publish == "additive table" and p.values == "used" and not fill.endswith("-inf"):
        return "mixed fills"
    return None


def with_choice(base: Spelling, axis: str, value: str) -> Spelling:
    if axis in SCORER_AXES:
        return replace(base, scorer=replace(base.scorer, **{axis: value}))
    return replace(base, **{axis: value})


def chosen(p: Spelling, axis: str) -> str:
    return getattr(p.scorer if axis in SCORER_AXES else p, axis)


def alone() -> Iterator[tuple[str, Spelling]]:
    """Every choice on the default, with what it needs beside it."""
    yield "default", Spelling()
    for axis, values in EVERY.items():
        for value in values:
            if value == chosen(Spelling(), axis):
                continue
            p = Spelling()
            for other, needed in TOGETHER.get((axis, value), {}).items():
                p = with_choice(p, other, needed)
            p = with_choice(p, axis, value)
            assert problem(p) is None, (axis, value, problem(p))
            yield f"{axis}: {value}", p


def drawn(rng: random.Random) -> Spelling:
    while True:
        scorers = [
            Scorer(**{axis: rng.choice(values) for axis, values in SCORER_AXES.items()})
            for _ in range(2)
        ]
        rest = {axis: rng.choice(values) for axis, values in AXES.items()}
        # Three numbers in four are plain, so that the other axes meet them.
        if rng.random() < 0.5:
            rest["numbers"] = "fp32"
        p = Spelling(scorer=scorers[0], source=scorers[1], **rest)
        if problem(p) is None:
            return p


def pairs(p: Spelling) -> set[tuple[str, str, str, str]]:
    values = [(axis, chosen(p, axis)) for axis in EVERY]
    return {(*a, *b) for a, b in itertools.combinations(values, 2)}


def cover(count: int, seed: int = 7, tried: int = 25) -> list[Spelling]:
    """``count`` valid compositions, each the best of ``tried`` by pairs not met before."""
    rng = random.Random(seed)
    met: set[tuple[str, str, str, str]] = set()
    out: list[Spelling] = []
    for _ in range(count):
        p = max((drawn(rng) for _ in range(tried)), key=lambda c: len(pairs(c) - met))
        met |= pairs(p)
        out.append(p)
    return out


def packed(size: int = 9) -> Iterator[dict[str, Spelling]]:
    """``alone``, in groups that differ on the axes of a consumer only: a source of the default
    scorer can have them all as consumers, so that one capture tests them all."""
    groups: dict[tuple[str, ...], dict[str, Spelling]] = {}
    for name, p in alone():
        key = tuple(chosen(p, axis) for axis in EVERY if axis not in CONSUMER_AXES)
        groups.setdefault(key, {})[name] = p
    for group in groups.values():
        names = list(group)
        for i in range(0, len(names), size):
            yield {name: group[name] for name in names[i : i + size]}


ALONE = dict(alone())
PACKS = list(packed())
COMBINED = {f"{i:02d}": p for i, p in enumerate(cover(60))}
