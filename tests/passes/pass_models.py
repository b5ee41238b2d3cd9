"""Small models that the tests of the passes capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from dsa_compile.capture import export_graph

# With few heads all relus are often off, and scores tie at zero.
HEADS, DIM, BLOCK, BLOCKS, TOPK = 16, 8, 4, 3, 6
NEG = float("-inf")


class TwoLevel(nn.Module):
    """A source and some consumers over [B, S, 16] hidden states, in the plainest spelling.

    Args:
        consumers: number of consumer layers, all reading the same published blocks.
    """

    def __init__(self, consumers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq = nn.ModuleList(nn.Linear(16, HEADS * DIM) for _ in range(consumers + 1))
        self.ww = nn.ModuleList(nn.Linear(16, HEADS) for _ in range(consumers + 1))
        self.wk = nn.Linear(16, DIM)

    def scores(self, x: Tensor, layer: int) -> Tensor:
        """Causally masked scores [B, S, S]."""
        q = self.wq[layer](x).unflatten(-1, (HEADS, DIM))
        s = torch.einsum("bshd,btd->bsht", q, self.wk(x)).relu()
        s = (s * self.ww[layer](x).unsqueeze(-1)).sum(2)
        positions = torch.arange(x.shape[1], device=x.device)
        return s.masked_fill(positions > positions[:, None], NEG)

    def picks(self, scores: Tensor) -> Tensor:
        """Selected positions [B, S, k], -1 in slots that found nothing."""
        values, indices = scores.topk(min(TOPK, scores.shape[-1]), dim=-1)
        return indices.masked_fill(values == NEG, -1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        scores = self.scores(x, 0)
        tail = (n + BLOCK - 1) // BLOCK * BLOCK - n
        blocks = nn.functional.pad(scores, (0, tail), value=NEG)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
        newest = (
            torch.arange(blocks.shape[-1], device=x.device)
            == (torch.arange(n, device=x.device) // BLOCK)[:, None]
        )
        blocks = blocks.masked_fill(newest, float("inf"))
        best = blocks.topk(min(BLOCKS, blocks.shape[-1]), dim=-1)
        table = torch.zeros_like(blocks, dtype=torch.bool)
        table = table.scatter(-1, best.indices, best.values > NEG)
        keep = table.repeat_interleave(BLOCK, dim=-1)[..., :n]
        out = [self.picks(scores)]
        for layer in range(1, len(self.wq)):
            out.append(self.picks(self.scores(x, layer).masked_fill(~keep, NEG)))
        return tuple(out)


Rule = Callable[[Tensor, Tensor], Tensor]


class Ruled(TwoLevel):
    """Candidates, and positions that a rule lets in besides.

    Args:
        rule: of the mask of the candidates [B, S, T] and the positions [T].
        pin: of block numbers and rows [S, 1]: blocks that are published besides the newest.
        kind: dtype in which a block is compared with the newest.
    """

    def __init__(
        self, rule: Rule, pin: Rule | None = None, kind: torch.dtype = torch.int64
    ) -> None:
        super().__init__()
        self.rule, self.pin, self.kind = rule, pin, kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        scores = self.scores(x, 0)
        blocks = nn.functional.pad(scores, (0, -n % BLOCK), value=NEG)
        blocks = blocks.unflatten(-1, (-1, BLOCK)).amax(-1)
        here, row = torch.arange(blocks.shape[-1]), torch.arange(n)[:, None]
        pinned = here.to(self.kind) == (row // BLOCK).to(self.kind)
        if self.pin is not None:
            pinned = pinned | self.pin(here, row)
        best = blocks.masked_fill(pinned, float("inf")).topk(min(3, blocks.shape[-1]), dim=-1)
        table = torch.zeros_like(blocks, dtype=torch.bool)
        table = table.scatter(-1, best.indices, best.values > NEG)
        keep = self.rule(table.repeat_interleave(BLOCK, dim=-1)[..., :n], torch.arange(n))
        return self.picks(scores), self.picks(self.scores(x, 1).masked_fill(~keep, NEG))


def captured(model: nn.Module, *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """The functional ATen graph of a model."""
    return export_graph(model.eval(), inputs, dynamic=dynamic)


def hidden(length: int = 29, batch: int = 2) -> Tensor:
    """Hidden states [B, S, 16]."""
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(1))


def calls(graph_module: fx.GraphModule, name: str) -> list[fx.Node]:
    """Calls of a ``dsa`` op, whatever its provider."""
    return [n for n in graph_module.graph.nodes if str(n.target).split(".")[-2:-1] == [name]]


def same_sets(first: Any, second: Any) -> bool:
    """Whether two results select the same positions row by row."""
    return all(
        torch.equal(a.sort(-1).values, b.sort(-1).values)
        for a, b in zip(first, second, strict=True)
    )
