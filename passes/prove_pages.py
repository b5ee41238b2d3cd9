"""Prove how keys are read through a block table, by running the read on drawn caches and tables."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.axis_labels import Axis, LabelError, Labels
from dsa_compile.passes.bind_sizes import Binding, SizeBinder
from dsa_compile.passes.check_entries import BEYOND, check_entries
from dsa_compile.passes.context import MatchOptions
from dsa_compile.passes.draw_pages import CacheDraw, draw_fused, draw_numbers, same_numbers
from dsa_compile.passes.follow_axes import AxisFollower
from dsa_compile.passes.graph_tools import (
    ancestors,
    dtype_of,
    is_float,
    is_tensor,
    same_size,
    signature,
    value,
)
from dsa_compile.passes.recognise_ops import attribute
from dsa_compile.passes.run_probe import Draw, ProbeError, evaluate, memory, needed
from dsa_compile.passes.score_trace import Refusal
from dsa_compile.passes.shrink_sizes import SLOW, Shrinker

_MOST_ELEMENTS = 1 << 28
MOST_CODES = 256
"""Elements of a table of constants that keys may be decoded through."""


@dataclass(frozen=True)
class Pages:
    """Keys as a read through a block table.

    Attributes:
        cache: [pages, page, D], [slots, D] or fused pages, further dims of size 1 aside.
        table: pages of each batch item [B, P], of one [P], or of each request with ``lines``.
        lines: which line of the table is a batch item's, None: its own.
        page: tokens a page.
        quant: ``"none"`` for rows of numbers, else the format of fused pages.
        low: what the model does to negative entries: ``"wrap"``, ``"zero"`` or ``"fail"``; or
            ``"hide"`` where ``gather_indexer_k`` reads, whose callers have no positions there.
        high: what it does to entries beyond the cache: ``"clamp"``, ``"fail"`` or ``"hide"``.
        scales: cache of the key scales, one a token, beside rows of numbers.
    """

    cache: fx.Node
    table: fx.Node
    lines: fx.Node | None
    page: int
    quant: str
    low: str = "fail"
    high: str = "fail"
    scales: fx.Node | None = None


class PagesProver:
    """Runs the read on drawn caches and tables and compares it with one proposal."""

    def __init__(
        self, key: fx.Node, scale: fx.Node | None, pages: Pages, options: MatchOptions
    ) -> None:
        self.key, self.scale, self.pages, self.options = key, scale, pages, options
        self.targets = [n for n in (key, scale, pages.lines) if n is not None]
        self.given = [n for n in (pages.cache, pages.table, pages.scales) if n is not None]
        self.generator = torch.Generator().manual_seed(options.seed + 7)

    def prove(self, proofs: dict[Hashable, tuple[str, str] | Refusal]) -> Pages:
        """The proposal with the rules for odd entries; ``proofs`` are of equal parts, by signature.

        Raises:
            Refusal: the read is another one.
        """
        pages = self.pages
        if pages.lines is None and value(pages.table).dim() == 2:
            if not same_size(value(pages.table).shape[0], value(self.key).shape[0]):
                raise Refusal("the block table has another number of lines than the keys", 5)
        part = sorted(ancestors([*self.targets, *self.given], lambda n: n in self.given))
        marks = tuple(part.index(n) for n in [*self.targets, *self.given])
        leaves = {*self.given, *(n for n in part if n.op == "placeholder")}
        key = (signature(part, lambda n: n in leaves), marks, pages.page, pages.quant)
        if key not in proofs:
            try:
                proofs[key] = self._rules()
            except Refusal as refusal:
                proofs[key] = refusal
        found = proofs[key]
        if isinstance(found, Refusal):
            raise found
        return replace(pages, low=found[0], high=found[1])

    def _rules(self) -> tuple[str, str]:
        """What the model does to negative entries, and to those beyond the cache."""
        pages = self.pages
        cone = needed(self.targets, self.given)
        foreign = [
            n
            for n in cone
            if n.op != "call_function" and is_tensor(n)
            if is_float(n) or dtype_of(n) == torch.uint8
            if not _constant(n)
        ]
        if foreign:
            raise Refusal(f"the keys depend on {foreign[0].name} besides the cache", 6)
        self.leaves = [n for n in cone if n.op == "placeholder" and is_tensor(n)]
        nodes = [n for n in [*cone, *self.given] if is_tensor(n)]
        bound = SizeBinder().bindings(nodes, pages.table, count=2)
        if not bound:
            raise Refusal("no small sizes satisfy the guards around the block table", 5)
        cache = set(self.given) - {pages.table}
        check_entries(cone, self.targets, pages.table, cache, pages.page, bound[0])
        size = max(memory(cone, bound[0]), 8 * math.prod(bound[0].shape(pages.cache)))
        if size > min(SLOW, self.options.probe_memory_bytes):
            try:
                return self._rules_at(self._smaller(bound[0]))
            except (Refusal, ProbeError, LabelError) as error:
                if size > self.options.probe_memory_bytes:
                    text = f"the cache {pages.cache.name} is too large to probe: {error}"
                    raise error if isinstance(error, Refusal) else Refusal(text, 5) from None
        return self._rules_at(bound)

    def _smaller(self, binding: Binding) -> list[Binding]:
        """Fewer pages and shorter lines that stand for those of the graph.

        Raises:
            ProbeError: there are none.
        """
        follower, given = AxisFollower(Labels(binding)), [*self.given, *self.leaves]
        follower.cover(self.targets, given)
        batch, positions, _ = follower.labels.axes(self.key)
        follower.picks.append(follower.labels.axes(self.pages.cache)[0])
        none: Axis = []
        axes, limit = (positions, none, batch), self.options.probe_memory_bytes
        return list(Shrinker(follower, axes, self.targets, given, limit).members())

    def _rules_at(self, bound: list[Binding]) -> tuple[str, str]:
        rules: set[tuple[str, str]] = set()
        for binding in bound:
            self._check_sizes(binding)
            for _ in range(self.options.draws):
                if not self._agrees(binding, "in range", self.pages):
                    raise Refusal("the keys are no read of whole pages through a block table", 8)
            low = self._rule(binding, "low", ("wrap", "zero", "hide"))
            high = self._rule(binding, "high", ("clamp", "hide"))
            rules.add((low, high))
        if len(rules) != 1:
            raise Refusal("unused pages are read by no rule that is known", 8)
        return rules.pop()

    def _check_sizes(self, binding: Binding) -> None:
        pages = self.pages
        shape, table = binding.shape(self.key), binding.shape(pages.table)
        cache = binding.shape(pages.cache)
        if len(shape) != 3 or len(table) not in (1, 2) or len(table) == 1 and shape[0] != 1:
            raise Refusal("the block table does not have the keys' batch", 5)
        if shape[1] > table[-1] * pages.page:
            raise Refusal("the keys are longer than a line of the block table", 5)
        rows = math.prod(cache)
        if rows > _MOST_ELEMENTS or rows * 8 > self.options.probe_memory_bytes:
            raise Refusal(f"the cache {pages.cache.name} is too large to probe", 5)
        width = cache[-1]
        if pages.quant == "none":
            if width != shape[2] or (rows // width) % pages.page:
                raise Refusal("the pages of the cache do not divide it", 5)
            if pages.scales is not None:
                if math.prod(binding.shape(pages.scales)) != rows // width:
                    raise Refusal("the scales of the keys have another cache", 5)
        elif width != _width(shape[2], pages.quant):
            raise Refusal(f"the pages of {pages.cache.name} are not of fused {pages.quant}", 5)

    def _rule(self, binding: Binding, which: str, rules: tuple[str, ...]) -> str:
        """What the model does to entries out of range; ``"fail"`` where it cannot take them."""
        for rule in rules:
            pages = (
                replace(self.pages, low=rule) if which == "low" else replace(self.pages, high=rule)
            )
            try:
                if self._agrees(binding, which, pages):
                    return rule
            except ProbeError:
                return "fail"
        raise Refusal("unused pages are read by no rule that is known", 8)

    def _agrees(self, binding: Binding, entries: str, pages: Pages) -> bool:
        drawn = self._cache(binding)
        cache, rows, factors = drawn.cache, drawn.rows, drawn.factors
        count = rows.shape[0] // pages.page
        shape = binding.shape(pages.table)
        table = torch.randint(0, count, shape, generator=self.generator)
        odd = torch.rand(shape, generator=self.generator) < 0.3
        if entries == "low":
            below = torch.randint(-min(2, count), 0, shape, generator=self.generator)
            table = torch.where(odd, below, table)
        elif entries == "high":
            table = torch.where(odd, count + BEYOND, table)
        env: dict[fx.Node, Any] = {pages.cache: cache, pages.table: table.to(dtype_of(pages.table))}
        if pages.scales is not None:
            env[pages.scales] = factors.reshape(binding.shape(pages.scales)).to(
                dtype_of(pages.scales)
            )
        values = self._run(binding, env, shape)
        hidden = (table < 0) | (table >= count)
        if entries == "low":
            table = torch.where(table < 0, table + count if pages.low == "wrap" else 0, table)
        elif entries == "high":
            table = table.clamp(max=count - 1)
        keys = values[self.key]
        batch, positions, _ = keys.shape
        line = torch.arange(batch) if pages.lines is None else values[pages.lines].reshape(-1)
        table = table.reshape(-1, shape[-1])
        if line.numel() != batch or batch > 1 and pages.lines is None and table.shape[0] != batch:
            return False
        at = torch.arange(positions)
        slot = table[line.long()][:, at // pages.page] * pages.page + at % pages.page
        if "hide" in (pages.low, pages.high):
            if pages.quant == "none":
                return False
            rows, factors = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (rows, factors))
            gone = hidden.reshape(-1, shape[-1])[line.long()][:, at // pages.page]
            slot = torch.where(gone, rows.shape[0] - 1, slot)
        if self.scale is None:
            wanted = rows[slot]
            if pages.quant == "fp8":
                wanted = wanted * factors[slot][..., None]
            return same_numbers(keys.to(wanted.dtype), wanted)
        if pages.quant == "mxfp4":
            return False
        scales = values[self.scale].reshape(batch, -1)
        same = same_numbers(keys.to(rows.dtype), rows[slot])
        return same and same_numbers(scales.to(factors.dtype), factors[slot])

    def _run(
        self, binding: Binding, env: dict[fx.Node, Any], table: tuple[int, ...]
    ) -> dict[fx.Node, Any]:
        """The read on these values; other integers are drawn so that they can be indices."""
        failure: ProbeError | None = None
        positions = binding.shape(self.key)[1]
        for limit in (positions, table[-1] - 1, table[0] - 1, 0):
            draw = Draw(self.generator, limit)
            given = dict(env)
            for leaf in self.leaves:
                shape = binding.shape(leaf)
                given[leaf] = (
                    draw.boolean(shape)
                    if dtype_of(leaf) == torch.bool
                    else draw.integer(shape, dtype_of(leaf), max(0, limit))
                )
            try:
                return evaluate(needed(self.targets, given), given, binding)
            except ProbeError as error:
                failure = error
        assert failure is not None
        raise failure

    def _cache(self, binding: Binding) -> CacheDraw:
        pages = self.pages
        shape = binding.shape(pages.cache)
        if pages.quant != "none":
            return draw_fused(self.generator, shape, pages.page, pages.quant)
        scales = None if pages.scales is None else dtype_of(pages.scales)
        return draw_numbers(self.generator, shape, dtype_of(pages.cache), scales)


def _constant(node: fx.Node) -> bool:
    """Whether a node holds a small constant of the model, and no parameter."""
    if node.op != "get_attr":
        return False
    held = attribute(node)
    if not isinstance(held, torch.Tensor) or isinstance(held, torch.nn.Parameter):
        return False
    return held.numel() <= MOST_CODES


def _width(dim: int, quant: str) -> int:
    return dim + 4 if quant == "fp8" else dim // 2 + dim // 32
