"""The SM100 provider ``torch.ops.dsa_deep.*``: DeepGEMM scores and DeepSelect's top-k.

The ops have the schemas of the canonical ones, and there are two more: ``topk_positions``, which is
``topk`` and ``topk_remap``, and ``mxfp4_sparse_mqa_logits`` of packed operands. Queries and keys
are float8_e4m3fn; a query scale is folded into the head weights, which powers of two leave exact.
Candidate ids are expanded and mapped by plain PyTorch. Importing registers the ops and needs no
package; a call needs both, and ``deep_gemm.needs`` and ``deep_select.needs`` say beforehand what is
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import deep_gemm, deep_select, reference, reference_sparse, results
from .deep_dense import dense_mqa_logits
from .deep_requests import FP8
from .reference import fill_value, pin_newest_block, row_range, visible_positions
from .register import _autograd
from .results import RESULTS, Results
from .schemas import SCHEMAS
from .serving_results import SERVING_RESULTS
from .serving_schemas import SERVING_SCHEMAS

NAMESPACE = "dsa_deep"
_PACKED = "mxfp4_sparse_mqa_logits"

TOPK_POSITIONS = (
    "(Tensor logits, Tensor end, Tensor blocks, Tensor? row_start=None, *, SymInt topk, "
    "SymInt num_positions, int sparse_block, bool anchored=False, float? fill=None, "
    "bool sorted=True) -> (Tensor values, Tensor indices)"
)

DENSE_BYTES = 2**30
"""What the scores of one tile of rows may take in the dense ops."""

_BY_ROW = ("row_start", "row_end", "mask", "bias", "block_ids")


def _tiles(q: Tensor, positions: int) -> Iterator[slice]:
    step = max(1, DENSE_BYTES // max(1, 4 * q.shape[0] * positions))
    for first in range(0, q.shape[1], step):
        yield slice(first, first + step)


def _rows(tensor: Tensor | None, part: slice) -> Tensor | None:
    """Rows ``part`` of a [B|1, S|1, ...]; a broadcast dim stays."""
    return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, part]


def _select_tile(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    fill: float | None,
    sorted: bool,
    block_ids: Tensor | None,
    block_size: int,
    anchored: bool,
    block_max: int | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    scores = dense_mqa_logits(q, k, weights, **options)
    positions = k.shape[1]
    bounds = row_range(options["row_start"], options["row_end"], positions, q.device)

    def visible() -> Tensor:
        return visible_positions(
            scores.shape, *bounds, options["mask"], block_ids, block_size, anchored
        )

    if block_ids is not None:
        scores = scores.masked_fill(~visible(), reference.NEG_INF)
    end = torch.full((1, 1), positions, device=q.device)
    places = torch.arange(positions, device=q.device).view(1, 1, -1)
    values, indices = deep_select.topk_positions(
        scores,
        end,
        places,
        topk=topk,
        num_positions=positions,
        sparse_block=1,
        fill=fill,
        sorted=sorted,
    )
    if block_max is None:
        return values, indices
    blocks = -(-positions // block_max)
    hidden = fill_value(fill)
    shown = scores if hidden == reference.NEG_INF else torch.where(visible(), scores, hidden)
    tail = (0, blocks * block_max - positions)
    shown = torch.nn.functional.pad(shown, tail, value=hidden)
    if blocks == 0:
        return values, indices, shown
    return values, indices, shown.unflatten(-1, (blocks, block_max)).amax(-1)


def _select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    topk: int,
    block_max: int | None = None,
    fill: float | None = None,
    sorted: bool = True,
    block_ids: Tensor | None = None,
    block_size: int = 0,
    anchored: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    for name in ("row_start", "row_end", "mask", "bias", "key_scale"):
        options.setdefault(name, None)
    parts = []
    for part in _tiles(q, k.shape[1]):
        own = {n: _rows(v, part) if n in _BY_ROW else v for n, v in options.items()}
        found = _select_tile(
            q[:, part],
            k,
            weights[:, part],
            topk,
            fill,
            sorted,
            _rows(block_ids, part),
            block_size,
            anchored,
            block_max,
            own,
        )
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = {"topk": topk, "block_size": block_max} if block_max else {"topk": topk}
        name = "indexer_block_max" if block_max else "indexer_select"
        shapes = RESULTS[name](*(_known_to_checks(t) for t in (q, k)), weights, **empty)
        return tuple(weights.new_empty(r.shape, dtype=r.dtype) for r in shapes)
    return tuple(torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))


def indexer_select(q: Tensor, k: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """See ``dsa::indexer_select``; rows are tiled so that their scores stay in a budget."""
    return _select(q, k, weights, **options)


def indexer_block_max(
    q: Tensor, k: Tensor, weights: Tensor, *, block_size: int, **options: Any
) -> tuple[Tensor, ...]:
    """See ``dsa::indexer_block_max``."""
    return _select(q, k, weights, block_max=block_size, **options)


def indexer_publish(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    num_blocks: int,
    block_size: int,
    pin_newest: bool = True,
    pin_value: float | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """See ``dsa::indexer_publish``."""
    values, indices, best = _select(q, k, weights, block_max=block_size, **options)
    if pin_newest:
        bounds = (options.get("row_start"), options.get("row_end"))
        _, high = row_range(*bounds, k.shape[1], q.device)
        best = pin_newest_block(best, high, block_size, pin_value)
    block_values, order = best.sort(dim=-1, descending=True, stable=True)
    kept = block_values[..., :num_blocks].contiguous(), order[..., :num_blocks].contiguous()
    return values, indices, *kept


KERNELS: dict[str, Callable[..., Any]] = {
    "indexer_select": indexer_select,
    "indexer_publish": indexer_publish,
    "indexer_block_max": indexer_block_max,
    "candidate_expand": reference_sparse.candidate_expand,
    "candidate_columns": reference_sparse.candidate_columns,
    "sparse_mqa_logits": deep_gemm.sparse_mqa_logits,
    _PACKED: deep_gemm.mxfp4_sparse_mqa_logits,
    "topk": deep_select.topk,
    "topk_remap": deep_select.topk_remap,
    "topk_positions": deep_select.topk_positions,
}
"""Op name -> what it runs; those of the modules named in the docstring take more options."""


def _known_to_checks(tensor: Tensor) -> Tensor:
    """An fp8 tensor as bf16 of the same shape: the shared checks know nothing of fp8."""
    if tensor.dtype != FP8:
        return tensor
    return tensor.new_empty((), dtype=torch.bfloat16).expand(tensor.shape)


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """Shape and dtype of an op's results; raises for arguments that no kernel takes."""
    if name == _PACKED:
        return SERVING_RESULTS[name](*args, **kwargs)
    if name.startswith(("indexer", "sparse")):
        q, k, *rest = args
        if (q.dtype, k.dtype) != (FP8, FP8):
            raise TypeError(
                f"{name}: q and k must be float8_e4m3fn, got {q.dtype} and {k.dtype}; quantise "
                "them, or use provider='triton'"
            )
        return RESULTS[name](_known_to_checks(q), _known_to_checks(k), *rest, **kwargs)
    if name != "topk_positions":
        return RESULTS[name](*args, **kwargs)
    logits, end, *blocks = args
    mapping = dict(kwargs)
    topk, sorted_ = mapping.pop("topk"), mapping.pop("sorted", True)
    values, columns = (
        logits.new_empty((), dtype=part.dtype).expand(part.shape)
        for part in results.topk(logits, end, topk=topk, sorted=sorted_)
    )
    return results.topk_remap(values, columns, *blocks, **mapping)


def _fake(name: str) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        like: Tensor = args[0]
        outs = tuple(like.new_empty(r.shape, dtype=r.dtype) for r in _check(name, args, kwargs))
        return outs if len(outs) > 1 else outs[0]

    return fake


def _checked(name: str) -> Callable[..., Any]:
    kernel = KERNELS[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        _check(name, args, kwargs)
        with torch.autocast(args[0].device.type, enabled=False):
            return kernel(*args, **kwargs)

    return run


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    more = {"topk_positions": TOPK_POSITIONS, _PACKED: SERVING_SCHEMAS[_PACKED]}
    for name, schema in {**SCHEMAS, **more}.items():
        full = f"{NAMESPACE}::{name}"
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        library.impl(name, _checked(name), "CompositeExplicitAutograd")
        library.impl(name, _autograd(full, op), "Autograd", with_keyset=True)
        torch.library.register_fake(full, _fake(name), lib=library)
    return library


LIBRARY = _register()
