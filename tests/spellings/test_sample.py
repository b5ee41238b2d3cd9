"""The shared sample of spellings, as it is, with its own oracle, in both hosts."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .hosts import HOSTS, describe, run

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "cases" / "indexer_spellings.py"


def load() -> ModuleType | None:
    if not SAMPLE.parent.is_dir():
        return None
    spec = importlib.util.spec_from_file_location("indexer_spellings", SAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dynamo looks a traced module's globals up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sample = load()
CASES = [] if sample is None else sample.CASES
present = pytest.mark.skipif(sample is None, reason="the shared cases are not beside the checkout")


@cache
def built(cls: Any) -> Any:
    assert sample is not None
    return sample.build(cls)


@present
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_a_case_is_treated_as_its_kind_says(cls: Any, host: str) -> None:
    assert sample is not None
    model, inputs, source, consumer, _ = built(cls)
    got = run(model, inputs, host)
    assert sample.verdict(model, got.outputs, source, consumer).startswith("ok")
    sites = got.sites
    assert len(sites) == 2, describe(sites)
    if cls.kind == "rewrite":
        assert [s.kind for s in sites] == ["source", "consumer"], describe(sites)
        assert [s.status for s in sites] == ["fused", "rewritten"], describe(sites)
        for site in sites:
            assert (site.heads, site.head_dim) == (model.H, model.D)
            assert (site.block_size, site.k) == (model.BLOCK, model.TOPK)
    elif cls.kind == "leave":
        assert sites[1].status == "kept" and sites[1].reason, describe(sites)


@present
def test_the_sample_has_both_kinds() -> None:
    assert {cls.kind for cls in CASES} >= {"rewrite", "leave"}
