"""One call of every canonical op with all its arguments, and some with few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import dsa_compile.kernels  # noqa: F401 (registers the ops)


@dataclass(frozen=True)
class Call:
    """Arguments of one op."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


def calls(
    batch: int = 2, rows: int = 5, n: int = 29, dtype: torch.dtype = torch.float32
) -> list[Call]:
    """Valid calls for the given sizes; ``n`` at least 1."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    heads, dim, block_size, sparse_block = 3, 8, 4, 2
    topk, blocks = min(6, n), -(-n // block_size)
    scores = (
        randn(batch, rows, heads, dim).to(dtype),
        randn(batch, n, dim).to(dtype),
        randn(batch, rows, heads).to(dtype),
    )
    ids = randint(-1, blocks + 1, batch, rows, 3)
    start, end = randint(0, n, batch, rows), randint(0, n + 1, batch, rows)
    common = {
        "scale": 0.5,
        "key_scale": randn(batch, n).abs(),
        "row_start": start,
        "row_end": end,
        "bias": randn(batch, rows, n),
        "mask": randn(batch, rows, n) > -1,
    }
    few = Call("indexer_select", scores, {"topk": topk}, "few")
    candidates = {"block_ids": ids, "block_size": block_size, "anchored": True, "fill": -1e9}
    select = Call("indexer_select", scores, {"topk": topk, **common, **candidates}, "candidates")
    source = {"topk": topk, "block_size": block_size, **common}
    publish = Call("indexer_publish", scores, {"num_blocks": min(2, blocks), **source})
    block_max = Call("indexer_block_max", scores, source)
    shape = {"num_positions": n, "sparse_block": sparse_block}
    expand = Call("candidate_expand", (ids, start, end), {"block_size": block_size, **shape})
    bare = Call("candidate_expand", (ids,), {"block_size": block_size, **shape}, "few")
    op = torch.ops.dsa
    expanded, stop = op.candidate_expand(*expand.args, **expand.kwargs)
    columns = Call("candidate_columns", (expanded, start), {**shape, "anchored": True})
    width = expanded.shape[-1] * sparse_block
    wide = {"bias": randn(batch, rows, width), "mask": randn(batch, rows, width) > -1}
    sparse = Call(
        "sparse_mqa_logits",
        (*scores, expanded, stop),
        {"sparse_block": sparse_block, **common, **wide},
    )
    logits = op.sparse_mqa_logits(*sparse.args, **sparse.kwargs)
    best = Call("topk", (logits, stop), {"topk": 9})
    values, picked = op.topk(logits, stop, topk=topk)
    remap = Call("topk_remap", (values, picked, expanded, start), shape)
    return [few, select, publish, block_max, expand, bare, columns, sparse, best, remap]
