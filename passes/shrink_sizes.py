"""Choose small members of a family of sizes that keep what matters of the captured sizes.

Nothing rests on a constant being read as it was meant, since every reading gives the captured part
at the captured sizes. What must hold is that a rule of the part shows itself at the small sizes:

- constants that lie at no extent stay, and every axis is longer than their sum, in blocks too, so
  that whatever begins or ends at one of them (or some steps from an extent) does so here;
- extents leave the same remainders by the sizes of blocks as the captured ones;
- rows keep their place at the end of the positions, and are as many as the positions where they
  were.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axis, LabelError
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import dtype_of
from dsa_compile.passes.read_constants import ConstantReader
from dsa_compile.passes.restate_sizes import Member
from dsa_compile.passes.run_probe import ProbeError, evaluate, memory, needed
from dsa_compile.passes.solve_extents import NEAR, Marks, Unrestated

SLOW = 64 << 20
"""Bytes of a run from which a proof takes seconds at the captured sizes."""
_MOST = 4 * SLOW
_FEW = 2 * NEAR
"""Rows, batch items and picks that are as few as this stay."""
_LEAST_POSITIONS = 96
_LARGEST_STEP = 64


class Shrinker:
    """Finds small members for one part.

    Args:
        follower: labels at the captured sizes.
        positions, rows, batch: axes that may shrink, as atoms; all picks may, too.
        targets, given: what is run, and between what.
        limit: most bytes that a run may take.
    """

    def __init__(
        self,
        follower: AxisFollower,
        axes: tuple[Axis, Axis, Axis],
        targets: list[fx.Node],
        given: list[fx.Node],
        limit: int,
    ) -> None:
        self.follower, self.labels = follower, follower.labels
        self.positions, self.rows, self.batch = axes
        self.targets, self.given, self.limit = targets, given, limit
        self.nodes = needed(targets, given)
        self.reader = ConstantReader(follower, self.nodes, given, [self.rows, self.batch])

    def members(self, count: int = 2) -> list[Member]:
        """Different small members, on each of which the part runs.

        Raises:
            Unrestated: there are none.
        """
        failure = ""
        total, rows = self.labels.extent(self.positions), self.labels.extent(self.rows)
        try:
            self.reader.refuse_curves()
            self.follower.cover(self.targets, self.given)
            self.periods = sorted(self.reader.periods(self.positions))
            self.captured = self._marks(total, rows)
            self.constants = self.reader.constants(self.captured, 2 * total)
            for square in [True, False] if total == rows else [False]:
                try:
                    return [self._member(turn, square) for turn in range(count)]
                except ProbeError as error:
                    failure = str(error)
        except LabelError as error:
            failure = f"axes cannot be followed: {error}"
        raise Unrestated(failure)

    def _member(self, turn: int, square: bool) -> Member:
        positions, lead, picks = self._extents(turn, square)
        rows = math.prod(n for a, n in lead if a in self.rows)
        extents = [(self.positions, positions), *([([a], n) for a, n in lead]), *picks]
        if all(n == self.labels.extent(a) for a, n in extents):
            raise Unrestated("no size can be smaller")
        made = Member(self.follower, extents, self._marks(positions, rows))
        size = memory(self.nodes, made)
        if size > min(self.limit, _MOST):
            far = max(self.constants, default=0)
            why = f", since {far:,} lies at no size of the graph" if far > positions // 64 else ""
            raise Unrestated(f"the smallest still need {size / 2**20:,.0f} MiB{why}")
        zeros = {n: torch.zeros(made.shape(n), dtype=dtype_of(n)) for n in self.given}
        evaluate(self.nodes, zeros, made)
        count = math.prod(n for _, n in lead)
        made.name = f"{count:,} {'row' if count == 1 else 'rows'} of {positions:,} positions"
        return made

    def _extents(
        self, turn: int, square: bool
    ) -> tuple[int, list[tuple[int, int]], list[tuple[Axis, int]]]:
        """Extents of the positions, of rows and batch by atom, and of the picks."""
        total = self.labels.extent(self.positions)
        period, largest = math.lcm(*self.periods), max(self.periods)

        def shrunk(size: int) -> int:
            if size <= _FEW:
                return size
            least = 3 + sum(c for c in self.constants if c < size)
            more = turn * period if period <= _LARGEST_STEP else 0
            return min(size, _congruent(least, size, period) + more)

        sizes = [(a, self.labels.extent(a)) for a in self.follower.picks]
        picks = [(a, shrunk(n)) for a, n in sizes if self.captured.moved(n) is None]
        lead = [(a, shrunk(self.labels.sizes[a])) for a in (*self.batch, *self.rows)]
        most = max((n for _, n in picks), default=0)
        reach = max(sum(self.constants) + 2, most + 4) * largest
        if not square:
            reach += math.prod(n for a, n in lead if a in self.rows)
        positions = _congruent(max(_LEAST_POSITIONS, reach), total, period) + 3 * turn * period
        positions = min(total, positions)
        if square and len(self.rows) == 1:
            lead = [(a, positions if a in self.rows else n) for a, n in lead]
        return positions, lead, picks

    def _marks(self, positions: int, rows: int) -> Marks:
        total, captured = self.labels.extent(self.positions), self.labels.extent(self.rows)
        ends = ((total, positions), (total - captured, positions - rows))
        return Marks(tuple((a // p, b // p) for a, b in ends for p in self.periods))


def _congruent(least: int, size: int, period: int) -> int:
    """The least number from ``least`` on that leaves the remainder of a size by a period."""
    return least + (size - least) % period
