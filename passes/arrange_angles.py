"""Read the cosines and sines of a rotation out of the model's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.passes.graph_tools import aten

Apply = Callable[..., Any]
"""Runs or emits an op: ``apply(target, *args)``."""


@dataclass(frozen=True)
class Angles:
    """How a tensor of the model becomes cosines (or sines) [B|1, S|1, R/2].

    Attributes:
        side: number of the tensor among those that the rotation reads.
        part: of a complex tensor: 0 its real part, 1 its imaginary one; None where it is real.
        cut: which of the angles are taken: ``"all"``, ``"half"`` (the first half), or ``"even"``.
        drop: leading dims of size 1 to drop, last first.
        lead: what the remaining leading dims are: some of ``"b"``, ``"s"``, or ``"bs"`` for both.
    """

    side: int
    part: int | None
    cut: str
    drop: tuple[int, ...]
    lead: tuple[str, ...]

    def arrange(self, apply: Apply, x: Any, sizes: Sequence[Any], width: int) -> Any:
        """The cosines or sines.

        Args:
            apply: runs or emits an op.
            x: the tensor.
            sizes: batch and rows.
            width: extent of its last dim.
        """
        if self.part is not None:
            x = apply(aten.select.int, apply(aten.view_as_real.default, x), -1, self.part)
        missing = 2 - len(self.lead) if self.lead in ((), ("s",)) else 0
        # Leading dims of one stand for what is missing.
        kept = next(n for n in range(missing + 1) if n == missing or n not in self.drop)
        for dim in self.drop:
            if dim >= kept:
                x = apply(aten.squeeze.dim, x, dim)
        if self.lead == ("bs",):
            x = apply(aten.reshape.default, x, [*sizes, width])
        elif self.lead == ("s", "b"):
            x = apply(aten.permute.default, x, [1, 0, 2])
        elif self.lead == ("b",):
            x = apply(aten.unsqueeze.default, x, 1)
        for _ in range(missing - kept):
            x = apply(aten.unsqueeze.default, x, 0)
        if self.cut == "half":
            x = apply(aten.slice.Tensor, x, -1, 0, width // 2)
        elif self.cut == "even":
            x = apply(aten.slice.Tensor, x, -1, 0, width, 2)
        return x


def leads(shape: Sequence[int], batch: int, rows: int) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Ways to read the dims before the last as batch and rows: dims to drop, and the rest."""
    ones = tuple(i for i in reversed(range(len(shape) - 1)) if shape[i] == 1)
    rest = tuple(s for s in shape[:-1] if s != 1)
    known: dict[tuple[int, ...], list[tuple[str, ...]]] = {(): [()], (rows,): [("s",)]}
    more: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
        ((batch,), ("b",)),
        ((batch * rows,), ("bs",)),
        ((batch, rows), ("b", "s")),
        ((rows, batch), ("s", "b")),
    )
    for sizes, lead in more:
        # With a batch or a row alone the two above are all that there is.
        if 1 not in (batch, rows) or lead == ("b",):
            known.setdefault(sizes, []).append(lead)
    for lead in known.get(rest, []):
        yield ones, lead
