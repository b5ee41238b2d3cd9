"""Prove that an emitted canonical op computes what the model's own scores and masks compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels.reference import dense_scores
from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.graph_tools import is_float, value
from dsa_compile.passes.run_probe import (
    Draw,
    EagerLayout,
    ProbeError,
    draw_masks,
    evaluate,
    mask_leaves,
    needed,
)
from dsa_compile.passes.score_trace import HIDING, Refusal, ScoreTrace

_MORE_DRAWS = 12


def _epsilon(trace: ScoreTrace) -> float:
    kinds = {value(n).dtype for n in trace.path if is_float(n)}
    for kind in kinds:
        if kind.itemsize < 2:
            name = str(kind).removeprefix("torch.")
            raise Refusal(f"its scores are rounded to {name}, too coarse to be told from others", 4)
    return max(torch.finfo(k).eps for k in kinds)


class IndexerProver:
    """Runs the model's scores and the canonical op on the same draws and compares them.

    Besides random operands it draws some that show one part alone: weights that let only a few
    heads through (all heads in turn), so that a head left out or paired wrongly cannot hide behind
    the others' rounding, and a query of zeros, so that what is added to the scores stands alone.
    """

    def __init__(self, trace: ScoreTrace, call: fx.Node, seed: int) -> None:
        self.trace, self.call = trace, call
        self.epsilon = _epsilon(trace)
        self.seed = seed
        self.scale: float | None = None

    def check(self, roles: Roles, draws: int) -> None:
        """Compare under one binding; the first call fits the scale, later ones must agree.

        Raises:
            Refusal: scores or visible sets differ; carries the counterexample.
        """
        total = roles.labels.extent(roles.positions)
        draw = Draw(torch.Generator().manual_seed(self.seed), total)
        leaves = mask_leaves([e.mask for e in self.trace.masks])
        given = [roles.query, roles.key, roles.weights, roles.key_scale, *leaves]
        roles.labels.binding.cover(
            [self.trace.score, *self.call.all_input_nodes],
            [n for n in given if n is not None],
            self.call,
        )
        first = self._operands(roles, draw)
        if self.call.kwargs.get("bias") is not None:
            # The scale is fitted where nothing is added to the scores.
            for node in leaves:
                if is_float(node):
                    first[node] = torch.zeros(
                        roles.labels.binding.shape(node), dtype=value(node).dtype
                    )
        self._round(roles, draw, leaves, first)
        for _ in range(draws - 1):
            self._round(roles, draw, leaves, self._operands(roles, draw))
        # Masks may hide all that was drawn: what was never seen is not proven.
        for _ in range(_MORE_DRAWS):
            if self.scale is not None:
                break
            self._round(roles, draw, leaves, self._operands(roles, draw))
        for weights in self._few_heads(roles, draw):
            self._round(roles, draw, leaves, {**self._operands(roles, draw), **weights})
        if self.call.kwargs.get("bias") is not None:
            quiet = self._operands(roles, draw)
            quiet[roles.query] = torch.zeros_like(quiet[roles.query])
            self._round(roles, draw, leaves, quiet)

    def _operands(self, roles: Roles, draw: Draw) -> dict[fx.Node, torch.Tensor]:
        """Operands; small whole numbers in low precision, where products and sums stay exact."""
        nodes = [roles.query, roles.key, roles.weights, roles.key_scale]
        out: dict[fx.Node, torch.Tensor] = {}
        for node in nodes:
            if node is not None:
                drawn = draw.operand(node, roles.labels.binding.shape(node))
                if self.epsilon > 1e-4:
                    drawn = drawn.float().clamp(-1.4, 1.4).round().to(drawn.dtype)
                out[node] = drawn
        return out

    def _few_heads(self, roles: Roles, draw: Draw) -> Iterator[dict[fx.Node, torch.Tensor]]:
        """Weights of which each row keeps a few neighbouring heads, until all had their turn."""
        labels = roles.labels
        heads = labels.extent(roles.weight_heads)
        axes = labels.axes(roles.weights)
        shape = labels.binding.shape(roles.weights)
        own = [i for i, a in enumerate(axes) if set(a) & set(roles.weight_heads)]
        if heads < 2 or len(own) != 1 or shape[own[0]] != heads:
            return
        rows = max(1, int(torch.tensor(shape).prod()) // heads)
        few = 1 if self.epsilon > 1e-4 else 4
        turns = -(-heads // (rows * few))
        for turn in range(turns):
            drawn = draw.operand(roles.weights, shape)
            drawn = torch.where(drawn.abs() < 0.25, torch.ones_like(drawn), drawn)
            if self.epsilon > 1e-4:
                drawn = drawn.sign()
            start = (torch.arange(rows) + turn * rows) * few % heads
            kept = (torch.arange(heads) - start[:, None]) % heads < few
            lead = [s for i, s in enumerate(shape) if i != own[0]]
            mask = kept.reshape(*lead, heads).movedim(-1, own[0])
            yield {roles.weights: drawn * mask}

    def _round(
        self,
        roles: Roles,
        draw: Draw,
        leaves: list[fx.Node],
        special: dict[fx.Node, torch.Tensor],
    ) -> None:
        total = roles.labels.extent(roles.positions)
        targets = [self.trace.score, *self.call.all_input_nodes]
        failure: ProbeError | None = None
        # Integers that the masks read may be lengths, or indices into something short.
        for limit in (total, total - 1, 2, 0):
            draw.positions = limit
            env = draw_masks(leaves, draw, roles.labels.binding, special=special)
            try:
                values = evaluate(needed(targets, env), env, roles.labels.binding)
            except ProbeError as error:
                failure = error
                continue
            self._compare(values, roles, total)
            return
        raise Refusal(f"the probe cannot be run: {failure}", 6)

    def _compare(self, values: dict[fx.Node, Any], roles: Roles, total: int) -> None:
        eager = EagerLayout(roles.labels)
        groups = [roles.batch, roles.rows, roles.positions]
        old = eager.arrange(values[self.trace.score], roles.labels.axes(self.trace.score), groups)
        old = old.double()
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((self.call.args, dict(self.call.kwargs)), values.__getitem__)
        kwargs = {**kwargs, "topk": total, "scale": 1.0, "sorted": True}
        bias = kwargs.pop("bias", None)
        plain = _dense(args, kwargs, old)
        hidden = plain <= HIDING
        if bias is not None:
            bias = bias.double().broadcast_to(old.shape)
            hidden |= bias <= HIDING
        wrong = hidden != (old <= HIDING)
        if wrong.any():
            raise Refusal(
                "its visible set is not the one read from its masks", 9, _visible(wrong, old)
            )
        added = torch.zeros_like(old) if bias is None else bias
        seen = ~hidden & plain.isfinite() & old.isfinite() & added.isfinite()
        if not seen.any():
            return
        target = old - added
        if self.scale is None:
            self._fit(plain[seen], target[seen])
        assert self.scale is not None
        mine = self.scale * plain
        size = _magnitude(args[0], args[1], args[2], kwargs.get("key_scale")).abs()
        size = (abs(self.scale) * size + added.abs()).masked_fill(~seen, 0)
        # Rounding of each term, and of the sums that cancel inside the product of fp32 operands.
        limit = 8 * self.epsilon * size + 1e-5 * float(size.max())
        error = (mine - target).abs().masked_fill(~seen, 0)
        if (error > limit).any():
            at = tuple(int(i) for i in (error > limit).nonzero()[0])
            raise Refusal(
                "its scores are not those of an indexer",
                9,
                f"row {at[1]} position {at[2]}: the model scores {float(old[at]):.6g}, "
                f"the indexer formula {float((mine + added)[at]):.6g}",
            )

    def _fit(self, plain: torch.Tensor, target: torch.Tensor) -> None:
        fitted = float((plain * target).sum() / (plain * plain).sum().clamp_min(1e-30))
        exact = self.trace.constant
        if fitted == 0 or not math.isfinite(fitted):
            raise Refusal("its scores are not those of an indexer", 9, "all scores are zero")
        # The walk knows the product of the constants exactly, unless it met a mean, say.
        self.scale = exact if abs(exact / fitted - 1) <= 8 * self.epsilon + 1e-5 else fitted


def _dense(args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    """All scores of the canonical op as a dense fp64 ``[B, S, T]`` tensor, -inf where hidden."""
    picked, places = torch.ops.dsa.indexer_select.default(*args, **kwargs)
    return torch.full_like(like, -torch.inf).scatter(-1, places, picked.double())


def _magnitude(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, key_scale: torch.Tensor | None
) -> torch.Tensor:
    """The scores [B, S, T] in fp64 as they would be if nothing in their sums cancelled."""
    scale = None if key_scale is None else key_scale.abs()
    return dense_scores(q, k, weights.abs(), 1.0, scale, None).double()


def _visible(wrong: torch.Tensor, old: torch.Tensor) -> str:
    b, row, position = (int(i) for i in wrong.nonzero()[0])
    shown = bool(old[b, row, position] > HIDING)
    return f"row {row} {'keeps' if shown else 'hides'} position {position}"
