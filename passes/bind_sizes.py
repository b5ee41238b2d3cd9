"""Small concrete values for the symbolic sizes of a graph, so that its parts can be run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

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
    577,
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
    # Tensors share the objects that stand for their sizes, whose expressions are slow to read.
    found: dict[int, Any] = {}
    for item in values:
        for size in item.shape if isinstance(item, torch.Tensor) else (item,):
            if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found.setdefault(id(size.node), size.node)
    return frozenset(node.expr for node in found.values())


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

    def selected(self, root: fx.Node) -> tuple[tuple[int, ...], int]:
        """Concrete shape of what a selection gives, and how many elements it selects from."""
        held = value(root)
        first = held[1] if isinstance(held, (tuple, list)) else held
        source = root.args[0]
        assert isinstance(source, fx.Node)
        return tuple(self.extent(s) for s in first.shape), self.shape(source)[-1]

    # What a binding of restated sizes says otherwise.

    def cover(
        self, targets: Iterable[fx.Node], given: Iterable[fx.Node], call: fx.Node | None = None
    ) -> None:
        """Learn the sizes of all that is run for some targets, before any value is drawn.

        Args:
            targets: what will be run.
            given: nodes whose values will be given.
            call: canonical scorer whose arguments are among the targets.
        """

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that a call has under this binding, nodes among them."""
        return node.args, dict(node.kwargs)

    def constant(self, node: fx.Node, held: torch.Tensor) -> torch.Tensor:
        """What a constant of the model holds under this binding."""
        return held

    def check(self, node: fx.Node, found: Any) -> None:
        """Refuse the result of a node that does not have the shape of this binding."""


def _holds(guard: Any, binding: Binding) -> bool:
    try:
        return bool(binding.number(guard))
    except Exception:  # noqa: BLE001 - an expression that cannot be read is no promise kept
        return False


class SizeBinder:
    """Finds bindings for the parts of one graph and remembers them."""

    def __init__(self) -> None:
        self._guards: dict[frozenset[sympy.Symbol], list[Any]] = {}
        self._lengths: dict[Any, int] = {}
        self._found: dict[Any, list[Binding]] = {}
        self._broken: dict[frozenset[sympy.Symbol], dict[Any, Any]] = {}

    def bindings(
        self,
        nodes: Iterable[fx.Node],
        score: fx.Node,
        *,
        positions: Any = None,
        at_least: int = 0,
        count: int = 2,
    ) -> list[Binding]:
        """Distinct small bindings under which every recorded size is whole and every guard holds.

        Args:
            nodes: nodes whose sizes must come out whole.
            score: the scores that a selection reads; symbols of its last dim are key positions.
            positions: number of keys, where ``score`` is another tensor whose last dim is not that.
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
        shape = value(score).shape
        position = symbols_of([shape[-1] if positions is None else positions])
        lead = symbols_of(list(shape[:-1]))
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
        known = self._broken.setdefault(frozenset(free), {})
        found: list[Binding] = []
        ordered = sorted(free, key=str)
        for group, box in _assignments(ordered, position, env, guards, at_least):
            broken: set[Any] = set()
            for numbers in group:
                if found and any(
                    numbers[s] == found[0].numbers[s] for s in free if not _fixed(env, s)
                ):
                    continue
                made = Binding(numbers)
                numbered = tuple(numbers[s] for s in ordered)
                if numbered not in known:
                    known[numbered] = next((g for g in guards if not _holds(g, made)), None)
                guard = known[numbered]
                if guard is None and _whole(made, sizes):
                    found.append(made)
                    break
                if guard is not None and guard not in broken:
                    broken.add(guard)
                    if _never(guard, box):
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
            self._guards[key] = sorted(chosen, key=lambda g: _length(g, self._lengths))
        return self._guards[key]


def _length(expr: Any, known: dict[Any, int]) -> int:
    """Number of terms of an expression: short guards are tried first. ``known`` is added to."""
    if expr not in known:
        known[expr] = 1 + sum(_length(a, known) for a in expr.args)
    return known[expr]


def _never(guard: Any, box: dict[sympy.Symbol, ValueRanges[Any]]) -> bool:
    """Whether a guard holds nowhere within ranges of its symbols."""
    try:
        return bool(bound_sympy(guard, box).upper == sympy.false)
    except Exception:  # noqa: BLE001 - what cannot be bounded is tried out
        return False


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
) -> Iterator[tuple[Iterator[dict[sympy.Symbol, int]], dict[sympy.Symbol, ValueRanges[Any]]]]:
    """Numbers to try: one group a position size, of which one at the most is taken, and its box."""
    ranges = getattr(env, "var_to_range", None) or {}
    rows = [s for s in ordered if s not in position]
    sizes = [p for p in _POSITIONS if p >= at_least] or [at_least + 3]
    # A model captured beyond a threshold (its candidate budget, say) holds only beyond it.
    numbers = {int(n) for g in guards for n in g.atoms(sympy.Integer) if 8 <= n <= _LARGEST}
    products = {a * b for a in numbers for b in numbers if a * b <= _LARGEST}
    sizes += sorted(n + 1 for n in numbers | products if n >= sizes[-1])

    positions = sorted(position, key=str)

    def clamped(symbol: sympy.Symbol, number: int) -> int:
        if symbol in ranges:
            low, high = ranges[symbol].lower, ranges[symbol].upper
            number = max(number, int(low)) if low.is_Integer else number
            number = min(number, int(high)) if high.is_Integer else number
        return number

    def numbered(others: Sequence[int], size: int) -> dict[sympy.Symbol, int]:
        numbers = {s: size + 2 * i for i, s in enumerate(positions)}
        for i, symbol in enumerate(rows):
            numbers[symbol] = others[i % len(others)] + 12 * (i // len(others))
        return {s: clamped(s, n) for s, n in numbers.items()}

    def group(turn: int, size: int) -> Iterator[dict[sympy.Symbol, int]]:
        for at, shift in itertools.product(range(len(_OTHERS)), range(_SHIFTS)):
            yield numbered(_OTHERS[(turn + at) % len(_OTHERS)], size + shift)

    def box(size: int) -> dict[sympy.Symbol, ValueRanges[Any]]:
        least = numbered([min(n) for n in zip(*_OTHERS, strict=True)], size)
        most = numbered([max(n) for n in zip(*_OTHERS, strict=True)], size + _SHIFTS - 1)
        return {s: ValueRanges(n, most[s]) for s, n in least.items()}

    return ((group(turn, size), box(size)) for turn, size in enumerate(sizes))
