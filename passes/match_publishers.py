"""Match what a source layer publishes: block maxima of its scores and the best blocks of them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.build_call import CallBuilder
from dsa_compile.passes.graph_tools import (
    aten,
    dtype_of,
    is_float,
    is_view,
    op_name,
    value,
    where_in_model,
)
from dsa_compile.passes.recognise_ops import constant_of
from dsa_compile.passes.run_probe import (
    Draw,
    EagerLayout,
    ProbeError,
    draw_masks,
    evaluate,
    mask_leaves,
    needed,
)
from dsa_compile.passes.score_trace import HIDING, Refusal

_SHAPING = frozenset({"pad", "constant_pad_nd", "slice", "_to_copy", "to"})


@dataclass
class Publisher:
    """The block maxima of a source and, where proven, its pinned top blocks.

    Attributes:
        score: the masked scores.
        maxima: node holding one maximum a block.
        block_size: positions a block.
        ranked: input of the block selection if it is the maxima, pinned or plain; else None.
        selection: the block selection, None where only the maxima are replaced.
        pinned: condition and value of the pin, if any.
        missing: what positions beyond the last block's end count as; None where there are none.
    """

    score: fx.Node
    maxima: fx.Node
    block_size: int
    ranked: fx.Node | None = None
    selection: fx.Node | None = None
    pinned: tuple[fx.Node, float] | None = None
    newest: bool = field(default=False)
    missing: float | None = None

    def fill(self, call: fx.Node) -> float:
        """What hidden and missing positions count as in the block maxima.

        An added mask hides nothing from the call itself: the padding alone says it then.
        """
        hides = any(call.kwargs.get(name) is not None for name in ("row_start", "row_end", "mask"))
        if not hides and self.missing is not None:
            return self.missing
        given = call.kwargs.get("fill", float("-inf"))
        assert isinstance(given, float)
        return given

    def prove(self, roles: Roles, call: fx.Node) -> None:
        """Run the model's block maxima on drawn scores and compare; then its pin.

        Raises:
            Refusal: the maxima are not those of contiguous blocks from position 0.
        """
        binding = roles.labels.binding
        total = roles.labels.extent(roles.positions)
        draw = Draw(torch.Generator().manual_seed(11), total)
        shape = binding.shape(self.score)
        fill = self.fill(call)
        pin = self.pinned[0] if self.pinned else None
        end = call.kwargs.get("row_end")
        extra = [n for n in (pin, end) if isinstance(n, fx.Node)]
        leaves = mask_leaves([*extra])
        binding.cover([self.maxima, *extra], [self.score, *(n for n in leaves if n != self.maxima)])
        for _ in range(2):
            scores = draw.normal(shape, torch.float32)
            blocks = -(-total // self.block_size)
            alive = draw.boolean((*shape[:-1], blocks)).repeat_interleave(self.block_size, -1)
            shown = draw.boolean(shape) & alive[..., :total]
            scores = scores.masked_fill(~shown, fill).to(dtype_of(self.score))
            # Lengths may exceed the context, or be negative: the pin must follow there too.
            draw.positions = total + 2 * self.block_size
            env = draw_masks(leaves, draw, binding, special={self.score: scores})
            env.pop(self.maxima, None)
            try:
                values = evaluate(needed([self.maxima, *extra], env), env, binding)
            except ProbeError as error:
                raise Refusal(f"the block maxima cannot be probed: {error}", 7) from None
            padded = torch.nn.functional.pad(
                scores.float(), (0, blocks * self.block_size - total), value=fill
            )
            expected = padded.unflatten(-1, (blocks, self.block_size)).amax(-1)
            got = values[self.maxima].float()
            if got.shape != expected.shape or not torch.equal(got, expected):
                raise Refusal("what it publishes is not the maximum of contiguous blocks", 7)
            if self.pinned is not None and not self._pins_newest(values, roles, total, end, blocks):
                self.leave_ranking()

    def leave_ranking(self) -> None:
        """Give the maxima alone; the model's own ops pin and rank them."""
        self.pinned, self.selection, self.ranked = None, None, None

    def _pins_newest(
        self, values: dict, roles: Roles, total: int, end: object, blocks: int
    ) -> bool:
        # Leading dims of size 1 carry no axis.
        if sum(map(bool, roles.lead)) != len(roles.batch) + len(roles.rows) or self.pinned is None:
            return False
        pin = values[self.pinned[0]]
        lead = [roles.labels.extent(a) for a in roles.lead]
        pin = pin.broadcast_to((*lead, blocks))
        eager = EagerLayout(roles.labels)
        last = values[end] if isinstance(end, fx.Node) else torch.full((1, 1), total)
        size = (roles.labels.extent(roles.batch), roles.labels.extent(roles.rows))
        axes = [list(roles.batch), list(roles.rows)]
        last = eager.arrange(last.broadcast_to(size), axes, list(roles.lead))
        newest = torch.div(last.clamp(max=total) - 1, self.block_size, rounding_mode="floor")
        inside = (newest.unsqueeze(-1) == torch.arange(blocks)).broadcast_to(pin.shape)
        self.newest = bool(torch.equal(pin, inside))
        return self.newest

    def replace(
        self, builder: CallBuilder, call: fx.Node
    ) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]:
        """A call that also gives the maxima or the best blocks, and what stands for which node."""
        swaps: list[tuple[fx.Node, fx.Node]] = []
        emit = builder.emit
        emit.after = call
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("block_ids", "anchored")}
        kwargs["block_size"] = self.block_size
        if (fill := self.fill(call)) != float("-inf"):
            kwargs["fill"] = fill
        if self.selection is not None:
            kwargs["num_blocks"] = self.selection.args[1]
            number = self.selection.args[1]
            if isinstance(number, fx.Node) and number > emit.after:
                emit.after = number
            kwargs["pin_newest"] = self.pinned is not None
            if self.pinned is not None:
                kwargs["pin_value"] = self.pinned[1]
            new = emit(torch.ops.dsa.indexer_publish.default, *call.args, **kwargs)
            for use in [u for u in self.selection.users if op_name(u) == "getitem"]:
                out = builder.restore(emit(operator.getitem, new, 2 + use.args[1]))  # type: ignore[operator]
                if dtype_of(out) != dtype_of(use):
                    out = emit(aten._to_copy.default, out, dtype=dtype_of(use))
                swaps.append((use, out))
        else:
            new = emit(torch.ops.dsa.indexer_block_max.default, *call.args, **kwargs)
            out = builder.restore(emit(operator.getitem, new, 2))
            if dtype_of(out) != dtype_of(self.maxima):
                out = emit(aten._to_copy.default, out, dtype=dtype_of(self.maxima))
            swaps.append((self.maxima, out))
        return new, swaps


