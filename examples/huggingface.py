"""DeepSeek-V3.2 and GLM-5 of `transformers` through dsa_compile.optimize, prefill and decoding.

Both models get tiny random configurations, so nothing is downloaded. The prompt is longer than
`index_topk`, so that the indexers have something to choose. The optimised model compiles at its
first calls (graphs for a prefill without a cache, one with it, and the decoding steps) and must
produce the tokens and logits of the original.

    python examples/huggingface.py [--prompt 96] [--steps 12] [--only GlmMoeDsaForCausalLM]
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

import dsa_compile

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # With fewer heads, rows in which every relu is off are common, and their scores tie at zero.
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "max_position_embeddings": 1024,
}
TOLERANCE = 1e-4


def deepseek() -> tuple[PreTrainedModel, int]:
    """The model and how many of its layers have an indexer."""
    config = DeepseekV32Config(**SIZES)
    return DeepseekV32ForCausalLM(config).eval(), config.num_hidden_layers


def glm() -> tuple[PreTrainedModel, int]:
    """The model and how many of its layers have an indexer: the third reuses the second's picks."""
    types = ["full", "full", "shared", "full"]
    config = GlmMoeDsaConfig(**SIZES, indexer_types=types)
    return GlmMoeDsaForCausalLM(config).eval(), types.count("full")


CASES = {"DeepseekV32ForCausalLM": deepseek, "GlmMoeDsaForCausalLM": glm}


def run(model: Any, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the prompt [B, S, V], then of greedy decoding [steps, B, V], and its tokens."""
    prefill = model(input_ids=prompt, use_cache=False).logits
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return prefill, torch.stack(out.logits), out.sequences[:, prompt.shape[1] :]


def compare(
    name: str, make: Callable[[], tuple[PreTrainedModel, int]], prompt: int, steps: int
) -> bool:
    console = Console()
    console.rule(name)
    torch.manual_seed(0)
    model, indexers = make()
    ids = torch.randint(SIZES["vocab_size"], (2, prompt))
    optimized = dsa_compile.optimize(model)
    with torch.inference_mode():
        *logits, tokens = run(model, ids, steps)
        *new_logits, new_tokens = run(optimized, ids, steps)
    console.print(optimized.report)

    fused: dict[int, int] = {}
    for site in optimized.report.sites:
        fused[site.graph] = fused.get(site.graph, 0) + (site.status == "fused")
    matched = bool(fused) and all(count == indexers for count in fused.values())
    difference = max(float((a - b).abs().max()) for a, b in zip(logits, new_logits, strict=True))
    same = bool((tokens == new_tokens).all())
    console.print(
        f"{indexers} indexers; matched in each of {len(fused)} graphs: {list(fused.values())}\n"
        f"{steps} greedy tokens of 2 prompts equal: {same}\n"
        f"largest difference of the logits: {difference:.1e}"
    )
    return matched and same and difference <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=CASES, help="one of the two models")
    options = parser.parse_args()
    names = [options.only] if options.only else list(CASES)
    passed = [compare(name, CASES[name], options.prompt, options.steps) for name in names]
    if not all(passed):
        print("an indexer was left as it was, or the outputs differ", file=sys.stderr)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
