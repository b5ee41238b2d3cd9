"""The Triton provider ``torch.ops.dsa_triton.*``: the canonical ops on NVIDIA GPUs from sm_80 on.

Nothing imports this module but what uses the provider: importing it needs Triton, and no GPU. The
ops have the schemas of the canonical ones, and there are two more: ``topk_positions``, which is
``topk`` and ``topk_remap`` in one launch, and ``select_columns``, which is the sparse scorer before
it, too, or the dense one where the context is short.

They behave like those of ``torch.library.triton_op``, which cannot express the schemas (tensors
among the keyword-only arguments): eager calls launch kernels directly, AOTAutograd sees through an
op to the kernels inside, so that Inductor compiles them in and AOTInductor packages carry them.

Queries and keys may also be float8_e4m3fn (from sm_89 on); float64 has no kernels. Scores are
summed in fp32, and fp32 operands are multiplied in IEEE fp32, not in TF32.

Raises:
    ImportError: Triton is missing, or no more than a stub is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

try:
    import triton
    import triton.language as tl

    assert callable(triton.jit) and callable(tl.dot)
except (ImportError, AttributeError, AssertionError) as error:
    raise ImportError(
        "provider='triton' needs Triton 3.4 or newer, and none that works was found "
        f"({type(error).__name__}: {error}); install it with `pip install triton`, "
        "or use provider='cpu'"
    ) from error

from . import results
from .register import define, packed
from .results import RESULTS, Results
from .schemas import SCHEMAS
from .serving_results import SERVING_RESULTS
from .serving_schemas import SERVING_SCHEMAS
from .triton_choice import FEW_ROWS, FEW_ROWS_RATIO, select_columns
from .triton_columns import candidate_columns, columns_kernel
from .triton_dense import dense_scores
from .triton_expand import candidate_expand, expand_kernel
from .triton_finish import finish
from .triton_flags import flags_kernel
from .triton_groups import group_kernel
from .triton_indexer import indexer_block_max, indexer_publish, indexer_select
from .triton_maxima import block_max_kernel
from .triton_remap import remap_kernel, topk_remap
from .triton_scores import sparse_kernel
from .triton_select import select
from .triton_serving import SERVING_JIT_KERNELS, SERVING_KERNELS
from .triton_sparse import FP8, sparse_mqa_logits
from .triton_tools import check_device, interpreted
from .triton_topk import topk, topk_positions

NAMESPACE = "dsa_triton"

TOPK_POSITIONS = (
    "(Tensor logits, Tensor end, Tensor blocks, Tensor? row_start=None, *, SymInt topk, "
    "SymInt num_positions, int sparse_block, bool anchored=False, float? fill=None, "
    "bool sorted=True) -> (Tensor values, Tensor indices)"
)

SELECT_COLUMNS = (
    "(Tensor q, Tensor k, Tensor weights, Tensor blocks, Tensor end, *, SymInt topk, "
    "int sparse_block, int dense_below, float scale=1.0, Tensor? key_scale=None, "
    "Tensor? row_start=None, Tensor? row_end=None, bool anchored=False, float? fill=None, "
    f"bool sorted=True, int few_rows={FEW_ROWS}, float few_rows_ratio={FEW_ROWS_RATIO}) "
    "-> (Tensor values, Tensor indices)"
)

KERNELS: dict[str, Callable[..., Any]] = {
    "indexer_select": indexer_select,
    "indexer_publish": indexer_publish,
    "indexer_block_max": indexer_block_max,
    "candidate_expand": candidate_expand,
    "candidate_columns": candidate_columns,
    "sparse_mqa_logits": sparse_mqa_logits,
    "topk": topk,
    "topk_remap": topk_remap,
    "topk_positions": topk_positions,
    "select_columns": select_columns,
    **SERVING_KERNELS,
}
"""Op name -> what it runs; functions that make_fx can trace, with ``out=`` forms of their own."""

JIT_KERNELS = (
    block_max_kernel,
    columns_kernel,
    dense_scores,
    expand_kernel,
    finish,
    flags_kernel,
    group_kernel,
    remap_kernel,
    select,
    sparse_kernel,
    *SERVING_JIT_KERNELS,
)


def _topk_positions_results(
    logits: Tensor,
    end: Tensor,
    blocks: Tensor,
    row_start: Tensor | None = None,
    *,
    topk: int,
    sorted: bool = True,
    **mapping: Any,
) -> Results:
    values, columns = results.topk(logits, end, topk=topk, sorted=sorted)
    scores, places = (
        logits.new_empty((), dtype=part.dtype).expand(part.shape) for part in (values, columns)
    )
    return results.topk_remap(scores, places, blocks, row_start, **mapping)


def _select_columns_results(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    blocks: Tensor,
    end: Tensor,
    *,
    topk: int,
    sparse_block: int,
    dense_below: int,
    fill: float | None = None,
    sorted: bool = True,
    few_rows: int = FEW_ROWS,
    few_rows_ratio: float = FEW_ROWS_RATIO,
    **scoring: Any,
) -> Results:
    ((shape, dtype),) = results.sparse_mqa_logits(
        q, k, weights, blocks, end, sparse_block=sparse_block, **scoring
    )
    picked = (shape[0], shape[1], topk)
    return results.Result(picked, dtype), results.Result(picked, torch.int64)


_RESULTS: dict[str, Callable[..., Results]] = {
    **RESULTS,
    **SERVING_RESULTS,
    "topk_positions": _topk_positions_results,
    "select_columns": _select_columns_results,
}


def _known_to_checks(value: Any) -> Any:
    """An fp8 tensor as bf16 of the same shape: the shared checks know nothing of fp8."""
    if isinstance(value, Tensor) and value.dtype == FP8:
        return value.new_empty((), dtype=torch.bfloat16).expand(value.shape)
    return value


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Results:
    """Shape and dtype of an op's results; raises for arguments that no kernel takes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            raise TypeError(
                f"{name}: the Triton kernels compute in fp32 and take no float64; convert it, or "
                "use provider='reference'"
            )
    scorer = name.startswith(("indexer", "sparse", "select")) and name not in SERVING_SCHEMAS
    operands = 2 if scorer else 0
    given = [_known_to_checks(value) for value in args[:operands]]
    return _RESULTS[name](*given, *args[operands:], **kwargs)


