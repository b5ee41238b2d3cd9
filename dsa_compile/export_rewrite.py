"""An exported program with its indexers rewritten; signature, state and effects stay."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from dsa_compile.config import Config
from dsa_compile.errors import CaptureError
from dsa_compile.export_host import composite_decompositions
from dsa_compile.passes.graph_tools import SELECTIONS, is_size, op_name
from dsa_compile.report import Report
from dsa_compile.session import Session
from dsa_compile.unlift import settled

_STACK = "nn_module_stack"


def rewrite(program: Any, config: Config, notes: tuple[str, ...] = ()) -> tuple[Any, Report]:
    """The program with its indexers rewritten, and the report on them.

    Tensors of the program are shared, not copied. Inputs, outputs, mutations of buffers and of
    inputs, range constraints and the call signatures of its modules are those of ``program``.

    Args:
        program: a ``torch.export.ExportedProgram``; left unchanged.
        config: options; ``dynamic`` was the capture's business.
        notes: for the report.

    Raises:
        ProviderError: the configuration asks for what cannot be served here.
        PassError: a pass failed.
        NoMatchError: fewer indexers were matched than ``require_match`` asks for.
        CaptureError: the program cannot be decomposed, or has inputs of an unknown kind.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # torch's own deprecations, raised while it copies its tree specifications.
            warnings.filterwarnings("ignore", category=FutureWarning)
            plain = program.run_decompositions(composite_decompositions())
    except Exception as fault:
        first = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise CaptureError(
            f"the exported program could not be brought into functional form: {first}; export the "
            "model again with this version of torch"
        ) from fault
    bound, held = _with_attributes(plain)
    session = Session(bound, config)
    graph = session.add(bound)
    session.judge({graph.index})
    report = session.report((*notes, *_unseen(bound)))
    return _with_inputs(plain, graph.result.graph_module, held), report


def _unseen(module: fx.GraphModule) -> Iterator[str]:
    """What is said of selections in the graphs of control flow, where nothing is looked for."""
    for name, part in module.named_modules():
        nodes = part.graph.nodes if name and isinstance(part, fx.GraphModule) else ()
        if found := sum(op_name(node) in SELECTIONS for node in nodes):
            yield f"not looked at: {found} top-k or sort inside {name}, a branch or body"


def _with_attributes(program: Any) -> tuple[fx.GraphModule, dict[str, str]]:
    """A graph that reads the program's tensors as attributes, as passes know constants from inputs.

    Returns:
        the module, and attribute name -> name of the placeholder that it stands for.
    """
    from torch.export.graph_signature import InputKind

    source = program.graph_module
    graph = copy.deepcopy(source.graph)
    root = nn.Module()
    for name, module in source.named_children():
        root.add_module(name, module)
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    held: dict[str, str] = {}
    placeholders = graph.find_nodes(op="placeholder")
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            node.meta["dsa_origin"] = ("input", node.name)
            node.meta["val"] = settled(node.meta.get("val"))
        elif spec.kind in kinds:
            tensor = program.state_dict.get(spec.target)
            if tensor is None:
                tensor = program.constants[spec.target]
            attribute = f"dsa_{node.name}"
            held[attribute] = node.name
            if isinstance(tensor, nn.Parameter):
                root.register_parameter(attribute, tensor)
            else:
                root.register_buffer(attribute, tensor)
            with graph.inserting_before(first):
                read = graph.create_node("get_attr", attribute)
            read.meta.update(node.meta)
            read.meta["dsa_origin"] = (kinds[spec.kind], spec.target)
            node.replace_all_uses_with(read)
            graph.erase_node(node)
        elif spec.kind != InputKind.CUSTOM_OBJ:
            raise CaptureError(
                f"input {node.name} of kind {spec.kind.name} is not supported; export a model "
                "without side effects other than writes to buffers and inputs"
            )
    module = fx.GraphModule(root, graph)
    module.meta.update(source.meta)
    return module, held


def _with_inputs(program: Any, done: fx.GraphModule, held: dict[str, str]) -> Any:
    """The program around the rewritten graph, whose attributes become inputs again."""
    signature = program.graph_signature
    original = {n.name: n for n in program.graph_module.graph.find_nodes(op="placeholder")}
    graph = fx.Graph()
    names: dict[str, fx.Node] = {}
    for spec in signature.input_specs:
        # A constant of the call signature has a placeholder too.
        name = spec.arg.name
        names[name] = node = graph.placeholder(name)
        node.meta = dict(original[name].meta)
    copies: dict[fx.Node, fx.Node] = {}
    modules: dict[str, nn.Module] = {}
    end: fx.Node | None = None
    for node in done.graph.nodes:
        if node.op == "placeholder":
            copies[node] = names[node.target]
        elif node.op == "get_attr" and node.target in held:
            copies[node] = names[held[node.target]]
        elif node.op == "output":
            end = node
        else:
            if node.op == "get_attr":
                modules[node.target] = _submodule(done, node)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop("dsa_origin", None)
    assert end is not None
    ended: Any = end.args[0]
    results: Sequence[Any] = fx.map_arg(ended, copies.__getitem__)
    graph.output(tuple(results)).meta = dict(end.meta)
    _settle_stacks(graph)
    module = fx.GraphModule(modules, graph)
    module.meta.update(done.meta)
    outputs = [
        dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
        if isinstance(node, fx.Node)
        else spec
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    kept = type(signature)(input_specs=list(signature.input_specs), output_specs=outputs)
    with warnings.catch_warnings():
        # torch's own deprecations, raised while it copies its tree specifications.
        warnings.filterwarnings("ignore", category=FutureWarning)
        return program._update(module, kept)


def _submodule(module: fx.GraphModule, node: fx.Node) -> nn.Module:
    """The graph of a higher-order op; a tensor can be none of the program's inputs any more."""
    found = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        raise CaptureError(f"{node.target} is neither an input of the program nor a graph")
    return found


def _settle_stacks(graph: fx.Graph) -> None:
    """Give every node a module that encloses it, such that modules are entered in order.

    Added nodes have none, and sizes were moved: they belong where both neighbours belong. What is
    first in the graph belongs to the model itself.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    places = (place for n in nodes for place in (n.meta.get(_STACK) or {}).items())
    key, place = next((p for p in places if p[1][0] == ""), ("", ("", "torch.nn.Module")))
    root = {key: place}
    before: dict[str, Any] = root
    loose: list[fx.Node] = []
    for node in nodes:
        stack = node.meta.get(_STACK)
        if not stack or is_size(node):
            loose.append(node)
            continue
        _spread(loose, before, stack)
        before, loose = stack, []
    _spread(loose, before, root)


def _spread(nodes: list[fx.Node], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Put nodes into the innermost module that holds both neighbours."""
    common = {}
    for (key, place), other in zip(before.items(), after.values(), strict=False):
        if place[0] != other[0]:
            break
        common[key] = place
    for node in nodes:
        node.meta[_STACK] = dict(common)
