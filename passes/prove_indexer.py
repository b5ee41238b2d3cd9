"""Prove that an emitted canonical op computes what the model's own scores and masks compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.assign_roles import Roles
from dsa_compile.passes.graph_tools import is_float, value
from dsa_compile.passes.prove_candidates import draw_masks, mask_leaves
from dsa_compile.passes.run_probe import Draw, EagerLayout, ProbeError, evaluate, needed
from dsa_compile.passes.trace_scores import HIDING, Refusal, ScoreTrace


@dataclass(frozen=True)
class Fit:
    """The scale that makes the scores equal, and how exactly it was found."""

    scale: float


def _epsilon(trace: ScoreTrace) -> float:
    kinds = {value(n).dtype for n in trace.path if is_float(n)}
    return max(torch.finfo(k).eps for k in kinds)


def _operand(draw: Draw, node: fx.Node, shape: tuple[int, ...], coarse: bool) -> torch.Tensor:
    drawn = draw.operand(node, shape)
    return drawn.float().clamp(-1.4, 1.4).round().to(drawn.dtype) if coarse else drawn


class IndexerProver:
    """Runs the model's scores and the canonical op on the same draws and compares them."""

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
        binding = roles.labels.binding
        total = roles.labels.extent(roles.positions)
        draw = Draw(torch.Generator().manual_seed(self.seed), total)
        operands = [
            n for n in (roles.query, roles.key, roles.weights, roles.key_scale) if n is not None
        ]
        targets = [self.trace.score, *self.call.all_input_nodes]
        leaves = mask_leaves([e.mask for e in self.trace.masks])
        coarse = self.epsilon > 1e-4
        for attempt in range(draws):
            special = {n: _operand(draw, n, binding.shape(n), coarse) for n in operands}
            if attempt == 0:
                special |= {
                    n: torch.zeros(binding.shape(n), dtype=value(n).dtype)
                    for n in self._bias(leaves)
                }
            high = (total, total, 2, 0)
            for limit in high:
                draw.positions = limit
                env = draw_masks(leaves, draw, binding, special=special)
                try:
                    values = evaluate(needed(targets, env), env, binding)
                    break
                except ProbeError as error:
                    failure = error
            else:
                raise Refusal(f"the probe cannot be run: {failure}", 6)
            self._compare(values, roles, total)

    def _bias(self, leaves: list[fx.Node]) -> list[fx.Node]:
        bias = self.call.kwargs.get("bias")
        return [n for n in leaves if is_float(n)] if bias is not None else []

    def _compare(self, values: dict[fx.Node, Any], roles: Roles, total: int) -> None:
        eager = EagerLayout(roles.labels)
        groups = [roles.batch, roles.rows, roles.positions]
        old = eager.arrange(values[self.trace.score], roles.labels.axes(self.trace.score), groups)
        old = old.double()
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((self.call.args, dict(self.call.kwargs)), values.__getitem__)
        kwargs = {**kwargs, "topk": total, "scale": 1.0, "sorted": True}
        operator = torch.ops.dsa.indexer_select.default
        bias = kwargs.pop("bias", None)
        picked, places = operator(*args, **kwargs)
        raw = torch.full_like(old, -torch.inf).scatter(-1, places, picked.double())
        hidden = raw <= HIDING
        if bias is not None:
            raw = raw + bias.double()
            hidden |= (bias <= HIDING).broadcast_to(hidden.shape)
        wrong = hidden != (old <= HIDING)
        if wrong.any():
            raise Refusal(
                "its visible set is not the one read from its masks", 9, self._visible(wrong, old)
            )
        seen = ~hidden & raw.isfinite() & old.isfinite()
        if not seen.any():
            return
        plain = raw - bias.double() if bias is not None else raw
        target = old - bias.double() if bias is not None else old
        if self.scale is None:
            self._fit(plain[seen], target.broadcast_to(raw.shape)[seen])
        assert self.scale is not None
        mine = self.scale * plain
        error = (mine - target).abs().masked_fill(~seen, 0)
        limit = (
            24
            * self.epsilon
            * float(target.broadcast_to(raw.shape)[seen].abs().max().clamp_min(1e-6))
        )
        if float(error.max()) > limit:
            at = tuple(int(i) for i in (error == error.max()).nonzero()[0])
            raise Refusal(
                "its scores are not those of an indexer",
                9,
                f"row {at[1]} position {at[2]}: the model scores {float(target[at]):.6g}, "
                f"the indexer formula {float(mine[at]):.6g}",
            )

    def _fit(self, plain: torch.Tensor, target: torch.Tensor) -> None:
        fitted = float((plain * target).sum() / (plain * plain).sum().clamp_min(1e-30))
        exact = self.trace.constant
        if fitted == 0 or abs(exact / fitted - 1) > 64 * self.epsilon:
            # the walk may have missed a constant (a mean, say); the fit stands if it is exact
            if not (fitted and torch.isfinite(torch.tensor(fitted))):
                raise Refusal("its scores are not those of an indexer", 9, "all scores are zero")
            exact = fitted
        self.scale = exact

    @staticmethod
    def _visible(wrong: torch.Tensor, old: torch.Tensor) -> str:
        b, row, position = (int(i) for i in wrong.nonzero()[0])
        shown = bool(old[b, row, position] > HIDING)
        return f"row {row} {'keeps' if shown else 'hides'} position {position}"
