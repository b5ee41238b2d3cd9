"""Decoding steps of the two-level example on a GPU: eager, compiled, and through backend="dsa".

A step scores `rows` new tokens of one sequence (drafted tokens, say) against `positions` cached
ones. Keys and latents lie in buffers of the model that each step writes into, as serving engines
keep them. Indexer sizes are the released ones (32 heads of 128, 2,048 candidate blocks of 8,
top-512), bf16. Times are medians by device events around a step, host included; launches are
kernels and graphs that the host launches in a step.

    python benchmarks/decode.py [--positions 131072 1048576] [--rows 1 8 64] [--budget 180]

No case is begun after `--budget` seconds; what is missing says so. `--check` exits 1 where the
backend with graphs is not the fastest, or wins by less than 5 x over torch.compile at 1,048,576.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dsa_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from two_level_indexer import Layer, ModelConfig, TwoLevelModel, rope  # noqa: E402

VARIANTS: dict[str, dict[str, str] | None] = {
    "eager": None,
    "compiled": {"backend": "inductor"},
    "compiled, graphs": {"backend": "inductor", "mode": "reduce-overhead"},
    "dsa": {"backend": "dsa"},
    "dsa, graphs": {"backend": "dsa", "mode": "reduce-overhead"},
}
FASTEST, PLAIN, LONG, LEAST = "dsa, graphs", "compiled", 1 << 20, 5.0
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


class Decoder(nn.Module):
    """Tokens [1, S] at the end of buffers of T positions -> logits [1, S, vocab].

    Each layer has a buffer of its own: torch.compile would copy all of one that they share.
    """

    keys: Tensor

    def __init__(self, config: ModelConfig, positions: int) -> None:
        super().__init__()
        self.model = TwoLevelModel(config)
        self.keys = nn.Buffer(torch.randn(1, positions, config.index_dim))
        for number in range(config.layers):
            latents = torch.randn(1, positions, config.latent)
            self.register_buffer(f"latents_{number}", latents)

    def forward(self, tokens: Tensor) -> Tensor:
        m = self.model
        c, rows = m.config, tokens.shape[1]
        start = self.keys.shape[1] - rows
        x = m.embed(tokens)
        new = m.key_norm(m.key_proj(x))
        plain, turning = new.split([c.index_dim - c.index_rope, c.index_rope], dim=-1)
        self.keys[:, start:] = torch.cat([plain, rope(turning, start)], dim=-1)
        candidates = None
        for number, layer in enumerate(m.layers):
            assert isinstance(layer, Layer)
            latents = self.get_buffer(f"latents_{number}")
            x, published = self.attend(layer, x, latents, candidates)
            candidates = candidates if published is None else published
        return m.head(m.norm(x))

    def attend(
        self, layer: Layer, x: Tensor, latents: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer of the example, on a buffer that it writes its latents into."""
        c, h = layer.config, layer.norm(x)
        q_latent = layer.wq_a(h)
        picks, published = layer.indexer(h, q_latent, self.keys, candidates)
        latents[:, latents.shape[1] - x.shape[1] :] = layer.wkv(h)
        q = layer.wq_b(q_latent).unflatten(-1, (c.attention_heads, c.latent))
        chosen = latents[0, picks.clamp(min=0)]
        scores = torch.einsum("bshc,bskc->bshk", q, chosen) * c.latent**-0.5
        scores = scores.masked_fill((picks < 0).unsqueeze(2), float("-inf"))
        out = torch.einsum("bshk,bskc->bshc", scores.softmax(dim=-1), chosen)
        return x + layer.wo(out.flatten(-2)), published


def milliseconds(step: Callable[[], object], device: str, runs: int = 30) -> float:
    """Median time of a step, by device events or the clock of the CPU."""
    for _ in range(3):
        step()
    if device == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        return median(times)
    torch.cuda.synchronize()
    pairs = []
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        pairs.append((start, stop))
    return median(start.elapsed_time(stop) for start, stop in pairs)


def launches(step: Callable[[], object], device: str) -> int:
    """Kernels and graphs that the host launches in a step."""
    if device == "cpu":
        return 0
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.key.startswith(LAUNCHES))


def measure(decoder: Decoder, tokens: Tensor, name: str, device: str) -> tuple[float, int, Tensor]:
    torch._dynamo.reset()
    options = VARIANTS[name]
    run = decoder if options is None else torch.compile(decoder, fullgraph=True, **options)  # type: ignore[call-overload]

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: Tensor = run(tokens)
        return result

    with torch.inference_mode():
        took = milliseconds(step, device)
        return took, launches(step, device), step().float().clone()


def table(results: dict[tuple[int, int], dict[str, tuple[float, int]]]) -> Table:
    shown = Table(title="a decoding step: ms (launches)")
    for column in ("positions", "rows", *VARIANTS, "dsa graphs against compiled"):
        shown.add_column(column, justify="right")
    for (positions, rows), found in results.items():
        cells = [f"{ms:.3f} ({n})" for ms, n in found.values()]
        cells += ["-"] * (len(VARIANTS) - len(found))
        whole = FASTEST in found and PLAIN in found
        gain = f"{found[PLAIN][0] / found[FASTEST][0]:.1f} x" if whole else "-"
        shown.add_row(f"{positions:,}", str(rows), *cells, gain)
    return shown


def faults(results: dict[tuple[int, int], dict[str, tuple[float, int]]]) -> list[str]:
    """What does not hold of what the benchmark is to show."""
    found = []
    for (positions, rows), times in results.items():
        where = f"{positions:,} positions, {rows} rows"
        if set(times) != set(VARIANTS):
            found.append(f"{where}: {len(VARIANTS) - len(times)} variants were not measured")
            continue
        if min(times, key=lambda name: times[name][0]) != FASTEST:
            found.append(f"{where}: {FASTEST!r} is not the fastest")
        if positions >= LONG and times[PLAIN][0] < LEAST * times[FASTEST][0]:
            found.append(f"{where}: less than {LEAST:g} x over torch.compile")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--positions", type=int, nargs="+", default=[1 << 17, 1 << 20])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--layers", type=int, default=ModelConfig.layers)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 160)
    config = ModelConfig(layers=options.layers)
    results: dict[tuple[int, int], dict[str, tuple[float, int]]] = {}
    for positions in options.positions:
        torch.manual_seed(0)
        with torch.device(options.device):
            decoder = Decoder(config, positions).to(torch.bfloat16).eval()
        for rows in options.rows:
            found = results.setdefault((positions, rows), {})
            tokens = torch.randint(config.vocab, (1, rows), device=options.device)
            expected = None
            for name in VARIANTS:
                if time.monotonic() - begun > options.budget:
                    break
                took, count, logits = measure(decoder, tokens, name, options.device)
                found[name] = took, count
                expected = logits if expected is None else expected
                difference = float((logits - expected).abs().max())
                console.print(
                    f"{positions:,} x {rows} {name}: {took:.3f} ms, off by {difference:.1e}"
                )
            report = dsa_compile.compiled_report(decoder)
            console.print(f"{report.summary()}; breaks: {[n for n in report.notes if 'CUDA' in n]}")
        del decoder
    console.print(table(results))
    wrong = faults(results) if options.check else []
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
