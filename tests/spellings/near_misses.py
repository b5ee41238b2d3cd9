"""Models that look like an indexer and mean something else: each must be left as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .candidates import blocks_of
from .masks import INF, Rows
from .model import Indexer, Plain, Selected, Spelling
from .oracle import case_of, inputs_of, sizes_of

BASE = Spelling(publish="ids int64")


# ---------------------------------------------------------------------------- another scorer
def activated(name: str, act: Callable[[Tensor], Tensor]) -> type[Indexer]:
    def activate(self: Indexer, parts: Tensor, axes: str, w: Tensor, layer: int) -> Tensor:
        return act(parts)

    return type(name, (Plain,), {"activate": activate})


class HeadBias(Plain):
    """A bias of each head inside the relu."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        heads = self.ww[0].shape[0]
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, heads), requires_grad=False)

    def activate(self, parts: Tensor, axes: str, w: Tensor, layer: int) -> Tensor:
        return torch.relu(parts + self.bias.unsqueeze(-1))


class WeightsInside(Plain):
    """Head weights, of any sign, multiplied before the relu."""

    def reduced(self, q: Tensor, k: Tensor, w: Tensor, layer: int) -> Tensor:
        parts = q @ k.mT.unsqueeze(1)
        return torch.relu(parts * w.unsqueeze(-1)).sum(2)


class KeysOfHeads(Plain):
    """Every head has its own keys."""

    def __init__(self, *spellings: Spelling) -> None:
        super().__init__(*spellings)
        g = torch.Generator().manual_seed(5)
        heads, width = self.ww[0].shape[0], self.wk.shape[0]
        self.turn = nn.Parameter(torch.randn(heads, width, width, generator=g) * 0.3)

    def reduced(self, q: Tensor, k: Tensor, w: Tensor, layer: int) -> Tensor:
        keys = torch.einsum("btd,hde->bhte", k, self.turn) + k.unsqueeze(1)
        parts = torch.relu(q.transpose(1, 2) @ keys.mT)
        return (parts * w.transpose(1, 2).unsqueeze(-1)).sum(1)


# ---------------------------------------------------------------------------- scores that escape
class ScoresReturned(Plain):
    def select(
        self, s: Tensor, ok: Tensor, cand: Tensor | None, ends: Tensor, layer: int
    ) -> Selected:
        out = super().select(s, ok, cand, ends, layer)
        return out if cand is None else (*out, s)


class ScoresInLoss(Plain):
    """The distribution over all visible positions is trained against a target."""

    def select(
        self, s: Tensor, ok: Tensor, cand: Tensor | None, ends: Tensor, layer: int
    ) -> Selected:
        out = super().select(s, ok, cand, ends, layer)
        if cand is None:
            return out
        log_p = torch.log_softmax(s.masked_fill(~ok, -1e9), dim=-1)
        return (*out, -(log_p / s.shape[-1]).masked_fill(~ok, 0.0).sum(-1).mean())


# ---------------------------------------------------------------------------- other candidates
class PositionPool(Plain):
    """The source publishes its best positions, not blocks."""

    def publish(self, s: Tensor, ends: Tensor, rows: Rows) -> Tensor:
        top = s.topk(min(self.block * self.blocks, rows.positions), dim=-1)
        return torch.where(top.values > -INF, top.indices, rows.positions)

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        flags = torch.zeros(*published.shape[:-1], rows.positions + 1, dtype=torch.bool)
        return flags.scatter(-1, published, True)[..., : rows.positions]


class OwnCandidates(Plain):
    """Every layer makes its candidates of its own scores."""

    def run(self, x: Tensor, past: Tensor | None, *inputs: Tensor) -> tuple[Selected, ...]:
        keys = self.keys(x, past)
        rows = Rows(x.shape[0], x.shape[-2], keys.shape[-2])
        ends = rows.ends()
        ok = rows.grid() < ends
        first = self.hide(self.score(x, keys, 0), ok, rows, inputs)
        second = self.score(x, keys, 1)
        published = self.publish(self.hide(second, ok, rows, inputs), ends, rows)
        s, cand = self.restrict(second, published, ok, rows, inputs, 1)
        return (self.select(first, ok, None, ends, 0), self.select(s, ok, cand, ends, 1))


class SinkPositions(Plain):
    """The first positions are let through whatever the candidates."""

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        return super().candidates(published, rows, layer) | (rows.grid() < 2)


class LocalWindow(Plain):
    """The newest six positions are let through whatever the candidates."""

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        return super().candidates(published, rows, layer) | (rows.grid() > rows.ends() - 7)


