"""Draws of keys, slots, caches and all else that a key write depends on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx
from torch import Tensor

from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.fit_keys import Values
from dsa_compile.passes.graph_tools import dtype_of, is_float, value
from dsa_compile.passes.run_probe import ProbeError, evaluate, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.trace_keys import KeyTrace

_LENGTHS = (40, 7, 2, 1, 0)
_SINGLE = 4
ORDINARY = "ordinary numbers"
_WEIGHTS = {"small weights": (1e-4, 1e-9), "large weights": (30.0, 1e3, 1e6)}
"""Factors of the vectors of a norm: floors and caps behind it show."""


class KeyDraws:
    """Makes draws for a stretch and runs it on them.

    Keys are ordinary numbers; of many orders of magnitude from key to key, down to nothing; of many
    sizes within a key; of one dim alone; and such that hold a NaN or an infinity. Slots are all
    different and take in the first and last places of the cache and of its pages. Then come weights
    that are next to nothing or very large, slots that name no place (below 0, the same several
    times, beyond the cache), and integers that are far out of any range, one tensor of them at a
    time.

    Args:
        trace: the stretch.
        binding: sizes, with no more keys than the cache has places.
        seed: of the draws.
    """

    def __init__(self, trace: KeyTrace, binding: Binding, seed: int) -> None:
        self.trace, self.binding = trace, binding
        self.generator = torch.Generator().manual_seed(seed)
        self.pages = binding.shape(trace.write.cache)
        self.places = self.pages[0] * self.pages[1]
        self.count = 1
        for extent in binding.shape(trace.slots):
            self.count *= extent
        self.old = self._bytes(self.pages)

    def draw(
        self, kind: str, turn: int, slots: Tensor, odd: tuple[fx.Node, int] | None = None
    ) -> Values:
        """Values of everything that the stretch depends on.

        Args:
            kind, turn: of keys and weights.
            slots: one a key.
            odd: a leaf of integers, and what about half of them are.

        Raises:
            Refusal: the stretch cannot be run on any of the draws.
        """
        failure: ProbeError | None = None
        given = self._given(kind, turn, slots)
        # Integers may be positions, or indices into something short.
        for high in _LENGTHS:
            env = {n: given[n] if n in given else self._leaf(n, high) for n in self.trace.leaves}
            if odd is not None:
                some = torch.rand(env[odd[0]].shape, generator=self.generator) < 0.5
                env[odd[0]] = env[odd[0]].masked_fill(some, odd[1])
            if kind in _WEIGHTS:
                vectors = [n for n in self.trace.vectors if n in env]
                env |= {n: env[n] * _WEIGHTS[kind][turn] for n in vectors}
            try:
                return evaluate(needed(self.trace.targets, env), env, self.binding)
            except ProbeError as error:
                failure = error
        raise Refusal(f"the probe of its key write cannot be run: {failure}", 6)

    def slots(self) -> Tensor:
        """Different places of the cache, edges first among them."""
        page = self.pages[1]
        edges = [0, self.places - 1, page - 1, page, self.places - page]
        order = torch.randperm(self.places, generator=self.generator)
        edge = torch.tensor(sorted({e for e in edges if 0 <= e < self.places}))
        edge = edge[torch.randperm(len(edge), generator=self.generator)]
        order = torch.cat([edge, order[~torch.isin(order, edge)]])[: self.count]
        return order[torch.randperm(self.count, generator=self.generator)]

    def without_last(self) -> Tensor:
        """One slot of -1, and different places but the last."""
        order = torch.randperm(self.places - 1, generator=self.generator)[: self.count - 1]
        return torch.cat([order, torch.tensor([-1])])

    def odd_integers(self) -> Iterator[tuple[Tensor, str, tuple[fx.Node, int]]]:
        """Other integers that the stretch reads, far below and far above what they count."""
        for node in self.trace.leaves:
            whole = dtype_of(node) in (torch.int32, torch.int64)
            if whole and node is not self.trace.slots:
                for number in (-1, -(2**20), 2**30):
                    yield self.slots(), f"{node.name} of {number}", (node, number)

    def odd_slots(self, negative: str) -> Iterator[tuple[Tensor, str, None]]:
        """Slots that name no place, alone and several times, beside such that do.

        Which of several keys with one place stays in it is left open.
        """
        wide = dtype_of(self.trace.slots) == torch.int64
        beyond = [-2, -self.places, -self.places - 1, -(2**31), self.places, self.places + 3]
        for odd in [-1, *beyond, 2**31 - 1, *([2**40] if wide else [])]:
            slots = self.slots()
            slots[int(torch.randint(0, self.count, (1,), generator=self.generator))] = odd
            if odd >= 0 or not bool((slots == odd + self.places).any()):
                yield slots, f"a slot of {odd}", None
        if negative == "skip":
            # Beside one key at an edge, behind or before it: what is left out must not touch that.
            last = self.places - 1
            for place, at in ((0, 0), (0, -1), (last, 0), (last, -1), (-1, 0)):
                slots = torch.full((self.count,), -1)
                slots[at] = place
                yield slots, "slots of -1", None

    def kinds(self, draws: int) -> Iterator[tuple[str, int]]:
        for turn in range(draws):
            yield ORDINARY, turn
        for turn in range(min(_SINGLE, -(-self.trace.dim // self.count))):
            yield "one dim alone", turn
        yield "many orders of magnitude", 0
        yield "dims of many sizes", 0
        yield "no numbers", 0
        if self.trace.vectors:
            for kind, factors in _WEIGHTS.items():
                yield from ((kind, turn) for turn in range(len(factors)))

    def _given(self, kind: str, turn: int, slots: Tensor) -> Values:
        trace = self.trace
        shape = self.binding.shape(trace.root)
        keys = self._keys(kind, turn).to(dtype_of(trace.root)).reshape(shape)
        places = slots.to(dtype_of(trace.slots)).reshape(self.binding.shape(trace.slots))
        return {trace.root: keys, trace.slots: places, trace.write.cache: self.old}

    def _keys(self, kind: str, turn: int) -> Tensor:
        count, dim = self.count, self.trace.dim
        x = torch.randn(count, dim, generator=self.generator)
        if kind == "one dim alone":
            at = (torch.arange(count) + turn * count) % dim
            return torch.nn.functional.one_hot(at, dim) * (x.abs() + 0.5)
        if kind == "many orders of magnitude":
            half = dtype_of(self.trace.root) == torch.float16
            low, high = (-3.0, 3.0) if half else (-14.0, 12.0)
            power = torch.rand((count, 1), generator=self.generator) * (high - low) + low
            gone = torch.rand((count, 1), generator=self.generator) < 0.2
            return (x * 10**power).masked_fill(gone, 0)
        if kind == "dims of many sizes":
            part = max(1, dim // 4)
            power = torch.rand((count, -(-dim // part)), generator=self.generator)
            power = power.repeat_interleave(part, -1)[:, :dim]
            return x * 10 ** (-7 * power - torch.rand(x.shape, generator=self.generator))
        if kind == "no numbers":
            odd = torch.rand((count, 1), generator=self.generator)
            first = torch.arange(dim) == 0
            x = x.masked_fill((odd < 0.3) & first, torch.nan)
            return x.masked_fill((odd > 0.7) & first, torch.inf)
        return x

    def _leaf(self, node: fx.Node, high: int) -> Tensor:
        shape, dtype = self.binding.shape(node), dtype_of(node)
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        if dtype == torch.uint8:
            return self._bytes(shape)
        if value(node).is_complex() or is_float(node):
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, generator=self.generator, dtype=wide).to(dtype)
        return torch.randint(0, high + 1, shape, generator=self.generator).to(dtype)

    def _bytes(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)
