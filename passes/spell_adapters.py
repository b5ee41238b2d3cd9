"""Spell an opaque op that has an adapter in plain ops, as the matcher knows them.

What is emitted here never runs: the matcher puts a canonical op in its place, or the opaque op
comes back (``leave_adapters``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.adapter import UNWRITTEN, Adapter
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import aten, dtype_of, same_size, value
from dsa_compile.passes.read_arguments import GivenRoles
from dsa_compile.passes.score_trace import Refusal

Size = fx.Node | int


@dataclass(frozen=True)
class Spelled:
    """A call in plain ops.

    Attributes:
        outs: what stands for the call (key None), or for each of its outputs.
        core: the node that is gone once nothing needs the plain form any more.
        score: what the positions are counted along.
        visible: bool node, True where the result is no fill; None where all is visible.
        ranked: of a top-k, what the plain one ranks.
        places: of a top-k, the positions as the plain one gives them, and which output they are.
    """

    outs: dict[int | None, fx.Node]
    core: fx.Node
    score: fx.Node
    visible: fx.Node | None = None
    ranked: fx.Node | None = None
    places: tuple[fx.Node, int | None] | None = None

    def names(self, outputs: dict[int | None, tuple[str, dict[str, Any]]]) -> dict[str, str]:
        """Names of nodes that only the plain form has -> what the original graph calls them."""
        if self.places is None or self.ranked is None:
            return {}
        found = {} if self.ranked is self.score else {self.ranked.name: self.score.name}
        node, place = self.places
        if place in outputs:
            found[node.name] = outputs[place][0]
        return found


class Speller:
    """Emits the plain form of one call after it."""

    def __init__(self, emit: Emitter, call: fx.Node, adapter: Adapter) -> None:
        self.emit, self.call, self.adapter = emit, call, adapter
        self.given = GivenRoles(call, adapter)

    def spell(self) -> Spelled:
        """The call in plain ops.

        Raises:
            Refusal: an argument is not as its role asks for.
        """
        made = {
            "dense_logits": self._dense,
            "paged_logits": self._paged,
            "candidate_mask": self._mask,
            "topk": self._topk,
        }
        return made[self.adapter.kind]()

    # -- shapes -------------------------------------------------------------------------------

    def sizes(self, node: fx.Node, first: int, last: int | None = None) -> list[Size]:
        """Sizes of some dims as arguments."""
        return [self.emit.size(node, d) for d in range(value(node).dim())[first:last]]

    def fit(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """A tensor in a shape of as many elements."""
        have, want = list(value(node).shape), [value(s) for s in shape]
        if len(have) == len(want) and all(map(same_size, have, want)):
            return node
        return self.emit(aten.reshape.default, node, list(shape))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if dtype_of(node) == dtype:
            return node
        return self.emit(aten._to_copy.default, node, dtype=dtype)

    # -- kinds --------------------------------------------------------------------------------

    def _dense(self) -> Spelled:
        key = self.given.role("key")
        if value(key).dim() not in (2, 3):
            raise Refusal(f"the key of {self.adapter.op} has {value(key).dim()} dims", 5)
        lead = self.sizes(self.given.role("query"), 0, -2)
        scale = self.given.maybe("key_scale")
        if scale is not None:
            scale = self.fit(scale, self.sizes(key, 0, -1))
        bounds = [self.given.maybe(n) for n in ("row_start", "row_end")]
        start, end = (b if b is None else self.fit(b, lead) for b in bounds)
        return self._scores(key, scale, start, end)

    def _paged(self) -> Spelled:
        query, table = self.given.role("query"), self.given.role("block_table")
        cache = self.given.role("cache")
        if value(query).dim() != 4 or value(cache).dim() not in (3, 4):
            raise Refusal(f"query or cache of {self.adapter.op} has another number of dims", 5)
        cache = self.fit(cache, [*self.sizes(cache, 0, 2), self.emit.size(cache, -1)])
        lines, wide = self.emit.size(table, 0), self.emit.size(self.call, -1)
        count = self._times(lines, wide)
        above = lines + 1 if isinstance(lines, int) else self.emit(operator.add, lines, 1)
        starts = self.emit(aten.arange.default, above, device=value(table).device)
        starts = self.emit(aten.mul.Tensor, starts, wide)
        read = self.emit(
            torch.ops.dsa.gather_indexer_k.default, cache, table, starts, num_tokens=count
        )
        keys, scales = self.emit(operator.getitem, read, 0), self.emit(operator.getitem, read, 1)
        keys = self.cast(keys, torch.float32)
        keys = self.fit(keys, [lines, wide, self.emit.size(keys, 1)])
        return self._scores(keys, self.fit(scales, [lines, wide]), None, self._ends(query))

    def _ends(self, query: fx.Node) -> fx.Node:
        """Row ends [Q, S] of a paged op."""
        lead = self.sizes(query, 0, 2)
        ends = self.given.maybe("row_end")
        if ends is not None:
            return self.fit(ends, lead)
        lens = self.given.role("context_lens")
        lens = self.cast(self.fit(lens, [lead[0], 1]), torch.int64)
        row = self.emit(aten.arange.default, lead[1], device=value(lens).device)
        ends = self.emit(aten.add.Tensor, lens, row)
        below = 1 - lead[1] if isinstance(lead[1], int) else self.emit(operator.sub, 1, lead[1])
        return self.emit(aten.add.Scalar, ends, below)

    def _scores(
        self, key: fx.Node, scale: fx.Node | None, start: fx.Node | None, end: fx.Node | None
    ) -> Spelled:
        query, emit = self.given.role("query"), self.emit
        lead = self.sizes(query, 0, -2)
        if len(lead) not in (1, 2) or value(key).dim() - 1 > len(lead):
            raise Refusal(f"the query of {self.adapter.op} has {value(query).dim()} dims", 5)
        weights = self.fit(self.given.role("weights"), self.sizes(query, 0, -1))
        double = torch.float64 in (dtype_of(query), dtype_of(key), dtype_of(weights))
        wide = torch.float64 if double else torch.float32
        rows = "bs"[-len(lead) :]
        keys = "btd" if value(key).dim() == 3 else "td"
        operands = [self.cast(query, wide), self.cast(key, wide)]
        score = emit(aten.einsum.default, f"{rows}hd,{keys}->{rows}ht", operands)
        score = emit(aten.relu.default, score)
        weights = emit(aten.unsqueeze.default, self.cast(weights, wide), -1)
        score = emit(aten.mul.Tensor, score, weights)
        score = emit(aten.sum.dim_IntList, score, [-2])
        factor = self.given.number(self.adapter.scale, "scale")
        if factor != 1:
            score = emit(aten.mul.Scalar, score, float(factor))
        if scale is not None:
            scale = self.cast(scale, wide)
            scale = emit(aten.unsqueeze.default, scale, 1) if value(scale).dim() == 2 else scale
            score = emit(aten.mul.Tensor, score, scale)
        visible = self._bounds(score, start, end)
        if visible is not None:
            score = emit(aten.where.ScalarOther, visible, score, self._fill())
        out = self._like(score, value(self.call))
        return Spelled({None: out}, out, score, visible)

    def _mask(self) -> Spelled:
        ids, logits, emit = self.given.role("block_ids"), self.given.maybe("logits"), self.emit
        lead = self.sizes(ids, 0, -1)
        count = emit.size(self.call if logits is None else logits, -1)
        block = self.given.number(self.adapter.block_size, "block_size")
        if block < 1:
            raise Refusal(f"block_size of {self.adapter.op} is {block}", 5)
        position = emit(aten.arange.default, count, device=value(ids).device)
        numbers = emit(aten.floor_divide.default, position, block)
        member = emit(aten.eq.Tensor, emit(aten.unsqueeze.default, ids, -1), numbers)
        shown = emit(aten.any.dim, member, -2)
        bounds = [self.given.maybe(n) for n in ("row_start", "row_end")]
        start, end = (b if b is None else self.fit(b, lead) for b in bounds)
        seen = self._bounds(shown, start, end)
        if seen is not None:
            shown = emit(aten.logical_and.default, shown, seen)
        if logits is not None:
            flat = self.fit(logits, [*lead, count])
            out = emit(aten.where.ScalarOther, shown, flat, self._fill())
            return Spelled({None: self._like(out, value(self.call))}, out, flat, shown)
        out = shown if self.adapter.shows == "visible" else emit(aten.logical_not.default, shown)
        return Spelled({None: self._like(out, value(self.call))}, out, shown)

    def _topk(self) -> Spelled:
        logits, emit = self.given.role("logits"), self.emit
        lead = self.sizes(logits, 0, -1)
        argument = self.adapter.argument("topk")
        assert argument is not None
        k = self.given.number(argument, "topk")
        bounds = [self.given.maybe(n) for n in ("row_start", "row_end")]
        start, end = (b if b is None else self.fit(b, lead) for b in bounds)
        seen = self._bounds(logits, start, end)
        score = logits if seen is None else emit(aten.where.ScalarOther, seen, logits, -torch.inf)
        size = emit.size(logits, -1)
        kept = min(k, size) if isinstance(size, int) else emit(torch.sym_min, k, size)
        core = emit(aten.topk.default, score, kept)
        values, places = emit(operator.getitem, core, 0), emit(operator.getitem, core, 1)
        indices = places
        if self.adapter.empty is not None:
            found = emit(aten.gt.Scalar, values, -torch.inf)
            indices = emit(aten.where.ScalarOther, found, places, self.adapter.empty)
        made: dict[str, fx.Node] = {"values": values, "indices": indices}
        if not (isinstance(size, int) and size >= k):
            if self.adapter.empty is None:
                raise Refusal(f"{self.adapter.op} may select more than there is", 5)
            missing = k - kept if isinstance(kept, int) else emit(operator.sub, k, kept)
            for name, fill in (("values", -torch.inf), ("indices", self.adapter.empty)):
                held = value(made[name])
                more = emit(
                    aten.full.default,
                    [*lead, missing],
                    fill,
                    dtype=held.dtype,
                    device=held.device,
                )
                made[name] = emit(aten.cat.default, [made[name], more], -1)
        held = value(self.call)
        single = isinstance(held, torch.Tensor)
        outs: dict[int | None, fx.Node] = {}
        for at, name in enumerate(self.adapter.outputs):
            outs[None if single else at] = self._like(made[name], held if single else held[at])
        at = self.adapter.outputs.index("indices") if "indices" in self.adapter.outputs else -1
        return Spelled(outs, core, logits, None, score, (places, None if single else at))

    # -- parts --------------------------------------------------------------------------------

    def _fill(self) -> float:
        masked = self.adapter.masked
        return -torch.inf if masked == UNWRITTEN else float(masked)

    def _bounds(self, score: fx.Node, start: fx.Node | None, end: fx.Node | None) -> fx.Node | None:
        """True where a column lies in its row's range; None where no range is given."""
        emit, shown = self.emit, None
        for bound, compare in ((start, aten.ge.Tensor), (end, aten.lt.Tensor)):
            if bound is None:
                continue
            position = emit(aten.arange.default, emit.size(score, -1), device=value(score).device)
            inside = emit(compare, position, emit(aten.unsqueeze.default, bound, -1))
            shown = inside if shown is None else emit(aten.logical_and.default, shown, inside)
        return shown

    def _like(self, node: fx.Node, held: Any) -> fx.Node:
        """A result in the dtype and shape that the op gives it."""
        node = self.cast(node, held.dtype)
        have, want = list(value(node).shape), list(held.shape)
        if len(have) == len(want) and all(map(same_size, have, want)):
            return node
        if len(have) == 3 and len(want) == 2:
            lead = self._times(self.emit.size(node, 0), self.emit.size(node, 1))
            node = self.emit(aten.reshape.default, node, [lead, self.emit.size(node, 2)])
            have = list(value(node).shape)
        if len(have) != len(want) or str(have) != str(want):
            raise Refusal(
                f"{self.adapter.op} gives {tuple(want)} where its adapter says {tuple(have)}", 5
            )
        return node

    def _times(self, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self.emit(operator.mul, a, b)
