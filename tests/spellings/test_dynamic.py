"""Captured with dynamic sizes, a model is right at other sizes without being captured again."""

from __future__ import annotations

import pytest
import torch

from .hosts import check_sites, fresh, run_case
from .model import Spelling
from .oracle import case_of, check, other_sizes
from .scorer import Scorer

CASES: dict[str, tuple[str, Spelling]] = {
    # torch 2.14's export gives up all dynamic sizes where a model pads by a remainder.
    "prefill": ("exported", Spelling(block_max="pad view max")),
    "chunk": (
        "exported",
        Spelling(
            Scorer("matmul heads first", "clamp_min", "before relu", "matmul weights left"),
            phase="chunk",
            publish="ids int32",
            visibility="position compare",
            form="where",
            cast="int32",
        ),
    ),
    "flat decode": (
        "exported",
        Spelling(
            Scorer("einsum ellipsis", "where zero", "weights twice", "einsum"),
            layout="flat",
            phase="decode",
            publish="ids int64",
            rebuild="compare and any",
            result="-1 by gathered score",
        ),
    ),
    "padding": (
        "compiled",
        Spelling(
            Scorer("bmm expanded keys", "maximum", "after sum", "weights left"),
            visibility="padding",
            form="add",
            publish="ids int64",
            rebuild="scatter of positions",
            result="-1 by gathered score",
        ),
    ),
    "packed": (
        "compiled",
        Spelling(
            Scorer("einsum sbhd,tbd->sbht", "relu_", "both after relu", "matmul weights right"),
            visibility="start and end bounds",
            publish="table functional",
            expansion="gather by position // block",
            selection="sort",
        ),
    ),
    "tril, by index": (
        "compiled",
        Spelling(visibility="tril", publish="additive table", result="-1 by index"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_sizes_are_right_too(name: str) -> None:
    host, spelling = CASES[name]
    case = case_of(spelling)
    got = run_case(case, host, dynamic=True)
    check(case, got.outputs)
    check_sites(got.sites, case.model.spellings)
    for other in other_sizes(spelling):
        with torch.no_grad():
            check(other, got.module(*fresh(other.inputs)))
    # Another capture would have added sites of its own.
    check_sites(got.sites, case.model.spellings)
