"""The table of the serving kernels' times, and the bounds that they are held to."""

from __future__ import annotations

import torch
from rich.table import Table

FASTER = 1.5


class Results:
    """Rows of a table, and the bounds that were missed."""

    def __init__(self) -> None:
        self.table = Table(title=torch.cuda.get_device_name())
        self.missed: list[str] = []
        for name in ("work", "us", "beside", "us beside", "ratio", "bound"):
            self.table.add_column(name, justify="left" if name in ("work", "beside") else "right")

    def faster(self, work: str, seconds: float, peer: float) -> None:
        """A kernel and the compiled form of the same operations."""
        self._add(work, seconds, "torch.compile", peer, peer / seconds, FASTER, above=True)

    def near(self, work: str, seconds: float, moved: float, rate: float, bound: float) -> None:
        """A kernel and the time that its bytes take."""
        floor = moved / rate
        name = f"{moved / 1e6:,.0f} MB at {rate / 1e12:.2f} TB/s"
        self._add(work, seconds, name, floor, seconds / floor, bound, above=False)

    def plain(self, work: str, seconds: float, name: str, peer: float) -> None:
        """A kernel and another one, without a bound."""
        self._add(work, seconds, name, peer, peer / seconds, None, above=True)

    def _add(
        self,
        work: str,
        seconds: float,
        beside: str,
        peer: float,
        ratio: float,
        bound: float | None,
        *,
        above: bool,
    ) -> None:
        wanted = "" if bound is None else f"{'>=' if above else '<='} {bound}"
        if bound is not None and (ratio < bound if above else ratio > bound):
            self.missed.append(f"{work}: {ratio:.2f}, wanted {wanted}")
        cells = (f"{seconds * 1e6:.1f}", beside, f"{peer * 1e6:.1f}", f"{ratio:.2f}", wanted)
        self.table.add_row(work, *cells)
