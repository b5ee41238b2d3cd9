"""DeepSeek-V3.2 and GLM-5 of `transformers`: caches, prefill, decoding, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsa_compile

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # With fewer heads a row's relus are all off now and then, and its scores tie at zero.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 128,
}
KINDS = {
    "deepseek": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
}


def build(kind: str, **sizes: int) -> Any:
    config, model = (getattr(transformers, name) for name in KINDS[kind])
    torch.manual_seed(0)
    return model(config(**{**SIZES, **sizes})).eval()


def prompt() -> torch.Tensor:
    return torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "cache"), [("deepseek", "dynamic"), ("glm", "static")])
def test_prefill_and_decoding_with_a_cache(kind: str, cache: str) -> None:
    model = build(kind)
    optimized = dsa_compile.optimize(model, config={"require_match": 2})

    def fresh() -> Any:
        if cache == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=32)

    mine, theirs, tokens, graphs = fresh(), fresh(), prompt(), []
    for _ in range(5):
        got = optimized(input_ids=tokens, cache=mine, use_cache=True)
        with torch.no_grad():
            expected = model(input_ids=tokens, cache=theirs, use_cache=True)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
        tokens = expected.logits[:, -1:].argmax(-1)
        graphs.append(optimized.report.graphs)
    assert graphs == [1, 2, 2, 2, 2]
    matched = optimized.report.matched
    assert len(matched) == 4 and {site.heads for site in matched} == {16}
    assert all("modeling_" in site.where for site in matched)

    result = dsa_compile.verify(model, optimized, input_ids=tokens, cache=mine, use_cache=True)
    assert result.rows == result.same_rows == 4 and result.largest_output_difference < 1e-4
    assert mine.get_seq_length() == theirs.get_seq_length() == 16


def test_generation_runs_the_optimised_forward() -> None:
    model = build("deepseek", num_hidden_layers=1)
    optimized = dsa_compile.optimize(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    got = optimized.generate(prompt(), **options)
    assert optimized.report.graphs == 2 and len(optimized.report.matched) == 2
    assert torch.equal(got, model.generate(prompt(), **options))