class BlocksOfRows(Plain):
    """Even rows read the ids as blocks of four, odd rows as blocks of five."""

    def candidates(self, published: Tensor, rows: Rows, layer: int) -> Tensor:
        n = blocks_of(rows.positions, self.block)
        at = published.masked_fill(published < 0, n)
        table = torch.zeros(*published.shape[:-1], n + 1, dtype=torch.bool).scatter(-1, at, True)
        size = self.block + (torch.arange(rows.rows) % 2).unsqueeze(-1)
        mine = (rows.grid() // size).expand(*published.shape[:-1], rows.positions)
        return table.gather(-1, mine)


# ---------------------------------------------------------------------------- other selections
class SmallBudget(Plain):
    """k = 12 of three blocks of four: rows pick visible positions from outside, by index."""

    def __init__(self, *spellings: Spelling, topk: int = 12) -> None:
        super().__init__(*spellings)
        self.topk = topk


class SmallestFirst(Plain):
    def run(self, x: Tensor, past: Tensor | None, *inputs: Tensor) -> tuple[Selected, ...]:
        """Both layers restricted by row alone."""
        keys = self.keys(x, past)
        rows = Rows(x.shape[0], x.shape[-2], keys.shape[-2])
        hidden = rows.grid() >= rows.ends()
        low = [
            self.score(x, keys, layer).masked_fill(hidden, INF).topk(7, dim=-1, largest=False)
            for layer in (0, 1)
        ]
        return tuple((top.indices.masked_fill(top.values == INF, -1),) for top in low)


@dataclass(frozen=True)
class NearMiss:
    """``reason`` matches what the report must say; ``layers`` are those that must be kept."""

    build: Callable[[], nn.Module]
    reason: str
    layers: tuple[str, ...] = ("source", "consumer")
    counterexample: bool = False
    spelling: Spelling = field(default_factory=lambda: BASE)

    def inputs(self) -> tuple[Tensor, ...]:
        """Those of the proper indexer, so that the layers that stay proper have no ties."""
        if self.spelling.fill == "-1e4":
            return inputs_of(self.spelling, sizes_of(self.spelling), 0, torch.float32)
        return case_of(self.spelling).inputs


def of(kind: type[Indexer], spelling: Spelling = BASE, **how: int) -> Callable[[], nn.Module]:
    return lambda: kind(spelling, spelling, **how).eval()


def small(topk: int, result: str) -> Callable[[], nn.Module]:
    return of(SmallBudget, replace(BASE, result=result), topk=topk)


ACTIVATION = r"relu|activation"
CONSUMER = ("consumer",)
NEAR_MISSES: dict[str, NearMiss] = {
    "no relu": NearMiss(of(activated("NoRelu", lambda x: x)), r"relu"),
    "softmax": NearMiss(of(activated("Softmax", lambda x: x.softmax(-1))), ACTIVATION),
    "sigmoid": NearMiss(of(activated("Sigmoid", torch.sigmoid)), ACTIVATION),
    "gelu": NearMiss(of(activated("Gelu", F.gelu)), ACTIVATION),
    "silu": NearMiss(of(activated("Silu", F.silu)), ACTIVATION),
    "softplus": NearMiss(of(activated("Softplus", F.softplus)), ACTIVATION),
    "leaky relu": NearMiss(of(activated("Leaky", lambda x: F.leaky_relu(x, 0.3))), ACTIVATION),
    "relu6": NearMiss(of(activated("Relu6", lambda x: x.clamp(0, 0.6))), ACTIVATION),
    "relu squared": NearMiss(
        of(activated("Squared", lambda x: F.relu(x) ** 2)), r"pow|relu|activation"
    ),
    "clamp at a threshold": NearMiss(of(activated("Above", lambda x: x.clamp(0.1))), ACTIVATION),
    "head bias in the relu": NearMiss(of(HeadBias), r"bias|added|relu|activation"),
    "weights inside the relu": NearMiss(of(WeightsInside), r"weight|before"),
    "keys of heads": NearMiss(of(KeysOfHeads), r"key|head"),
    "scores returned": NearMiss(of(ScoresReturned), r"score.*(use|output|return)|use", CONSUMER),
    "scores in a loss": NearMiss(of(ScoresInLoss), r"score.*use|use", CONSUMER),
    "pool of positions": NearMiss(of(PositionPool), r"position|block", CONSUMER),
    "own candidates": NearMiss(of(OwnCandidates), r"own|also used", CONSUMER),
    "sink positions": NearMiss(of(SinkPositions), r"outside|candidate", CONSUMER, True),
    "local window": NearMiss(of(LocalWindow), r"outside|candidate", CONSUMER, True),
    "blocks that differ": NearMiss(of(BlocksOfRows), r"block", CONSUMER, True),
    "budget below k, by index": NearMiss(
        small(12, "-1 by index"), r"budget|outside|index|k <=|leak", CONSUMER
    ),
    "budget one below k, by index": NearMiss(
        small(10, "-1 by index"), r"budget|outside|index|k <=|leak", CONSUMER
    ),
    "budget below k, bool mask": NearMiss(
        small(10, "bool mask"), r"budget|outside|mask|k <=|leak", CONSUMER
    ),
    "smallest first": NearMiss(of(SmallestFirst), r"largest|smallest"),
    "fill within reach": NearMiss(
        of(Plain, replace(BASE, fill="-1e4")),
        r"fill|reach|finite|-1e\+?0?4|-10000",
        spelling=replace(BASE, fill="-1e4"),
    ),
    # Added, the fill is a bias and nothing else: a source with a bias is still an indexer.
    "added fill within reach": NearMiss(
        of(Plain, replace(BASE, fill="-1e4", form="add", candidate_form="add")),
        r"fill|reach|finite|bias|candidate|-1e\+?0?4|-10000",
        CONSUMER,
        spelling=replace(BASE, fill="-1e4"),
    ),
}
# Look like the near-misses above, and are proper indexers.
TWINS: dict[str, Callable[[], nn.Module]] = {
    "budget below k, by value": small(12, "-1 by value"),
    "budget just enough, by index": small(9, "-1 by index"),
    "budget just enough, bool mask": small(9, "bool mask"),
}
