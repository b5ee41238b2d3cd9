"""Random arguments, and comparison with the reference in float64."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

FP8 = torch.float8_e4m3fn


def wide(value: Any) -> Any:
    """Floating point tensors as float64, everything else as it is."""

    def widen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.float().double()
        return x

    return tree_map(widen, value)


def reference(op: str, *args: Any, **kwargs: Any) -> Any:
    """What an op means, computed by plain PyTorch in float64 from the same values."""
    return getattr(torch.ops.dsa, op)(*wide(args), **wide(kwargs))


def assert_scores_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Same places of -inf and NaN; the rest within ``tolerance`` of the largest score."""
    got = got.double()
    for kind in (torch.isneginf, torch.isposinf, torch.isnan):
        assert torch.equal(kind(got), kind(want))
    finite = torch.isfinite(want)
    if finite.any():
        error = (got[finite] - want[finite]).abs().max() / want[finite].abs().max().clamp(min=1)
        assert float(error) <= tolerance, float(error)


def random_ids(generator: torch.Generator, shape: tuple[int, ...], blocks: int) -> Tensor:
    """Block ids in no order, with duplicates, unused ones and junk."""
    ids = torch.randint(0, blocks + 1, shape, generator=generator)
    junk = torch.tensor([-1, -1, -(2**30), 2**30, 2**31 - 1])
    pick = torch.randint(0, len(junk), shape, generator=generator)
    bad = torch.randint(0, 5, shape, generator=generator) == 0
    return torch.where(bad, junk[pick], ids)


def kernel_tests(name: str) -> ModuleType:
    """A module of tests/kernels, which is also the name of the folder of the kernels."""
    package = "tests_of_kernels"
    if package not in sys.modules:
        folder = Path(__file__).parents[1] / "kernels"
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    return importlib.import_module(f"{package}.{name}")
