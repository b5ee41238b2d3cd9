"""DeepSeek-V3.2 and GLM-5 of `transformers` through the backend: prefill, then 64 steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_compile

from .test_huggingface import build, prompt, transformers

STEPS = 64


PAIRS = [("deepseek", "static"), ("glm", "dynamic")]
if os.environ.get("DSA_EVERY_HOST"):
    # The other two go the same ways, and take as long.
    PAIRS += [("deepseek", "dynamic"), ("glm", "static")]


@pytest.mark.parametrize(("kind", "cache"), PAIRS)
@torch.no_grad()
def test_prefill_and_decoding(without_codegen: list[fx.GraphModule], kind: str, cache: str) -> None:
    model = build(kind, num_hidden_layers=2)
    counter = CompileCounterWithBackend("dsa")
    run = torch.compile(model, backend=counter)

    def fresh() -> Any:
        if cache == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=STEPS + 16)

    mine, theirs, tokens, counts = fresh(), fresh(), prompt(), []
    for _ in range(1 + STEPS):
        got = run(input_ids=tokens, cache=mine, use_cache=True)
        expected = model(input_ids=tokens, cache=theirs, use_cache=True)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
        tokens = expected.logits[:, -1:].argmax(-1)
        counts.append(counter.frame_count)
    # A growing cache is seen to grow once; a static one has one size.
    assert counts[-1] == (3 if cache == "dynamic" else 2) and counts[3] == counts[-1]
    report = dsa_compile.compiled_report(model)
    assert report.graphs == counter.frame_count and len(report.matched) == 2 * report.graphs
    assert all("modeling_" in site.where for site in report.matched)
    assert mine.get_seq_length() == theirs.get_seq_length()
