"""What is proven on smaller sizes that stand for static ones is what those themselves prove."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dsa_compile.capture import export_graph
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.pipeline import run_pipeline

from .cover import ALONE
from .model import compose
from .near_misses import NEAR_MISSES
from .oracle import Sizes, inputs_of

# Enough for the small sizes, and less than a run at 2,403 positions takes.
SMALL = MatchOptions(probe_memory_bytes=2_000_000)
NAMES = (
    "default",
    "block_max: cat reshape amax",
    "rebuild: index_put",
    "rebuild: compare and any",
    "rebuild: scatter of clamped positions",
    "expansion: index by position // block",
    "visibility: tril",
    "visibility: cumsum positions",
    "selection: sort",
    "layout: flat",
)


# Chunks of rows and single rows take turns.
@pytest.mark.parametrize("name", NAMES)
def test_smaller_sizes_prove_what_the_captured_ones_prove(name: str) -> None:
    chunk = NAMES.index(name) % 2 == 0
    p = replace(ALONE[name], phase="chunk" if chunk else "decode")
    batch = 2 if p.layout == "batched" else 1
    sizes = Sizes(21, 2403, batch) if chunk else Sizes(1, 30_003, batch)
    model = compose(p, p).eval()
    graph_module = export_graph(model, inputs_of(p, sizes, 0, model.format.params), dynamic=False)
    own, small = run_pipeline(graph_module), run_pipeline(graph_module, options=SMALL)
    assert [s.status for s in own.sites] == ["fused", "rewritten"]
    assert not any("smaller sizes" in n for s in own.sites for n in s.notes)
    for a, b in zip(own.sites, small.sites, strict=True):
        assert b.notes[0].startswith("proven on smaller sizes")
        assert replace(b, notes=b.notes[1:]) == a
    first, second = (str(r.graph_module.graph) for r in (own, small))
    # A fitted scale may differ in its last digits.
    assert re.sub(r"scale: [0-9.]+", "", first) == re.sub(r"scale: [0-9.]+", "", second)


@pytest.mark.parametrize(
    "name", ["sink positions", "local window", "blocks that differ", "pool of positions"]
)
def test_a_near_miss_is_kept_at_long_static_sizes(name: str) -> None:
    near = NEAR_MISSES[name]
    given = inputs_of(near.spelling, Sizes(1202, 1202, 1), 0, near.inputs()[0].dtype)
    result = run_pipeline(export_graph(near.build(), given, dynamic=False), options=SMALL)
    last = result.sites[-1]
    assert (last.kind, last.status) == ("consumer", "kept") and last.reason
