"""The blocks that a row may select from, a bit each: the candidate mask of the dense form."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_expand import set_bits
from .triton_tools import bound, by_row, power_of_two, wrap_triton
from .validate import Size

_AT_ONCE = 1024


class BlockFlags(NamedTuple):
    """Bit ``b % 32`` of ``words[..., b // 32]``, int32 [B, S, W]: block b of ``size`` positions."""

    words: Tensor
    size: int


@triton.jit
def flags_kernel(
    blocks,
    end,
    words,
    rows,
    count,
    width,
    blocks_b,
    blocks_s,
    blocks_n,
    end_b,
    end_s,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    batch, row = (program // rows).to(tl.int64), (program % rows).to(tl.int64)
    own = words + program.to(tl.int64) * width
    word = tl.arange(0, WORDS)
    for base in range(0, width, WORDS):
        tl.store(own + base + word, tl.zeros([WORDS], tl.int32), mask=base + word < width)
    tl.debug_barrier()
    # The padding of a row that has candidates repeats the last of them.
    used = tl.where(tl.load(end + batch * end_b + row * end_s) > 0, count, 0)
    slot = tl.arange(0, BLOCKS)
    at = blocks + batch * blocks_b + row * blocks_s
    for base in range(0, used, BLOCKS):
        which = base + slot
        block = tl.load(at + which.to(tl.int64) * blocks_n, mask=which < used, other=-1)
        block = block.to(tl.int64)
        known = (block >= 0) & (block < tl.cast(width, tl.int64) * 32)
        block = tl.where(known, block, 0).to(tl.int32)
        set_bits(own, block, known, BLOCKS)


def block_flags(blocks: Tensor, end: Tensor, positions: Size, sparse_block: int) -> BlockFlags:
    """The blocks that ``candidate_expand`` gave a row, without anchored rows.

    Args:
        blocks: int32 or int64 [B|1, S|1, N]; ``end``: [B|1, S|1].
        positions: length of the context.
    """
    batch = torch.sym_max(blocks.shape[0], end.shape[0])
    rows = torch.sym_max(blocks.shape[1], end.shape[1])
    count = blocks.shape[2]
    width = ((positions + sparse_block - 1) // sparse_block + 31) // 32
    words = blocks.new_empty((batch, rows, width), dtype=torch.int32)
    if isinstance(words.numel(), int) and words.numel() == 0:
        return BlockFlags(words, sparse_block)
    lines, blocks_b, blocks_s = by_row(blocks, batch, rows, blocks)
    stops, end_b, end_s = by_row(end, batch, rows, end)
    at_once = power_of_two(bound(count, _AT_ONCE), 2)
    wrap_triton(flags_kernel)[(batch * rows,)](
        lines,
        stops,
        words,
        rows,
        count,
        width,
        blocks_b,
        blocks_s,
        blocks.stride(2),
        end_b,
        end_s,
        BLOCKS=at_once,
        WORDS=power_of_two(bound(width, _AT_ONCE), 2),
        num_warps=max(1, min(4, at_once // 128)),
    )
    return BlockFlags(words, sparse_block)
