"""Refuse calls that the kernels of a provider do not take, all of them in one error."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dsa_compile.kernels import deep_package
from dsa_compile.kernels.deep_needs import SELECT_CAPABILITIES, Need, topk_needs
from dsa_compile.kernels.deep_requests import PACKED_FP4, ScoreRequest, TopkRequest
from dsa_compile.passes.context import PassContext, PassResult, UnservedError
from dsa_compile.passes.graph_tools import dtype_of, namespace, op_name, value
from dsa_compile.passes.match_indexer_q import SCORERS
from dsa_compile.passes.note_sites import sites_of

_DEEP = "dsa_deep"
_SPARSE = "sparse_mqa_logits"
_PACKED = "mxfp4_sparse_mqa_logits"
_NEWEST = SELECT_CAPABILITIES[0]


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Check every call of DeepGEMM and DeepSelect; needs ``feed_quantised`` and ``fuse_remap``.

    The device was checked when the provider was chosen; here it is the calls. What depends on
    symbolic sizes the ops check themselves.

    Raises:
        UnservedError: lists every unmet need of every call, by the site that it serves.
    """
    calls = [n for n in graph_module.graph.nodes if namespace(n) == _DEEP]
    unmet: dict[tuple[str, str], None] = {}
    for call in calls:
        sites = [context.recorder.sites[at].where for at in _sites(call, context)]
        where = ", ".join(dict.fromkeys(sites)) or call.name
        for need in (*_score_needs(call), *_topk_needs(call)):
            unmet[f"the indexer at {where}: {need.what}", need.mend] = None
    if unmet:
        raise UnservedError(list(unmet))
    return PassResult(graph_module, False)


def _sites(call: fx.Node, context: PassContext) -> list[int]:
    """Sites that a call serves; scores of candidates through the selection that reads them."""
    own = list(sites_of(call, context.recorder))
    ranked = [user for user in call.users if op_name(user).startswith("topk")]
    return own + [at for user in ranked for at in sites_of(user, context.recorder)]


def _number(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _score_needs(call: fx.Node) -> tuple[Need, ...]:
    name = op_name(call)
    if name not in SCORERS | {_SPARSE, _PACKED}:
        return ()
    query: Any = call.args[0]
    key: Any = call.args[1]
    blocks: Any = None
    if name in (_SPARSE, _PACKED):
        blocks = call.args[3 if name == _SPARSE else 4]
    packed = name == _PACKED
    held = call.kwargs.get("q_scale") is not None and dtype_of(query) == torch.uint8
    scale: Any = call.kwargs.get("key_scale")
    heads, dim = value(query).shape[2:]
    if not isinstance(heads, int) or not isinstance(dim, int):
        return (Need("the number of heads or the head dim is symbolic", "make them constants"),)
    request = ScoreRequest(
        capability=_NEWEST,
        q_dtype=PACKED_FP4 if packed and held else dtype_of(query),
        k_dtype=PACKED_FP4 if packed else dtype_of(key),
        heads=heads,
        head_dim=2 * dim if packed and held else dim,
        key_scale=torch.int32 if packed else None if scale is None else dtype_of(scale),
        q_scale=torch.int32 if packed and held else None,
        sparse_block=None if blocks is None else call.kwargs["sparse_block"],  # type: ignore[arg-type]
        blocks=None if blocks is None else _number(value(blocks).shape[-1]),
    )
    unaligned = bool(call.kwargs.get("anchored")) and call.kwargs.get("row_start") is not None
    return deep_package.needs(request, unaligned=unaligned, compiler=())


def _topk_needs(call: fx.Node) -> tuple[Need, ...]:
    name = op_name(call)
    if name in SCORERS:
        width = _number(value(call.args[1]).shape[1])
    elif name in ("topk", "topk_positions"):
        width = _number(value(call.args[0]).shape[-1])
    else:
        return ()
    topk = _number(call.kwargs.get("topk"))
    return topk_needs(TopkRequest(_NEWEST, torch.float32, 0 if topk is None else topk, width))
