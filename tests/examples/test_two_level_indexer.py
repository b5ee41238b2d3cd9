"""The two-level example: what its plain form means, and that optimising it keeps that."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_compile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import two_level_indexer as example  # noqa: E402

SMALL = example.ModelConfig(
    vocab=64,
    hidden=32,
    q_rank=16,
    attention_heads=2,
    latent=16,
    index_heads=16,
    index_dim=32,
    index_rope=16,
    index_topk=24,
    block_size=8,
    candidate_blocks=8,
)


def test_consumers_pick_from_published_blocks_alone() -> None:
    torch.manual_seed(1)
    config = SMALL
    indexer = example.Indexer(config).eval()
    x, q_latent = torch.randn(2, 9, config.hidden), torch.randn(2, 9, config.q_rank)
    keys = torch.randn(2, 203, config.index_dim)
    with torch.inference_mode():
        _, published = indexer(x, q_latent, keys, None)
        picks, _ = indexer(x.flip(0), q_latent.flip(0), keys, published)
    assert published.sum(-1).max() <= config.candidate_blocks * config.block_size
    assert (picks >= 0).all()
    assert published.gather(-1, picks).all()
    assert (picks <= torch.arange(203 - 9, 203)[:, None]).all()


def check_sites(optimized: dsa_compile.OptimizedModule, consumers: int) -> None:
    sites = optimized.report.sites
    assert [s.kind for s in sites] == ["source"] + ["consumer"] * consumers
    assert [s.status for s in sites] == ["fused"] + ["rewritten"] * consumers
    sizes = {(s.heads, s.head_dim, s.k) for s in sites}
    assert sizes == {(SMALL.index_heads, SMALL.index_dim, SMALL.index_topk)}
    assert {s.block_size for s in sites[1:]} == {SMALL.block_size}
    assert all(any("the query side is one op" in n for n in s.notes) for s in sites)


def test_one_capture_serves_all_lengths() -> None:
    config = dataclasses.replace(SMALL, layers=3)
    model, inputs = example.build(304, 17, config)
    with torch.inference_mode():
        optimized = dsa_compile.optimize(model, example_inputs=inputs)
        check_sites(optimized, consumers=2)
        for positions, rows in ((304, 17), (320, 5), (256, 40)):
            _, other = example.build(positions, rows, config)
            torch.testing.assert_close(optimized(*other), model(*other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions, rows", [(129, 129), (200, 1)], ids=["prefill", "decode"])
def test_static_sizes(positions: int, rows: int) -> None:
    config = dsa_compile.Config(dynamic=False)
    model, inputs = example.build(positions, rows, dataclasses.replace(SMALL, layers=2))
    with torch.inference_mode():
        optimized = dsa_compile.optimize(model, example_inputs=inputs, config=config)
        check_sites(optimized, consumers=1)
        torch.testing.assert_close(optimized(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_backend_compiles_prefill_and_decoding_once_each() -> None:
    """A prefill, then 64 steps of one token behind a growing cache, through backend="dsa"."""
    config, steps = dataclasses.replace(SMALL, layers=3), 64
    model, (tokens, keys, latents) = example.build(304, 17, config)
    # Rows as continued by a cache: keys and latents of 64 further positions.
    more_keys = torch.randn(1, steps, config.index_dim)
    more_latents = torch.randn(config.layers, 1, steps, config.latent)
    counter = CompileCounterWithBackend("dsa")
    run = torch.compile(model, backend=counter)
    torch.testing.assert_close(run(tokens, keys, latents), model(tokens, keys, latents))
    compiled = []
    for step in range(1, steps):
        context = (torch.cat((keys, more_keys[:, :step]), 1),)
        context += (torch.cat((latents, more_latents[:, :, :step]), 2),)
        token = tokens[:, step % 17][:, None]
        torch.testing.assert_close(run(token, *context), model(token, *context))
        compiled.append(counter.frame_count)
    assert compiled[-1] <= 3 and compiled[2] == compiled[-1]
    report = dsa_compile.compiled_report(model)
    assert len(report.matched) == 3 * counter.frame_count == len(report.sites)
    fused = [s for s in report.sites if any("the query side is one op" in n for n in s.notes)]
    assert fused == list(report.sites)


@torch.no_grad()
def test_the_backend_decodes_behind_static_caches() -> None:
    """A prefill, then 64 steps of one token, behind caches of one length that are moved along."""
    config, steps = dataclasses.replace(SMALL, layers=3), 64
    model, (tokens, keys, latents) = example.build(304, 17, config)
    counter = CompileCounterWithBackend("dsa")
    run = torch.compile(model, backend=counter)
    torch.testing.assert_close(run(tokens, keys, latents), model(tokens, keys, latents))
    held = [
        torch.cat((cache, torch.randn_like(cache[..., :16, :])), -2) for cache in (keys, latents)
    ]
    for step in range(steps):
        for cache in held:
            cache.copy_(cache.roll(-1, -2))
            cache[..., -1, :] = torch.randn_like(cache[..., -1, :])
        token = tokens[:, step % 17][:, None]
        torch.testing.assert_close(run(token, *held), model(token, *held))
    assert counter.frame_count == 2
    report = dsa_compile.compiled_report(model)
    assert len(report.matched) == 2 * 3 == len(report.sites)
