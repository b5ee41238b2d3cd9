"""Models that decode at the end of a long static cache, and ones that differ from an indexer."""

from __future__ import annotations

import torch
from pass_models import NEG
from torch import Tensor, nn

HEADS, DIM, WIDTH, BLOCK, BLOCKS, TOPK = 8, 16, 24, 8, 512, 64


def tokens(rows: int, batch: int = 1, device: str = "meta") -> Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(batch, rows, WIDTH, generator=made).to(device)


class Decoding(nn.Module):
    """A source and a consumer over S tokens at the end of a buffer of T keys."""

    def __init__(self, positions: int, batch: int = 1, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(device):
            self.wq = nn.ModuleList(nn.Linear(WIDTH, HEADS * DIM) for _ in range(2))
            self.ww = nn.ModuleList(nn.Linear(WIDTH, HEADS) for _ in range(2))
            self.keys = nn.Buffer(torch.randn(batch, positions, DIM))
            self.segments = nn.Buffer(torch.zeros(batch, positions, dtype=torch.int64))
        self.positions, self.blocks = positions, BLOCKS

    def grid(self, size: int) -> Tensor:
        return torch.arange(size, device=self.keys.device)

    def ends(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        return (self.grid(rows) + (self.positions - rows + 1)).unsqueeze(-1)

    def visible(self, x: Tensor) -> Tensor:
        return self.grid(self.positions) < self.ends(x)

    def activate(self, parts: Tensor) -> Tensor:
        return parts.relu()

    def scores(self, x: Tensor, layer: int) -> Tensor:
        q = self.wq[layer](x).unflatten(-1, (HEADS, DIM))
        s = self.activate(torch.einsum("bshd,btd->bsht", q, self.keys))
        return (s * self.ww[layer](x).unsqueeze(-1)).sum(2)

    def publish(self, x: Tensor, scores: Tensor) -> Tensor:
        """Ids of the best blocks, -1 where a row sees fewer."""
        short = -self.positions % BLOCK
        parts = nn.functional.pad(scores, (0, short), value=NEG).unflatten(-1, (-1, BLOCK))
        best = parts.amax(-1)
        newest = self.grid(best.shape[-1]) == (self.ends(x) - 1) // BLOCK
        top = best.masked_fill(newest, float("inf")).topk(self.blocks, dim=-1)
        return top.indices.masked_fill(top.values == NEG, -1)

    def candidates(self, ids: Tensor) -> Tensor:
        count = -(-self.positions // BLOCK)
        at = ids.masked_fill(ids < 0, count)
        table = torch.zeros(*ids.shape[:-1], count + 1, dtype=torch.bool, device=ids.device)
        table = table.scatter(-1, at, True)[..., :count]
        return table.repeat_interleave(BLOCK, dim=-1)[..., : self.positions]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = ~self.visible(x)
        first = self.scores(x, 0).masked_fill(hidden, NEG)
        keep = self.candidates(self.publish(x, first))
        second = self.scores(x, 1).masked_fill(hidden, NEG).masked_fill(~keep, NEG)
        return self.picks(first), self.picks(second)

    def picks(self, scores: Tensor) -> Tensor:
        values, indices = scores.topk(TOPK, dim=-1)
        return indices.masked_fill(values == NEG, -1)


class Gelu(Decoding):
    def activate(self, parts: Tensor) -> Tensor:
        return nn.functional.gelu(parts)


class NearMisses(Decoding):
    """A proper source; consumers whose masks are not the candidates that it published."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = ~self.visible(x)
        first = self.scores(x, 0).masked_fill(hidden, NEG)
        ids = self.publish(x, first)
        out = [self.picks(first)]
        for layer, name in enumerate(NEAR_MISSES):
            scores = self.scores(x * (2.0 + layer), 1).masked_fill(hidden, NEG)
            out.append(self.picks(scores.masked_fill(~getattr(self, name)(ids), NEG)))
        return tuple(out)

    def inverted(self, ids: Tensor) -> Tensor:
        return ~self.candidates(ids)

    def last_position(self, ids: Tensor) -> Tensor:
        return self.candidates(ids) | (self.grid(self.positions) >= self.positions - 1)

    def last_position_left_out(self, ids: Tensor) -> Tensor:
        """Candidates by position, the last of all left out."""
        at = ids.unsqueeze(-1) * BLOCK + self.grid(BLOCK)
        at = torch.where((at < 0) | (at >= self.positions - 1), self.positions, at).flatten(-2)
        flags = torch.zeros(
            *ids.shape[:-1], self.positions + 1, dtype=torch.bool, device=ids.device
        )
        return flags.scatter(-1, at, True)[..., : self.positions]

    def far_out(self, ids: Tensor) -> Tensor:
        """One position, at no extent, is let through."""
        return self.candidates(ids) | (self.grid(self.positions) == 700_001)

    def far_out_by_tensor(self, ids: Tensor) -> Tensor:
        far = torch.full((), 700_001.0, device=ids.device)
        return self.candidates(ids) | (self.grid(self.positions).float() == far)

    def last_row(self, ids: Tensor) -> Tensor:
        """The last of 64 rows may look anywhere."""
        return self.candidates(ids) | (self.grid(ids.shape[1]) == 63).unsqueeze(-1)

    def bent(self, ids: Tensor) -> Tensor:
        """Lets through what lies below the root of the length, which no small size shows."""
        grid = self.grid(self.positions)
        return self.candidates(ids) | ((grid * grid < self.positions) & (grid > 1000))

    def half(self, ids: Tensor) -> Tensor:
        """The second half of the positions is let through."""
        return self.candidates(ids) | (self.grid(self.positions) >= self.positions // 2)


NEAR_MISSES = {
    "inverted": "not membership",
    "last_position": "not membership",
    "last_position_left_out": "single positions",
    "far_out": "700,001 lies at no size of the graph",
    "far_out_by_tensor": "700,001 lies at no size of the graph",
    "last_row": "not membership",
    "bent": "mul does not grow in proportion to sizes",
    "half": "524,288 lies at no size of the graph",
}


class Shifted(Decoding):
    """Published blocks begin at position 1."""

    def publish(self, x: Tensor, scores: Tensor) -> Tensor:
        return super().publish(x, nn.functional.pad(scores[..., 1:], (0, 1), value=NEG))


class OtherNewest(Decoding):
    """Pins the block before the newest where a row has begun a block with one position."""

    def publish(self, x: Tensor, scores: Tensor) -> Tensor:
        best = scores.unflatten(-1, (-1, BLOCK)).amax(-1)
        newest = self.grid(best.shape[-1]) == (self.ends(x) - 2) // BLOCK
        top = best.masked_fill(newest, float("inf")).topk(self.blocks, dim=-1)
        return top.indices.masked_fill(top.values == NEG, -1)


class Window(Decoding):
    """Rows see a window of a size that happens to lie at the number of positions."""

    def __init__(self, positions: int, window: int) -> None:
        super().__init__(positions, device="cpu")
        self.window = window

    def visible(self, x: Tensor) -> Tensor:
        return super().visible(x) & (self.grid(self.positions) >= self.ends(x) - self.window)


class Segments(Decoding):
    """Rows see their own segment alone: a mask that is no bound."""

    def visible(self, x: Tensor) -> Tensor:
        mine = self.segments[:, self.positions - x.shape[1] :].unsqueeze(-1)
        return super().visible(x) & (self.segments.unsqueeze(-2) == mine)
