"""Where scoring candidates alone begins to win, from what the kernels reach on a device."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]

from dsa_compile import Target
from dsa_compile.cost import (
    CEILINGS,
    COLUMNS,
    DENSE_SECONDS,
    HEAD_DIM,
    HEADS,
    POSITIONS,
    ROWS,
    SPARSE_SECONDS,
    crossover,
    crossover_on,
)

SIZES = [(32, 128, 1), (32, 128, 2), (64, 128, 1), (64, 128, 2), (32, 128, 4)]


@pytest.mark.parametrize(("heads", "head_dim", "itemsize"), SIZES)
def test_the_forms_cost_the_same_at_the_crossover(heads: int, head_dim: int, itemsize: int) -> None:
    ceilings = CEILINGS["sm90"]
    at = crossover(ceilings, columns=16384, heads=heads, head_dim=head_dim, itemsize=itemsize)
    given = {ROWS: 1024, COLUMNS: 16384, HEADS: heads, HEAD_DIM: head_dim}
    given |= ceilings.values(itemsize)
    dense = [float(DENSE_SECONDS.subs({**given, POSITIONS: n})) for n in (at - 1, at)]
    sparse = float(SPARSE_SECONDS.subs(given))
    # An op's attribute, which symbols of sympy are not.
    assert type(at) is int and at >= 16384 and sparse <= dense[1]
    assert at == 16384 or dense[0] < sparse


def test_both_forms_grow_with_the_rows_alike() -> None:
    assert sympy.simplify(DENSE_SECONDS / ROWS).free_symbols.isdisjoint({ROWS})
    assert sympy.simplify(SPARSE_SECONDS / ROWS).free_symbols.isdisjoint({ROWS})


def test_more_candidates_need_more_context() -> None:
    at = crossover_on(Target("sm90"), "triton")
    assert at is not None
    found = [at(n, 32, 128, 1) for n in (2048, 8192, 16384)]
    assert found == sorted(found)
    assert all(n >= columns for n, columns in zip(found, (2048, 8192, 16384), strict=True))


def test_only_the_gpu_kernels_are_told() -> None:
    assert crossover_on(Target("cpu"), "cpu") is None
    assert crossover_on(Target("sm90"), "reference") is None
