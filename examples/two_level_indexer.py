"""A two-level sparse attention model in plain PyTorch, before and after dsa_compile.optimize.

The model is a small DeepSeek-V4.1: one source layer scores all positions and publishes its best
2,048 blocks of 8; four consumer layers score the source's keys with queries and head weights of
their own and may select from those blocks alone. Indexer sizes are the released ones (32 heads of
128, top-512), everything else is small. It is written as such models are: every layer scores all
positions, masks what it may not see, and takes the top 512.

    python examples/two_level_indexer.py [--positions 65536] [--rows 256]

runs one chunk of a chunked prefill: `rows` new tokens behind `positions - rows` cached ones.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measure import Cost, cost, in_own_process, report_to_parent
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dsa_compile

NEG, POS = float("-inf"), float("inf")


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 5  # the first is the source, the others are consumers
    vocab: int = 1024
    hidden: int = 256
    q_rank: int = 128
    attention_heads: int = 4
    latent: int = 64
    index_heads: int = 32
    index_dim: int = 128
    index_rope: int = 64
    index_topk: int = 512
    wide_products: bool = True  # multiply in fp32, whatever the dtype of queries and keys
    block_size: int = 8
    candidate_blocks: int = 2048


def rope(x: Tensor, start: int) -> Tensor:
    """Interleaved rotary embedding of [B, S, ..., R], for positions start .. start + S - 1."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(start, start + x.shape[1], device=x.device), freqs)
    angles = angles.view(1, x.shape[1], *[1] * (x.dim() - 3), half)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    """Selects positions for one layer: indices [B, S, k] (int64, -1 where a row found nothing)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(config.q_rank, config.index_heads * config.index_dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden, config.index_heads, bias=False)
        self.scale = config.index_dim**-0.5 * config.index_heads**-0.5

    def forward(
        self, x: Tensor, q_latent: Tensor, keys: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        positions = keys.shape[1]
        logits, lengths = self.score(x, q_latent, keys)
        published = None
        if candidates is None:
            published = self.publish(logits, lengths)
        else:
            logits = logits.masked_fill(~candidates, NEG)
        picks = logits.topk(min(self.config.index_topk, positions), dim=-1, sorted=False).indices
        picks = picks.sort(dim=-1).values
        return torch.where(picks < lengths, picks, -1), published

    def score(self, x: Tensor, q_latent: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, S, T], -inf where a row may not look, and the rows' lengths [S, 1]."""
        c = self.config
        rows, positions = x.shape[1], keys.shape[1]
        start = positions - rows
        q = self.wq_b(q_latent).unflatten(-1, (c.index_heads, c.index_dim))
        plain, turning = q.split([c.index_dim - c.index_rope, c.index_rope], dim=-1)
        q = torch.cat([plain, rope(turning, start)], dim=-1)
        weights = self.weights_proj(x).float() * self.scale

        if c.wide_products:
            q, keys = q.float(), keys.float()
        logits = torch.einsum("bshd,btd->bsht", q, keys)
        logits = (logits.relu_() * weights.unsqueeze(-1)).sum(dim=2)
        lengths = torch.arange(start + 1, positions + 1, device=x.device).unsqueeze(-1)
        hidden = torch.arange(positions, device=x.device) >= lengths
        return logits.masked_fill(hidden, NEG), lengths

    def publish(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """The positions of each row's best blocks, the newest among them: bool [B, S, T]."""
        c = self.config
        positions = logits.shape[-1]
        padded = F.pad(logits, (0, -positions % c.block_size), value=NEG)
        scores = padded.unflatten(-1, (-1, c.block_size)).amax(dim=-1)
        blocks = scores.shape[-1]
        newest = torch.arange(blocks, device=logits.device) == (lengths - 1) // c.block_size
        scores = scores.masked_fill(newest, POS)
        top = scores.topk(min(c.candidate_blocks, blocks), dim=-1)
        keep = torch.zeros_like(scores, dtype=torch.bool)
        keep = keep.scatter_(-1, top.indices, top.values > NEG)
        return keep.repeat_interleave(c.block_size, dim=-1)[..., :positions]


class Layer(nn.Module):
    """Attention over the selected positions of a latent cache, which serves as keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden)
        self.wq_a = nn.Linear(config.hidden, config.q_rank, bias=False)
        self.wq_b = nn.Linear(config.q_rank, config.attention_heads * config.latent, bias=False)
        self.wkv = nn.Linear(config.hidden, config.latent, bias=False)
        self.wo = nn.Linear(config.attention_heads * config.latent, config.hidden, bias=False)
        self.indexer = Indexer(config)

    def forward(
        self, x: Tensor, cache: Tensor, keys: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        c = self.config
        h = self.norm(x)
        q_latent = self.wq_a(h)
        picks, published = self.indexer(h, q_latent, keys, candidates)
        q = self.wq_b(q_latent).unflatten(-1, (c.attention_heads, c.latent))
        kv = torch.cat([cache, self.wkv(h)], dim=1)
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        chosen = kv[batch, picks.clamp(min=0)]
        scores = torch.einsum("bshc,bskc->bshk", q, chosen) * c.latent**-0.5
        scores = scores.masked_fill((picks < 0).unsqueeze(2), NEG)
        out = torch.einsum("bshk,bskc->bshc", scores.softmax(dim=-1), chosen)
        return x + self.wo(out.flatten(-2)), published


class TwoLevelModel(nn.Module):
    """Tokens [B, S] behind a cache of T - S positions -> logits [B, S, vocab]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.key_proj = nn.Linear(config.hidden, config.index_dim, bias=False)
        self.key_norm = nn.RMSNorm(config.index_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, key_cache: Tensor, latent_cache: Tensor) -> Tensor:
        """key_cache [B, T - S, index_dim], latent_cache [layers, B, T - S, latent]."""
        c = self.config
        x = self.embed(tokens)
        new = self.key_norm(self.key_proj(x))
        plain, turning = new.split([c.index_dim - c.index_rope, c.index_rope], dim=-1)
        new = torch.cat([plain, rope(turning, key_cache.shape[1])], dim=-1)
        keys = torch.cat([key_cache, new], dim=1)
        candidates = None
        for number, layer in enumerate(self.layers):
            x, published = layer(x, latent_cache[number], keys, candidates)
            candidates = candidates if published is None else published
        return self.head(self.norm(x))


def build(
    positions: int, rows: int, config: ModelConfig | None = None
) -> tuple[TwoLevelModel, tuple[Tensor, ...]]:
    """A model with random weights and one chunk of a prefill for it."""
    torch.manual_seed(0)
    config = config or ModelConfig()
    model = TwoLevelModel(config).eval()
    cached = positions - rows
    inputs = (
        torch.randint(config.vocab, (1, rows)),
        F.rms_norm(torch.randn(1, cached, config.index_dim), (config.index_dim,)),
        torch.randn(config.layers, 1, cached, config.latent),
    )
    return model, inputs


def measure_child(variant: str, positions: int, rows: int, config: ModelConfig) -> None:
    model, inputs = build(positions, rows, config)
    call: nn.Module = model
    with torch.inference_mode():
        if variant == "optimized":
            call = dsa_compile.optimize(model, example_inputs=inputs)
        report_to_parent(cost(lambda: call(*inputs)))


def costs_table(original: Cost, optimized: Cost) -> Table:
    table = Table(title="one chunk, each in its own process")
    for column in ("", "time", "peak memory"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("original", f"{original.seconds:.2f} s", original.peak)
    table.add_row("optimized", f"{optimized.seconds:.2f} s", optimized.peak)
    if original.peak_bytes and optimized.peak_bytes:
        share = f"{original.peak_bytes / optimized.peak_bytes:.1f} x less"
    else:
        share = ""
    table.add_row("", f"{original.seconds / optimized.seconds:.1f} x faster", share)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--positions", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--layers", type=int, default=ModelConfig.layers)
    parser.add_argument("--child", choices=("original", "optimized"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = ModelConfig(layers=options.layers)
    if options.child:
        measure_child(options.child, options.positions, options.rows, config)
        return

    # Piped output has no width of its own: give the tables room.
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(f"{options.rows} query rows, {options.positions:,} positions, fp32 on CPU")
    model, inputs = build(options.positions, options.rows, config)
    with torch.inference_mode():
        optimized = dsa_compile.optimize(model, example_inputs=inputs)
        console.print(optimized.report)
        console.print(dsa_compile.verify(model, optimized, *inputs))
    sizes = ["--positions", str(options.positions), "--rows", str(options.rows)]
    sizes += ["--layers", str(options.layers)]
    before, after = (
        in_own_process(__file__, ["--child", name, *sizes]) for name in ("original", "optimized")
    )
    console.print(costs_table(before, after))


if __name__ == "__main__":
    main()
