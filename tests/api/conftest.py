"""Inductor without code generation, for tests of everything before it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """Graphs as Inductor's hooks leave them, which run as they are; caches are off."""
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config

    graphs: list[fx.GraphModule] = []

    def inner(graph_module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(graph_module)

        def run(values: list[Any]) -> Any:
            given = tuple(values)
            values.clear()
            with torch.no_grad():
                return graph_module(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    patched = functools.partial(inductor.compile_fx, inner_compile=inner)
    monkeypatch.setattr(inductor, "compile_fx", patched)
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield graphs
