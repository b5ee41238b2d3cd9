"""What dense and sparse scoring cost on a device, and where one begins to win.

Both forms grow with the number of query rows alike, so that the crossover is a ratio of the cost
of one position scored densely to that of one candidate column: from how many positions on a row
of candidates is the cheaper one does not depend on the rows, once they fill the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import sympy  # type: ignore[import-untyped]

from dsa_compile.passes.context import Crossover
from dsa_compile.target import Target

ROWS, POSITIONS, COLUMNS = sympy.symbols("rows positions columns", positive=True)
HEADS, HEAD_DIM, ITEMSIZE = sympy.symbols("heads head_dim itemsize", positive=True)
DENSE_RATE, DENSE_EACH, DENSE_ROW = sympy.symbols("dense_rate dense_each dense_row", positive=True)
SPARSE_RATE, GATHER, RANKING = sympy.symbols("sparse_rate gather ranking", positive=True)
_PRODUCT = 2 * HEADS * HEAD_DIM

# Seconds. A dense tile of keys serves many rows and is bound by the product; besides, every score
# is masked, written, read and ranked, and a row's candidates become flags. Gathered keys serve one
# row, so that moving them may take longer than multiplying them; their scores are ranked once.
DENSE_SECONDS = ROWS * (POSITIONS * (_PRODUCT / DENSE_RATE + DENSE_EACH) + DENSE_ROW)
SPARSE_SECONDS = (
    ROWS * COLUMNS * (sympy.Max(_PRODUCT / SPARSE_RATE, HEAD_DIM * ITEMSIZE / GATHER) + 1 / RANKING)
)


@dataclass(frozen=True)
class Ceilings:
    """What the kernels reach on a device.

    Attributes:
        dense_rate: operations a second of the dense scorer, by bytes of a key's element.
        dense_each: seconds that a dense score takes beyond its product, likewise.
        dense_row: seconds to make flags of a row's candidates.
        sparse_rate: operations a second of the sparse scorer where moving keys is no limit.
        gather: bytes of keys that the sparse scorer moves a second.
        ranking: scores of candidates that a selection ranks a second.
        measured: whether the numbers were measured on the device that they are used for.
    """

    dense_rate: Mapping[int, float]
    dense_each: Mapping[int, float]
    dense_row: float
    sparse_rate: Mapping[int, float]
    gather: Mapping[int, float]
    ranking: float
    measured: bool

    def values(self, itemsize: int) -> dict[sympy.Symbol, float]:
        """The ceilings as values of the formulas' symbols."""
        return {
            DENSE_RATE: self.dense_rate[itemsize],
            DENSE_EACH: self.dense_each[itemsize],
            DENSE_ROW: self.dense_row,
            SPARSE_RATE: self.sparse_rate[itemsize],
            GATHER: self.gather[itemsize],
            RANKING: self.ranking,
            ITEMSIZE: itemsize,
        }


# Fitted to the kernels on one NVIDIA H200, fp32 aside, which was not measured: to times that
# benchmarks/kernels.py prints. docs/performance.md says which, and of which runs.
CEILINGS: dict[str, Ceilings] = {
    "sm90": Ceilings(
        dense_rate={1: 971e12, 2: 566e12, 4: 40e12},
        dense_each={1: 0.34e-11, 2: 0.33e-11, 4: 0.33e-11},
        dense_row=7.5e-8,
        sparse_rate={1: 775e12, 2: 420e12, 4: 30e12},
        gather={1: 8.45e12, 2: 8.78e12, 4: 8.78e12},
        ranking=3.5e11,
        measured=True,
    ),
}


def crossover(ceilings: Ceilings, *, columns: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Fewest positions at which scoring ``columns`` candidates costs less than scoring them all.

    Args:
        ceilings: of the device.
        columns: candidate columns of a row.
        heads, head_dim: of the indexer.
        itemsize: bytes of a key's element.
    """
    given = {HEADS: heads, HEAD_DIM: head_dim, COLUMNS: columns, **ceilings.values(itemsize)}
    equal = sympy.Eq(DENSE_SECONDS / ROWS, SPARSE_SECONDS / ROWS).subs(given)
    # No number of positions is positive where making the flags costs more than all columns.
    return max([columns, *(int(math.ceil(p)) for p in sympy.solve(equal, POSITIONS))])


def crossover_on(target: Target, provider: str) -> Crossover | None:
    """The crossover of a provider's kernels on a target; None where they choose for themselves.

    A GPU that was not measured is taken to have the same ratios as the nearest one that was.
    """
    if provider != "triton" or target.capability is None:
        return None
    ceilings = CEILINGS.get(target.name, CEILINGS["sm90"])

    @cache
    def positions(columns: int, heads: int, head_dim: int, itemsize: int) -> int:
        return crossover(
            ceilings, columns=columns, heads=heads, head_dim=head_dim, itemsize=itemsize
        )

    return positions
