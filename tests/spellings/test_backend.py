"""What ``optimize`` matches, the backend matches too, after Inductor's own decompositions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

import dsa_compile

from .cover import PACKS
from .hosts import check_site, describe, fresh
from .oracle import check_layer
from .test_alone import case

# Spellings that Inductor respells: products, sums, masks, sizes, sorts and tests of slots.
NAMES = (
    "product: multiply sum",
    "product: multiply sum heads first",
    "product: bmm expanded keys",
    "relu: where zero",
    "head_sum: matmul weights left",
    "expansion: gather by position // block",
    "candidate_form: add where",
    "selection: argsort stable",
    "result: -1 by index",
    "result: additive bias",
    "numbers: bf16",
    "layout: one",
    "phase: decode",
    "visibility: triu",
    "rebuild: index_put",
    "publish: additive table",
)
CHOSEN = sorted({pack for pack in range(len(PACKS)) for name in PACKS[pack] if name in NAMES})


@pytest.fixture(autouse=True)
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's graphs run as its hooks leave them, unless it would lack a lowering."""
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    def inner(graph_module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        table = select_decomp_table()
        for node in graph_module.graph.nodes:
            assert node.target in lowerings or node.target not in table, node.target

        def run(values: list[Any]) -> Any:
            given = tuple(values)
            values.clear()
            return graph_module(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    patched = functools.partial(inductor.compile_fx, inner_compile=inner)
    monkeypatch.setattr(inductor, "compile_fx", patched)
    with config.patch(fx_graph_cache=False):
        yield


def test_every_name_is_a_spelling() -> None:
    assert set(NAMES) <= {name for pack in PACKS for name in pack}


@pytest.mark.parametrize("pack", CHOSEN)
@torch.no_grad()
def test_the_backend_matches_what_optimize_matches(pack: int) -> None:
    wanted = case(pack)
    model = wanted.model.eval()
    # Each choice of the pack is a layer of one model.
    got = torch.compile(model, backend="dsa", dynamic=False, fullgraph=True)(*fresh(wanted.inputs))
    sites = dsa_compile.compiled_report(model).sites
    assert len(sites) == len(model.spellings), describe(sites)
    check_site(sites[0], "source", model.spelling)
    for layer, name in enumerate(PACKS[pack], 1):
        check_site(sites[layer], "consumer", PACKS[pack][name])
        check_layer(wanted, got, layer)
