"""Row by row in a loop that graphs can hold: bounds the memory of ops that are written in ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Size = Any
Step = Callable[..., tuple[Tensor, ...]]
# Before torch 2.12 AOTInductor writes no C++ for a loop that fills a buffer row by row.
_HAS_LOOPS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 12)


def upper_bound(size: Size) -> int | None:
    """The largest value that a size can have, None where nothing bounds it."""
    if isinstance(size, int):
        return size
    from torch.utils._sympy.numbers import int_oo

    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return None if upper == int_oo or not upper.is_Integer else int(upper)


def surely(condition: Any) -> bool:
    """Whether a condition on sizes holds at every size, without a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def _symbols(sizes: Sequence[Size]) -> set[Any]:
    found: set[Any] = set()
    for size in sizes:
        if isinstance(size, torch.SymInt):
            found |= size.node.expr.free_symbols
    return found


def rows_of(tensor: Tensor, row: Tensor) -> Tensor:
    """Some rows of a tensor [B|1, S|1, ...]."""
    return tensor if isinstance(tensor.shape[1], int) and tensor.shape[1] == 1 else tensor[:, row]


def by_rows(
    step: Step,
    tensors: Sequence[Tensor],
    numbers: Sequence[Size],
    batch: Size,
    rows: Size,
    chunk: int,
    sizes: Sequence[Size],
) -> tuple[Tensor, ...]:
    """``step`` for ``chunk`` rows at a time, joined along the rows.

    Args:
        step: called with row numbers [chunk] int64 and then ``tensors`` and ``numbers``; gives
            results [batch, chunk, ...]. It must not write to what it is given.
        numbers: further sizes that ``step`` needs; it may take no symbolic one from elsewhere.
        rows: number of rows; the last chunk repeats the last row.
        sizes: sizes of the graph's inputs. A compiler writes the loop's buffers in terms of those
            that are bare symbols; where one is missing there is no loop, and memory grows with the
            rows. Nor is there one with torch before 2.12.

    Returns:
        results [batch, rows, ...].
    """
    everything = [batch, rows, *numbers, *(s for t in tensors for s in t.shape)]
    needed = _symbols(everything)
    bare = {
        s.node.expr: s
        for s in (*sizes, *everything)
        if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol
    }
    like = tensors[0]
    if surely(rows <= chunk) or not (_HAS_LOOPS and needed <= bare.keys()):
        return step(torch.arange(rows, device=like.device), *tensors, *numbers)
    # Compilers take a size of 1 for fixed: with one chunk a graph would serve no more rows.
    chunks = torch.sym_max((rows + chunk - 1) // chunk, 2)
    row = torch.arange(chunks * chunk, device=like.device).clamp(max=rows - 1).view(chunks, chunk)
    symbolic = [n for n in numbers if isinstance(n, torch.SymInt)]
    extra = [bare[symbol] for symbol in sorted(needed, key=str)]

    def body(row: Tensor, *args: Any) -> tuple[Tensor, ...]:
        # A size that the body only closed over would be spelled out in it, as no program may.
        given = iter(args[len(tensors) :])
        inner = [next(given) if isinstance(n, torch.SymInt) else n for n in numbers]
        return step(row, *args[: len(tensors)], *inner)

    results = torch.ops.higher_order.map_impl(body, (row,), (*tensors, *symbolic, *extra))
    joined = []
    for result in results:
        # [chunks, batch, chunk, ...]
        moved = result.movedim(0, 1)
        whole = moved.reshape(batch, chunks * chunk, *moved.shape[3:])
        joined.append(whole.narrow(1, 0, rows).contiguous())
    return tuple(joined)
