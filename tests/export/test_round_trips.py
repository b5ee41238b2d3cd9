"""The two-level example and the two models of ``transformers``: out to a file and back."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import two_level_indexer as example  # noqa: E402

SMALL = example.ModelConfig(
    layers=2,
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
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
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
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 128,
}


def through_a_file(program: Any) -> Any:
    """What a program is after it was saved, loaded, and decomposed."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).run_decompositions().module()


def test_the_two_level_example_at_other_lengths() -> None:
    model, inputs = example.build(203, 24, SMALL)
    program = dsa_compile.export(model, inputs, config={"require_match": 2})
    run = through_a_file(program)
    with torch.no_grad():
        for positions, rows in ((203, 24), (333, 17)):
            _, args = example.build(positions, rows, SMALL)
            torch.testing.assert_close(run(*args), model(*args))


def test_the_two_level_example_unflattens() -> None:
    model, inputs = example.build(203, 24, SMALL)
    program = dsa_compile.export(model, inputs, config={"dynamic": False, "require_match": 2})
    unflat = torch.export.unflatten(program)
    assert {name for name, _ in model.named_modules()} <= {n for n, _ in unflat.named_modules()}
    with torch.no_grad():
        torch.testing.assert_close(unflat(*inputs), model(*inputs))


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_models_of_transformers_at_other_lengths(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    def tokens(rows: int) -> torch.Tensor:
        return torch.randint(2, 60, (1, rows), generator=torch.Generator().manual_seed(rows))

    arguments = {"input_ids": tokens(21), "use_cache": False}
    program = dsa_compile.export(model, (), arguments, config={"require_match": 1})
    assert dsa_compile.report_of(program).notes == ()
    run = through_a_file(program)
    with torch.no_grad():
        for rows in (21, 34):
            call = {**arguments, "input_ids": tokens(rows)}
            got, expected = run(**call).logits, model(**call).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_object_is_told_with_what_to_do() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV32Config(**SIZES)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    arguments = {
        "input_ids": torch.randint(2, 60, (1, 12)),
        "cache": transformers.DynamicCache(config=config),
        "use_cache": True,
    }
    with pytest.raises(dsa_compile.CaptureError) as fault:
        dsa_compile.export(model, (), arguments)
    text = str(fault.value)
    assert "DynamicCache" in text and "register_pytree_node" in text
    assert "dsa_compile.optimize" in text
