"""Small concrete values for the symbolic sizes of a graph, so that its parts can be run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from dsa_compile.passes.graph_tools import value

_POSITIONS = (
    37,
    43,
    41,
    29,
    40,
    44,
    48,
    64,
    72,
    96,
    128,
    130,
    192,
    257,
    384,
    512,
    1031,
    2056,
    4104,
)
_OTHERS = (
    (2, 5, 3, 7, 11),
    (3, 2, 7, 5, 13),
    (2, 3, 5, 7, 11),
    (4, 6, 2, 8, 12),
    (8, 16, 4, 32, 12),
)


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The size symbols that recorded values depend on."""
    found: set[sympy.Symbol] = set()
    for item in values:
        sizes = item.shape if isinstance(item, torch.Tensor) else (item,)
        for size in sizes:
            if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found |= size.node.expr.free_symbols
    return found


@dataclass
class Binding:
    """Concrete numbers for size symbols.

    ``extent`` turns a recorded size into an int; results are cached since sympy is slow.
    """

    numbers: dict[sympy.Symbol, int]
    cache: dict[Any, Any] = field(default_factory=dict)

    def extent(self, size: Any) -> Any:
        """The int (float, bool) that a recorded size has under this binding."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        expr = size.node.expr
        if expr not in self.cache:
            number = expr.xreplace(self.numbers) if hasattr(expr, "xreplace") else expr
            if isinstance(size, torch.SymInt):
                if not number.is_integer:
                    raise ValueError(f"size {expr} is not whole at {self.numbers}")
                self.cache[expr] = int(number)
            else:
                self.cache[expr] = (
                    bool(number) if isinstance(size, torch.SymBool) else float(number)
                )
        return self.cache[expr]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Concrete shape of a tensor node."""
        return tuple(self.extent(s) for s in value(node).shape)


def _holds(guard: Any, numbers: dict[sympy.Symbol, int]) -> bool:
    try:
        return bool(guard.xreplace(numbers) != sympy.false)
    except Exception:  # noqa: BLE001 - sympy raises many kinds; an unreadable guard is no promise
        return False


def bindings(
    nodes: Iterable[fx.Node], score: fx.Node, *, at_least: int = 0, count: int = 2
) -> list[Binding]:
    """Distinct small bindings under which every recorded size is whole and every guard holds.

    Args:
        nodes: nodes whose sizes must come out whole.
        score: the scores that a selection reads; symbols of its last dim are key positions.
        at_least: smallest number of positions wanted (a few candidate blocks).
        count: number of bindings wanted.

    Returns:
        At least one binding; one alone where all sizes are static or no second one fits.
        An empty list means that no small sizes satisfy the graph's own guards.
    """
    values = [value(n) for n in nodes]
    free = symbols_of(values)
    if not free:
        return [Binding({})]
    position = symbols_of([value(score).shape[-1]])
    shape_env = next(
        v.fake_mode.shape_env
        for v in values
        if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")
    )
    guards = [g.expr for g in shape_env.guards] if shape_env is not None else []
    guards = [g for g in guards if g.free_symbols & free and g.free_symbols <= free]
    ranges = getattr(shape_env, "var_to_range", {}) or {}
    ordered = sorted(free, key=str)
    rows = [s for s in ordered if s not in position]
    found: list[Binding] = []
    positions = [p for p in _POSITIONS if p >= at_least] or [at_least + 3]
    for size in positions:
        for others in _OTHERS:
            numbers: dict[sympy.Symbol, int] = {}
            for i, symbol in enumerate(sorted(position, key=str)):
                numbers[symbol] = size + 2 * i
            for i, symbol in enumerate(rows):
                numbers[symbol] = others[i % len(others)] + 12 * (i // len(others))
            for symbol in ordered:
                if symbol in ranges:
                    numbers[symbol] = max(numbers[symbol], int(ranges[symbol].lower))
            if not all(_holds(g, numbers) for g in guards):
                continue
            binding = Binding({s: sympy.Integer(n) for s, n in numbers.items()})
            try:
                for item in values:
                    for extent in item.shape if isinstance(item, torch.Tensor) else ():
                        if binding.extent(extent) < 0:
                            raise ValueError("negative size")
            except (ValueError, TypeError, AttributeError, ZeroDivisionError):
                continue
            found.append(binding)
            break
        if len(found) == count:
            break
    return found
