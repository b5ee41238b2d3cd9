"""Small concrete values for the symbolic sizes of a graph, so that its parts can be run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

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
_SHIFTS = 16
_LARGEST = 1 << 20
_OTHERS = (
    (2, 5, 3, 7, 11),
    (3, 2, 7, 5, 13),
    (2, 3, 5, 7, 11),
    (4, 6, 2, 8, 12),
    (8, 16, 4, 32, 12),
)


def _expressions(values: Iterable[Any]) -> frozenset[Any]:
    """The expressions of all symbolic sizes among recorded values."""
    found = set()
    for item in values:
        for size in item.shape if isinstance(item, torch.Tensor) else (item,):
            if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found.add(size.node.expr)
    return frozenset(found)


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The size symbols that recorded values depend on."""
    return {symbol for expr in _expressions(values) for symbol in expr.free_symbols}


@dataclass
class Binding:
    """Concrete numbers for size symbols.

    ``extent`` turns a recorded size into an int; results are cached since sympy is slow.
    """

    numbers: dict[sympy.Symbol, int]
    cache: dict[Any, Any] = field(default_factory=dict)

    def extent(self, size: Any) -> Any:
        """The int (float, bool) that a recorded size has under this binding.

        Raises:
            ValueError: the size is no whole number.
        """
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        expr = size.node.expr
        if expr not in self.cache:
            number = self.number(expr)
            if isinstance(size, torch.SymInt) and number != int(number):
                raise ValueError(f"size {expr} is not whole at {self.numbers}")
            kind = {torch.SymInt: int, torch.SymBool: bool, torch.SymFloat: float}[type(size)]
            self.cache[expr] = kind(number)
        return self.cache[expr]

    def number(self, expr: Any) -> Any:
        """The value of an expression of the symbols, by plain Python arithmetic."""
        return sympy_interp(PythonReferenceAnalysis, self.numbers, expr)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Concrete shape of a tensor node."""
        return tuple(self.extent(s) for s in value(node).shape)


def _holds(guard: Any, binding: Binding) -> bool:
    try:
        return bool(binding.number(guard))
    except Exception:  # noqa: BLE001 - an expression that cannot be read is no promise kept
        return False


class SizeBinder:
    """Finds bindings for the parts of one graph and remembers them."""

    def __init__(self) -> None:
        self._guards: dict[frozenset[sympy.Symbol], list[Any]] = {}
        self._found: dict[Any, list[Binding]] = {}

    def bindings(
        self, nodes: Iterable[fx.Node], score: fx.Node, *, at_least: int = 0, count: int = 2
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
        sizes = _expressions(values)
        if not sizes:
            return [Binding({})]
        free = {symbol for expr in sizes for symbol in expr.free_symbols}
        position = symbols_of([value(score).shape[-1]])
        lead = symbols_of(list(value(score).shape[:-1]))
        position = position - lead or position
        key = (sizes, frozenset(position), at_least, count)
        if key in self._found:
            return self._found[key]
        env = next(
            v.fake_mode.shape_env
            for v in values
            if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")
        )
        guards = self._relevant(env, free)
        found: list[Binding] = []
        for group in _assignments(sorted(free, key=str), position, env, guards, at_least):
            for numbers in group:
                if found and any(
                    numbers[s] == found[0].numbers[s] for s in free if not _fixed(env, s)
                ):
                    continue
                made = Binding(numbers)
                if all(_holds(g, made) for g in guards) and _whole(made, sizes):
                    found.append(made)
                    break
            if len(found) == count:
                break
        self._found[key] = found
        return found

    def _relevant(self, env: Any, free: set[sympy.Symbol]) -> list[Any]:
        key = frozenset(free)
        if key not in self._guards:
            exprs = {g.expr for g in env.guards} if env is not None else set()
            chosen = [g for g in exprs if g.free_symbols and g.free_symbols <= free]
            self._guards[key] = sorted(chosen, key=lambda g: len(str(g)))
        return self._guards[key]


def _fixed(env: Any, symbol: sympy.Symbol) -> bool:
    """Whether a symbol can be one number alone."""
    known = (getattr(env, "var_to_range", None) or {}).get(symbol)
    return known is not None and bool(known.lower == known.upper)


def _whole(binding: Binding, sizes: Iterable[Any]) -> bool:
    """Whether sizes come out as whole numbers that a tensor may have."""
    try:
        numbers = [binding.number(expr) for expr in sizes]
        return all(n == int(n) and n >= 0 for n in numbers)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError):
        return False


def _assignments(
    ordered: list[sympy.Symbol],
    position: set[sympy.Symbol],
    env: Any,
    guards: list[Any],
    at_least: int,
) -> Iterator[Iterator[dict[sympy.Symbol, int]]]:
    """Numbers to try: one group a position size, of which one at the most is taken."""
    ranges = getattr(env, "var_to_range", None) or {}
    rows = [s for s in ordered if s not in position]
    sizes = [p for p in _POSITIONS if p >= at_least] or [at_least + 3]
    # A model captured beyond a threshold (its candidate budget, say) holds only beyond it.
    numbers = {int(n) for g in guards for n in g.atoms(sympy.Integer) if 8 <= n <= _LARGEST}
    products = {a * b for a in numbers for b in numbers if a * b <= _LARGEST}
    sizes += sorted(n + 1 for n in numbers | products if n >= sizes[-1])

    def group(turn: int, size: int) -> Iterator[dict[sympy.Symbol, int]]:
        for at, shift in itertools.product(range(len(_OTHERS)), range(_SHIFTS)):
            others = _OTHERS[(turn + at) % len(_OTHERS)]
            numbers = {s: size + shift + 2 * i for i, s in enumerate(sorted(position, key=str))}
            for i, symbol in enumerate(rows):
                numbers[symbol] = others[i % len(others)] + 12 * (i // len(others))
            for symbol in ordered:
                if symbol in ranges:
                    low, high = ranges[symbol].lower, ranges[symbol].upper
                    if low.is_Integer:
                        numbers[symbol] = max(numbers[symbol], int(low))
                    if high.is_Integer:
                        numbers[symbol] = min(numbers[symbol], int(high))
            yield numbers

    return (group(turn, size) for turn, size in enumerate(sizes))