def read_publisher(score: fx.Node, extra: list[fx.Node]) -> Publisher:
    """Propose the publisher that the scores' other users are part of.

    Raises:
        Refusal: another user reads the scores, which are then needed whole.
    """
    if len(extra) != 1:
        raise Refusal(_also(extra[0]), 6)
    node, missing = extra[0], None
    while True:
        name = op_name(node)
        if name == "amax" or name == "max" and str(node.target) == "aten.max.dim":
            break
        if name in ("pad", "constant_pad_nd"):
            pads = node.args[1]
            fill = constant_of(node.args[-1]) if len(node.args) > 2 else 0.0
            if len(pads) != 2 or fill is None or fill > HIDING:  # type: ignore[arg-type]
                raise Refusal(_also(node), 6)
            missing = fill
        elif name == "cat":
            parts: Any = node.args[0]
            last = node.args[1] if len(node.args) > 1 else 0
            tail = constant_of(parts[-1]) if len(parts) == 2 else None
            if tail is None or tail > HIDING or last not in (-1, value(node).dim() - 1):
                raise Refusal(_also(node), 6)
            missing = tail
        elif not (is_view(node) or name in _SHAPING):
            raise Refusal(_also(extra[0]), 6)
        if len(node.users) != 1:
            raise Refusal(_also(next(iter(node.users), node)), 6)
        node = next(iter(node.users))
    if op_name(node) == "max":
        gets = list(node.users)
        if len(gets) != 1 or gets[0].args[1] != 0:
            raise Refusal(_also(node), 6)
        size = _block_size(node.args[0])
        node = gets[0]
    else:
        size = _block_size(node.args[0])
    if size is None:
        raise Refusal("the size of the published blocks is no constant", 6)
    publisher = Publisher(score, node, size, missing=missing)
    _read_ranking(publisher)
    return publisher


def _block_size(parts: object) -> int | None:
    """The last size of scores by block: an int, or a size that is one number at every length."""
    if op_name(parts) in ("view", "reshape") and isinstance(parts, fx.Node):
        written: Any = parts.args[1]
        if isinstance(written[-1], int) and written[-1] > 0:
            return written[-1]
    block = value(parts).shape[-1]
    if isinstance(block, torch.SymInt):
        known = block.node.shape_env.simplify(block.node.expr)
        if known.is_Integer:
            return int(known)
    return block if isinstance(block, int) else None


def _read_ranking(publisher: Publisher) -> None:
    """Note the block selection when the maxima feed it alone, pinned or plain."""
    users = [u for u in publisher.maxima.users if not _shape_only(u)]
    if len(users) != 1:
        return
    user, ranked = users[0], publisher.maxima
    if op_name(user) in ("where", "masked_fill"):
        if op_name(user) == "masked_fill":
            cond, filled, kept = user.args[1], user.args[2], user.args[0]
        else:
            cond, filled, kept = user.args[:3]
        number = constant_of(filled)
        if (
            kept is not publisher.maxima
            or number is None
            or number < 6e4
            or not isinstance(cond, fx.Node)
        ):
            return
        publisher.pinned, ranked = (cond, number), user
        users = [u for u in ranked.users if not _shape_only(u)]
        if len(users) != 1:
            publisher.pinned = None
            return
        user = users[0]
    rank = value(ranked).dim()
    dim = user.args[2] if len(user.args) > 2 else -1
    largest = user.args[3] if len(user.args) > 3 else True
    if op_name(user) == "topk" and user.args[0] is ranked and dim in (-1, rank - 1) and largest:
        publisher.ranked, publisher.selection = ranked, user
    else:
        publisher.pinned = None


def _shape_only(user: fx.Node) -> bool:
    return op_name(user) in (
        "sym_size",
        "full_like",
        "zeros_like",
        "ones_like",
        "new_full",
        "new_zeros",
        "new_ones",
    )


def _also(user: fx.Node) -> str:
    return f"its scores are also used by {op_name(user) or user.op} at {where_in_model(user)}"


__all__ = ["Publisher", "is_float", "read_publisher"]