def _fake(name: str) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        like: Tensor = args[0]
        outs = tuple(
            like.new_empty(out.shape, dtype=out.dtype) for out in _check(name, args, kwargs)
        )
        return packed(outs)

    return fake


def _checked(name: str) -> Callable[..., Any]:
    kernel = KERNELS[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        _check(name, args, kwargs)
        check_device(name, args[0])
        return kernel(*args, **kwargs)

    return run


def _on_its_device(name: str) -> Callable[..., Any]:
    """The same where Triton, which launches on the current device, finds the tensors there."""
    run = _checked(name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(device):
            return run(*args, **kwargs)

    return guarded


def _decomposed(name: str) -> Callable[..., Any]:
    """What an op becomes while AOTAutograd traces; exported programs keep it whole."""
    run = _checked(name)

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return run(*args, **(kwargs or {}))

    return rule


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    more = {"topk_positions": TOPK_POSITIONS, "select_columns": SELECT_COLUMNS}
    for name, schema in {**SCHEMAS, **SERVING_SCHEMAS, **more}.items():
        full = f"{NAMESPACE}::{name}"
        define(
            library,
            name,
            schema,
            kernel=_on_its_device(name),
            fake=_fake(name),
            dispatch_key="CompositeExplicitAutograd",
        )
        if not interpreted():
            torch.library.register_torch_dispatch(
                full, FunctionalTensorMode, _decomposed(name), lib=library
            )
            _enter_cache_key(full)
    return library


def _enter_cache_key(name: str) -> None:
    """Lets the sources of the kernels take part in the key of AOTAutograd's cache."""
    kernels = getattr(torch._library.triton, "triton_ops_to_kernels", None)
    if isinstance(kernels, dict):
        kernels[name] = list(JIT_KERNELS)


LIBRARY = _register()
