"""Other users of top-k: expert routers, samplers, retrieval. None is an indexer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .masks import INF
from .model import HIDDEN


class Router(nn.Module):
    """Top experts of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(32, HIDDEN, generator=g) * 0.3)
        self.gate = nn.Parameter(torch.randn(16, HIDDEN, generator=g) * 0.3)
        self.down = nn.Parameter(torch.randn(16, 32, generator=g) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top = F.linear(x, self.gate).softmax(-1).topk(4, dim=-1)
        return top.indices, top.values / top.values.sum(-1, keepdim=True)


class GroupedRouter(Router):
    """Top groups of experts first, then the experts inside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.gate).sigmoid()
        groups = scores.unflatten(-1, (4, 4)).topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(groups).scatter(-1, groups.topk(2, dim=-1).indices, 1.0)
        mask = kept.unsqueeze(-1).expand(*kept.shape, 4).reshape(scores.shape)
        top = scores.masked_fill(mask == 0, -INF).topk(4, dim=-1)
        return top.indices, top.values


class ReluRouter(Router):
    """An MLP with a relu in front of the experts' top-k."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top = F.linear(F.relu(F.linear(x, self.up)), self.down).topk(4, dim=-1)
        return top.indices, top.values


class Sampler(Router):
    """Top-k, then top-p, of a distribution over tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(F.relu(F.linear(x[:, -1], self.up)), self.down) / 0.7
        cut = logits.topk(6, dim=-1).values[..., -1:]
        p = logits.masked_fill(logits < cut, -INF).softmax(-1)
        ranked, order = p.sort(dim=-1, descending=True)
        kept = (ranked.cumsum(-1) - ranked < 0.9) * ranked
        return order, kept / kept.sum(-1, keepdim=True)


class Retrieval(Router):
    """Best documents by a plain dot product of unit vectors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        docs = F.normalize(self.gate, dim=-1)
        top = torch.matmul(F.normalize(x, dim=-1), docs.t()).topk(5, dim=-1)
        return top.indices, top.values


class LateInteraction(Router):
    """Best documents by the sum over query tokens of the largest product with their tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        docs = self.up.view(8, 4, HIDDEN)
        pairs = torch.einsum("bsd,nmd->bnsm", x, docs)
        top = pairs.amax(-1).sum(-1).topk(3, dim=-1)
        return top.indices, top.values


ROUTERS: dict[str, type[Router]] = {
    kind.__name__: kind
    for kind in (Router, GroupedRouter, ReluRouter, Sampler, Retrieval, LateInteraction)
}
