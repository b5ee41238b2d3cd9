"""Single-level indexers, consumers that share candidates, and candidates given as inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .bare import Consumer, draw, exact_selection, sets
from .cover import COMBINED
from .hosts import HOSTS, check_sites, describe, run, run_case
from .model import Spelling, compose
from .oracle import check, sizes_of
from .oracle import draw as draw_case

PLAIN = Spelling(publish="ids int32", rebuild="scatter with spare column")
EXPAND = "dsa_cpu.candidate_expand.default"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("phase", ["prefill", "chunk", "decode"])
def test_a_single_level_indexer_is_fused(phase: str, host: str) -> None:
    p = Spelling(phase=phase, layout="flat" if phase == "decode" else "batched")
    case = draw_case(compose(p), sizes_of(p))
    got = run_case(case, host)
    check(case, got.outputs)
    check_sites(got.sites, case.model.spellings)


@pytest.mark.parametrize("name", ["05", "18", "33"])
def test_single_level_indexers_of_the_cover_are_fused(name: str) -> None:
    case = draw_case(compose(COMBINED[name]), sizes_of(COMBINED[name]))
    got = run_case(case, "exported")
    check(case, got.outputs)
    check_sites(got.sites, case.model.spellings)


@pytest.mark.parametrize("host", HOSTS)
def test_consumers_of_the_same_ids_share_one_expansion(host: str) -> None:
    other = replace(PLAIN, selection="sort", result="bool mask")
    case = draw_case(compose(PLAIN, PLAIN, other), sizes_of(PLAIN))
    got = run_case(case, host)
    check(case, got.outputs)
    check_sites(got.sites, case.model.spellings)
    assert got.module.report.op_counts_after[EXPAND] == 1


IDS = {
    "gaps": [5, 0, 3],
    "unused": [-1, 2, -1],
    "none": [-1, -1, -1],
    "duplicates": [4, 4, 1],
    "beyond the context": [7, 8, 1000],
    "far out of range": [2**30, -(2**30), 6],
    "ascending": [0, 1, 2],
}


@pytest.mark.parametrize("mask", ["compare and any", "isin-like", "compare with block bounds"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_as_an_input_mean_what_the_model_makes_of_them(mask: str, dtype: torch.dtype) -> None:
    """Proven on well-formed ids, right on any: the model itself ignores what is out of range."""
    q, k, w = draw(11, 1, 7, 29)
    ends = torch.tensor([[0, 1, 4, 9, 20, 28, 29]])
    if mask == "compare with block bounds" and dtype == torch.int32:
        ends = ends.to(torch.int32)
    first = torch.tensor([[[0, 2, 5]]]).expand(1, 7, 3).to(dtype).contiguous()
    host = "exported" if dtype == torch.int64 else "compiled"
    got = run(Consumer(5, 4, mask), (q, k, w, first, ends), host)
    assert [(s.kind, s.status) for s in got.sites] == [("consumer", "rewritten")], describe(
        got.sites
    )
    position = torch.arange(29)
    for name, row in IDS.items():
        ids = torch.tensor(row).expand(1, 7, 3).to(dtype).contiguous()
        allowed = (position // 4 == ids.unsqueeze(-1)).any(-2) & (position < ends.unsqueeze(-1))
        with torch.no_grad():
            picked = sets(got.module(q, k, w, ids, ends))
        assert picked == exact_selection(q, k, w, allowed, 5), name
