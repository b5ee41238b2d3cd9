"""The consumer layer that the GPU benchmarks time, its peers, and their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dsa_compile.cost import CEILINGS, crossover
from dsa_compile.kernels import deep_package
from dsa_compile.kernels.deep_dense import dense_scores
from dsa_compile.kernels.triton_choice import select_columns
from dsa_compile.kernels.triton_expand import candidate_expand

FP8 = torch.float8_e4m3fn
DIM, BLOCK, CANDIDATES, TOPK = 128, 8, 2048, 512


@dataclass(frozen=True)
class Problem:
    """Operands of one layer: q [1, S, H, D], k [1, T, D], weights fp32, key scales for fp8."""

    q: Tensor
    k: Tensor
    weights: Tensor
    key_scale: Tensor | None

    @staticmethod
    def draw(rows: int, heads: int, positions: int, dtype: torch.dtype) -> Problem:
        scale = torch.rand(1, positions, device="cuda") if dtype == FP8 else None
        return Problem(
            torch.randn(1, rows, heads, DIM, device="cuda").to(dtype),
            torch.randn(1, positions, DIM, device="cuda").to(dtype),
            torch.randn(1, rows, heads, device="cuda"),
            scale,
        )


def random_blocks(rows: int, positions: int, count: int = CANDIDATES) -> Tensor:
    """Published ids [1, S, C] int32 in no order, other ones in every row."""
    total = positions // BLOCK
    count = min(count, total)
    sizes = [256] * (rows // 256) + [rows % 256] * (rows % 256 > 0)
    draws = [torch.rand(n, total, device="cuda").topk(count).indices for n in sizes]
    return torch.cat(draws)[None].int()


def dense_form(p: Problem, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A consumer layer as models write it: every position scored, then masked."""
    product = torch.einsum("bshd,btd->bsht", p.q, p.k).relu()
    scores = torch.einsum("bsht,bsh->bst", product.float(), p.weights)
    return masked_topk(scores, ids)


def masked_topk(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The best positions [1, S, k] of scores [1, S, T] inside candidate blocks."""
    positions = scores.shape[-1]
    keep = torch.zeros(*ids.shape[:2], positions // BLOCK, dtype=torch.bool, device="cuda")
    keep = keep.scatter(-1, ids.long(), True).repeat_interleave(BLOCK, -1)
    values, indices = scores.masked_fill(~keep, -torch.inf).topk(TOPK)
    return values, indices


def dense_below(p: Problem) -> int:
    """The crossover that a compiled model would take for these operands."""
    return crossover(
        CEILINGS["sm90"],
        columns=CANDIDATES * BLOCK,
        heads=p.q.shape[2],
        head_dim=DIM,
        itemsize=p.q.dtype.itemsize,
    )


def consumer(p: Problem, ids: Tensor, below: int | None = None) -> tuple[Tensor, Tensor]:
    """The same layer on the kernels, as a rewritten model runs it."""
    blocks, end = candidate_expand(
        ids, num_positions=p.k.shape[1], block_size=BLOCK, sparse_block=BLOCK
    )
    return select_columns(
        p.q,
        p.k,
        p.weights,
        blocks,
        end,
        topk=TOPK,
        sparse_block=BLOCK,
        key_scale=p.key_scale,
        dense_below=dense_below(p) if below is None else below,
    )


def deep_gemm_scores(p: Problem) -> Callable[[], Tensor] | None:
    """DeepGEMM's dense fp8 scores of the same problem, where it is installed."""
    if p.q.dtype != FP8:
        return None
    package = deep_package.find()
    if not isinstance(package, deep_package.DeepGemm):
        return None

    def score() -> Tensor:
        return dense_scores(p.q, p.k, p.weights, key_scale=p.key_scale, package=package).logits

    return score


def deep_gemm_layer(p: Problem, ids: Tensor) -> Callable[[], Any] | None:
    """DeepGEMM's dense scores, the candidate mask and torch.topk."""
    score = deep_gemm_scores(p)
    return None if score is None else lambda: masked_topk(score(), ids)


class Results:
    """Rows of the table, printed as they come."""

    def __init__(self) -> None:
        self.table = Table(title=torch.cuda.get_device_name())
        for name in ("work", "ms", "rate", "peer", "peer ms", "times faster"):
            self.table.add_column(name, justify="left" if name in ("work", "peer") else "right")

    def add(
        self,
        work: str,
        ms: float | None,
        rate: str = "",
        peer: str = "",
        peer_ms: float | None = None,
    ) -> None:
        faster = "" if peer_ms is None or ms is None else f"{peer_ms / ms:.2f}"
        theirs = "" if peer_ms is None else f"{peer_ms:.4f}"
        self.table.add_row(work, "" if ms is None else f"{ms:.4f}", rate, peer, theirs, faster)
