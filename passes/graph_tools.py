"""Small facts about FX nodes that every pass needs: op names, views, ancestors, emission."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch.fx as fx

aten = torch.ops.aten

VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze"}
    | {"expand", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "flatten"}
    | {"unflatten", "repeat", "repeat_interleave"}
)
CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
CONTRACTIONS = frozenset(
    {"mm", "bmm", "matmul", "einsum", "linear", "mv", "dot", "addmm", "baddbmm"}
)


class _Named(NamedTuple):
    """A target and its names; holding it keeps its identity its own."""

    target: Any
    name: str
    full: str
    space: str


_NAMES: dict[int, _Named] = {}
"""Names by identity: torch hashes and prints an op, and looks its namespace up, in Python."""
_OPERATORS = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
SELECTIONS = frozenset({"topk", "sort", "argsort"})
FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
"""Calls an op that writes to its arguments, on copies of them, and gives the copies."""
_FUNCTIONAL = (torch.ops.higher_order.auto_functionalized, FUNCTIONALIZED)
HELD = "dsa_held"
"""Key of ``meta``: how many parts of a pass still need a node that nobody reads."""
HEAVY = CONTRACTIONS | frozenset(
    {"amax", "max", "amin", "min", "softmax", "_softmax", "_safe_softmax", "native_layer_norm"}
    | {"layer_norm", "rms_norm", "_fused_rms_norm", "embedding", "convolution", "grouped_mm"}
    | {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"}
)


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target.__name__.partition(".")[0]
        return _OPERATORS.get(name, name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target).split(".")[-1]
    return getattr(target, "__name__", str(target))


def op_name(node: object) -> str:
    """The op of a node without namespace and overload (``"topk"``), ``""`` for other nodes."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    return (_NAMES.get(id(node.target)) or _named(node.target)).name


def _named(target: Any) -> _Named:
    space = target.namespace if isinstance(target, torch._ops.OpOverload) else ""
    named = _Named(target, _target_name(target), str(target), space)
    return _NAMES.setdefault(id(target), named)


def full_name(node: fx.Node) -> str:
    """The target of a node as it prints (``"aten.topk.default"``)."""
    if node.op != "call_function":
        return str(node.target)
    return (_NAMES.get(id(node.target)) or _named(node.target)).full


def namespace(node: fx.Node) -> str:
    """The namespace of a node's op (``"aten"``), ``""`` where it has none."""
    if node.op != "call_function":
        return ""
    return (_NAMES.get(id(node.target)) or _named(node.target)).space


def called_op(node: fx.Node) -> Any:
    """The op that a node calls, also where PyTorch's functional form of an op that writes does."""
    return node.args[0] if node.target in _FUNCTIONAL else node.target


def value(node: object) -> Any:
    """The example value that capture recorded for a node, or the object itself."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def is_tensor(node: object) -> bool:
    """Whether an argument is a node holding one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_size(node: fx.Node) -> bool:
    """Whether a node holds a symbolic number, whose value a binding of symbols gives."""
    return isinstance(value(node), _SIZES)


def same_size(a: Any, b: Any) -> bool:
    """Whether two recorded sizes are the same number at every binding, by their expressions."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def dtype_of(node: fx.Node) -> torch.dtype:
    """dtype of a tensor node."""
    dtype = value(node).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_float(node: object) -> bool:
    """Whether an argument is a node holding a floating-point tensor."""
    return is_tensor(node) and dtype_of(node).is_floating_point  # type: ignore[arg-type]


def is_upcast(node: fx.Node) -> bool:
    """Whether a node only widens a float dtype (or keeps it), so that no value changes."""
    if op_name(node) not in CASTS or not is_tensor(node.args[0]):
        return False
    before, after = dtype_of(node.args[0]), dtype_of(node)  # type: ignore[arg-type]
    if before == after:
        return True
    if not (before.is_floating_point and after.is_floating_point):
        return False
    # fp8 is no operand of the canonical ops, and a product asked for in fp64 stays one.
    if before.itemsize == 1 or after == torch.float64:
        return False
    return before.itemsize < after.itemsize


def is_view(node: object) -> bool:
    """Whether a node rearranges a tensor's elements without changing any."""
    return op_name(node) in VIEWS


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments that hold tensors."""
    return [n for n in node.all_input_nodes if is_tensor(n)]


def selection_root(node: fx.Node) -> fx.Node | None:
    """The top-k or sort of scores whose output a node is, looking through ``getitem``; else None.

    An order of integers is none: it rearranges picks that are there already.
    """
    name = op_name(node)
    if name not in ("getitem", "argsort"):
        return None
    root = node.args[0] if name == "getitem" else node
    if not isinstance(root, fx.Node) or op_name(root) not in SELECTIONS:
        return None
    return root if is_float(root.args[0]) else None


def ancestors(
    targets: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda _: False
) -> list[fx.Node]:
    """Targets and what they depend on, in no order; nothing above a node that ``stop`` names."""
    seen: dict[fx.Node, None] = {}
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen[node] = None
        if not stop(node):
            stack.extend(node.all_input_nodes)
    return list(seen)


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase nodes that nobody reads, and what only they read; never an effect or an input.

    On large graphs much faster than ``Graph.eliminate_dead_code``, which asks every node whether
    it is pure, read or not.
    """
    stack, gone = list(nodes), set()
    effects: dict[int, bool] = {}

    def impure(node: fx.Node) -> bool:
        # An overload has effects or has none, whatever it is given.
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.is_impure()
        if id(node.target) not in effects:
            effects[id(node.target)] = node.is_impure()
        return effects[id(node.target)]

    while stack:
        node = stack.pop()
        unused = node not in gone and node.op == "call_function" and not node.users
        if unused and not node.meta.get(HELD) and not impure(node):
            stack.extend(node.all_input_nodes)
            graph.erase_node(node)
            gone.add(node)


def signature(nodes: Iterable[fx.Node], leaf: Callable[[fx.Node], bool]) -> Hashable:
    """A key that two lists of nodes share exactly when they do the same to equal leaves.

    Args:
        nodes: in graph order, so that equal parts list equal nodes at equal places.
        leaf: nodes of which only dtype and sizes matter.
    """
    place: dict[fx.Node, int] = {}
    rows: list[Hashable] = []

    def plain(arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return ("node", place.get(arg, -1))
        if isinstance(arg, (list, tuple)):
            return tuple(plain(a) for a in arg)
        return repr(arg)

    for at, node in enumerate(nodes):
        place[node] = at
        held = value(node)
        if isinstance(held, _SIZES):
            rows.append(("size", held.node.expr))
        elif leaf(node) and isinstance(held, torch.Tensor):
            sizes = tuple(s if isinstance(s, int) else s.node.expr for s in held.shape)
            rows.append(("leaf", held.dtype, sizes, node.target if node.op == "get_attr" else ""))
        else:
            kwargs = tuple((k, plain(v)) for k, v in node.kwargs.items())
            rows.append((full_name(node), plain(node.args), kwargs))
    return tuple(rows)


def where_in_model(node: fx.Node) -> str:
    """``file:line`` of the model's statement that made a node, or the node's name."""
    trace = node.meta.get("stack_trace") or ""
    lines = [ln.strip() for ln in trace.splitlines() if ln.strip().startswith("File ")]
    if not lines:
        return node.name
    parts = lines[-1].split(", ")
    return parts[0][len("File ") :].strip('"') + ":" + parts[1].removeprefix("line ")
