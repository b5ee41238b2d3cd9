"""Move bf16 casts of head weights into ``dsa::fused_indexer_q``.

Between the op and a scorer the weights may be cast and rearranged. What is moved, and why no value
changes:

- fp32 to bf16, through any views and slices: the op rounds its fp32 result once, as the cast does,
  and rearranging commutes with rounding. The cast goes.
- bf16 to fp32 after that: it only widens, and scorers widen weights of any float dtype themselves.
  The cast goes.
- bf16 to fp32 to bf16, and bf16 to bf16: the second rounding meets numbers that are bf16 already.
  Both go.

What is not moved, since it would change a value:

- fp32 to fp16 to bf16: numbers are rounded twice, and not to what rounding once gives.
- A cast to another dtype than bf16: the op has no such result.
- A cast below arithmetic, as ``(w * c).to(bf16)``: rounding before the product gives other numbers;
  so does a cast above it, ``w.to(bf16) * c``, which rounds twice.
- A cast of the weights that the op reads: its result starts from rounded numbers.

Where another user needs the fp32 weights the op gives both.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dsa_compile.passes.context import PassContext, PassResult
from dsa_compile.passes.emit_nodes import Emitter
from dsa_compile.passes.graph_tools import (
    CASTS,
    dtype_of,
    erase_unused,
    is_tensor,
    is_view,
    namespace,
    op_name,
)

WEIGHTS = {
    "indexer_select": 2,
    "indexer_publish": 2,
    "indexer_block_max": 2,
    "sparse_mqa_logits": 2,
    "paged_sparse_mqa_logits": 2,
    "paged_mqa_logits": 2,
    "mxfp4_sparse_mqa_logits": 3,
}
"""Scorer -> place of the head weights among its arguments."""

_PIECES = frozenset({"select", "slice"})


@dataclass(frozen=True)
class _Path:
    """Nodes from a fused op's weights down to a scorer's argument, and those that rearrange."""

    scorer: fx.Node
    op: fx.Node
    nodes: tuple[fx.Node, ...]
    moves: tuple[fx.Node, ...]


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Give every scorer its weights without a cast; needs ``match_indexer_q``."""
    graph = graph_module.graph
    paths: dict[fx.Node, list[_Path]] = {}
    for node in graph.nodes:
        path = _path_to(node)
        if path is not None:
            paths.setdefault(path.op, []).append(path)
    for op, found in paths.items():
        _hoist(graph, op, found, context)
    return PassResult(graph_module, bool(paths))


def _path_to(scorer: fx.Node) -> _Path | None:
    """The path of a scorer's bf16 weights from a fused op, if it holds a cast that may go."""
    if op_name(scorer) not in WEIGHTS or not namespace(scorer).startswith("dsa"):
        return None
    node: Any = scorer.args[WEIGHTS[op_name(scorer)]]
    nodes: list[fx.Node] = []
    rounded = False
    while is_tensor(node):
        name = op_name(node)
        source: Any = node.args[0] if node.args else None
        nodes.append(node)
        if name == "getitem" and op_name(source) == "fused_indexer_q":
            low = dtype_of(node) == torch.bfloat16
            casts = any(op_name(n) in CASTS for n in nodes)
            if node.args[1] not in (2, 3) or not casts or not (rounded or low):
                return None
            down = nodes[::-1]
            moves = tuple(n for n in down[1:] if op_name(n) not in CASTS)
            return _Path(scorer, source, tuple(down), moves)
        if name in CASTS:
            pair = {dtype_of(source), dtype_of(node)}
            if not pair <= {torch.float32, torch.bfloat16}:
                return None
            rounded |= dtype_of(node) == torch.bfloat16
        elif not is_view(node) and name not in _PIECES:
            return None
        node = source
    return None


def _hoist(graph: fx.Graph, op: fx.Node, paths: list[_Path], context: PassContext) -> None:
    dead = _unread_after(paths)
    outs = [n for n in op.users if op_name(n) == "getitem"]
    wide = [n for n in outs if n.args[1] == 2 and dtype_of(n) == torch.float32]
    both = any(n not in dead for n in wide)
    kwargs = dict(op.kwargs)
    if not wide or both:
        # There is a bf16 result already, or a user of the fp32 one.
        kwargs["bf16_weights"] = both or kwargs.get("bf16_weights", False)
    else:
        kwargs["weights_out_dtype"] = torch.bfloat16
    emit = Emitter(graph, op, context.emission)
    new = emit(op.target, *op.args, **kwargs)  # type: ignore[arg-type]
    new.meta.update({k: v for k, v in op.meta.items() if k not in new.meta})
    results: dict[int, fx.Node] = {}

    def result(at: int) -> fx.Node:
        if at not in results:
            results[at] = emit(operator.getitem, new, at)
        return results[at]

    for out in outs:
        at = out.args[1]
        assert isinstance(at, int)
        if out in dead and at == 2 or not out.users:
            continue
        out.replace_all_uses_with(result(at))
    low_at = 3 if both or not wide and kwargs.get("weights_out_dtype") != torch.bfloat16 else 2
    low = result(low_at)
    for path in paths:
        made, place = low, Emitter(graph, path.scorer.prev, context.emission)
        for move in path.moves:
            made = place(move.target, made, *move.args[1:], **move.kwargs)  # type: ignore[arg-type]
        at = WEIGHTS[op_name(path.scorer)]
        args = list(path.scorer.args)
        args[at] = made
        path.scorer.args = tuple(args)
    erase_unused(graph, [n for path in paths for n in path.nodes] + outs + [op])


def _unread_after(paths: list[_Path]) -> set[fx.Node]:
    """Nodes of the paths that nothing reads once the scorers read the bf16 result."""
    ends = {path.nodes[-1]: path.scorer for path in paths}
    scorers = {path.scorer for path in paths}
    dead: set[fx.Node] = set()
    for node in sorted({n for path in paths for n in path.nodes}, reverse=True):
        readers = [u for u in node.users if u not in dead]
        if all(u in scorers and node in ends and _only_weights(u, node) for u in readers):
            dead.add(node)
    return dead


def _only_weights(scorer: fx.Node, node: fx.Node) -> bool:
    at = WEIGHTS[op_name(scorer)]
    others = [a for i, a in enumerate(scorer.args) if i != at]
    return scorer.args[at] is node and node not in others + list(scorer.kwargs.values())
