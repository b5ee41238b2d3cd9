"""Run a part of a graph on small made-up inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx

from dsa_compile.passes.arrange_axes import Layout
from dsa_compile.passes.axis_labels import Axes, Axis, Labels
from dsa_compile.passes.bind_sizes import Binding
from dsa_compile.passes.graph_tools import (
    ancestors,
    dtype_of,
    is_float,
    is_size,
    is_tensor,
    op_name,
    selection_root,
    value,
)
from dsa_compile.passes.mask_terms import mask_leaf
from dsa_compile.passes.recognise_ops import attribute, never_negative

CPU = torch.device("cpu")


class ProbeError(Exception):
    """The part of the graph could not be run on the made-up inputs."""


class TooLarge(ProbeError):
    """The sizes of the part need more memory than a probe may take."""


class EagerLayout(Layout):
    """The layout's rearrangements, done at once on real tensors."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels, lambda target, *args: target(*args))  # type: ignore[arg-type]

    def arrange(self, tensor: torch.Tensor, axes: Axes, groups: list[Axis]) -> torch.Tensor:
        """``canonical`` for a real tensor."""
        return cast(torch.Tensor, self.canonical(cast(fx.Node, tensor), axes, groups))

    def size(self, atom: int) -> int:
        return self.labels.sizes[self.labels.resolve([atom])[0]]

    def group_size(self, atoms: list[int]) -> int:
        return self.labels.extent(atoms)


def _on_cpu(arg: Any) -> Any:
    if isinstance(arg, torch.device):
        return CPU
    if isinstance(arg, (tuple, list)):
        return type(arg)(_on_cpu(a) for a in arg)
    return arg


def needed(targets: Iterable[fx.Node], leaves: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes to run for the targets, given values for the leaves, in graph order."""
    given = set(leaves)
    nodes = ancestors(list(targets), lambda n: n in given or is_size(n))
    return sorted(n for n in nodes if n not in given)


def memory(nodes: Iterable[fx.Node], binding: Binding) -> int:
    """Bytes of the two largest results among the nodes, twice: about what a run holds at once."""
    sizes = []
    for node in nodes:
        if is_tensor(node) and node.op == "call_function":
            elements = 1
            for extent in binding.shape(node):
                elements *= extent
            sizes.append(elements * value(node).element_size())
    return 2 * sum(sorted(sizes)[-2:])


def evaluate(
    nodes: Iterable[fx.Node], env: dict[fx.Node, Any], binding: Binding
) -> dict[fx.Node, Any]:
    """Run nodes in order on the CPU and return all values.

    Args:
        nodes: in graph order, complete up to the keys of ``env``.
        env: values of the leaves.
        binding: sizes.

    Raises:
        ProbeError: a node cannot be run; the text names it.
    """
    values = dict(env)
    with torch.no_grad():
        for node in nodes:
            recorded = value(node)
            if is_size(node):
                try:
                    values[node] = binding.extent(recorded)
                except KeyError:
                    text = f"{node.name} is a number that no size of the part gives"
                    raise ProbeError(text) from None
                continue
            if node.op == "get_attr":
                held = attribute(node)
                if isinstance(held, torch.Tensor):
                    held = binding.constant(node, held.detach().cpu())
                    binding.check(node, held)
                values[node] = held
                continue
            if node.op != "call_function":
                raise ProbeError(f"the probe has no value for {node.name}")
            args, kwargs = fx.map_arg(binding.arguments(node), values.__getitem__)
            try:
                values[node] = node.target(
                    *_on_cpu(args), **{k: _on_cpu(v) for k, v in kwargs.items()}
                )  # type: ignore[operator]
            except Exception as error:  # noqa: BLE001 - ops raise many kinds
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ProbeError(f"{op_name(node)} fails on the probe: {first}") from error
            binding.check(node, values[node])
    return values


@dataclass
class Draw:
    """Makes values for leaves; each call of a method draws anew from the generator."""

    generator: torch.Generator
    positions: int
    odd: tuple[int, ...] = (-2, -7, 127, 999, 2**15, 2**30, 2**31 - 1, -(2**31))

    def _rand(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Standard normal numbers in a dtype (drawn in fp32, rounded)."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def operand(self, node: fx.Node, shape: tuple[int, ...]) -> torch.Tensor:
        """A query, key, weight or scale; not negative where its own ops cannot be."""
        dtype = value(node).dtype
        drawn = self.normal(shape, torch.float32)
        return (drawn.abs() if never_negative(node) else drawn).to(dtype)

    def addend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An additive mask or bias: zeros, small numbers and -inf."""
        pick = self._rand(shape)
        drawn = torch.where(pick < 0.6, 0.0, self.normal(shape, torch.float32))
        return drawn.masked_fill(pick > 0.85, float("-inf")).to(dtype)

    def selection(self, root: fx.Node, binding: Binding) -> dict[str, torch.Tensor]:
        """Values and indices as a top-k may give them: unique, in range, some -inf at the end."""
        out = value(root)
        shape, width = binding.selected(root)
        kept = shape[-1]
        order = torch.argsort(self._rand((*shape[:-1], width)), dim=-1)[..., :kept]
        scores = self.normal(shape, torch.float32).sort(dim=-1, descending=True).values
        live = torch.randint(0, kept + 1, (*shape[:-1], 1), generator=self.generator)
        dtype = out[0].dtype if isinstance(out, (tuple, list)) else torch.float32
        scores = scores.to(dtype)
        # What a block may be worth: pinned (+inf or the largest), not a number, hidden in any way.
        pick = self._rand((*shape[:-1], 1))
        limits = torch.finfo(dtype)
        lowest, largest = (torch.tensor(n, dtype=dtype) for n in (limits.min, limits.max))
        far = torch.tensor(max(-1e9, limits.min), dtype=dtype)
        hidden = torch.where(self._rand(pick.shape) < 0.3, far, lowest)
        hidden = hidden.masked_fill(self._rand(pick.shape) < 0.6, float("-inf"))
        scores = torch.where(torch.arange(kept) >= live, hidden, scores)
        first = largest.expand(pick.shape).masked_fill(pick < 0.5, float("inf"))
        first = first.masked_fill(pick < 0.1, float("nan"))
        scores = torch.where((torch.arange(kept) == 0) & (pick < 0.7), first, scores)
        return {"values": scores, "indices": order}

    def ids(
        self, shape: tuple[int, ...], dtype: torch.dtype, blocks: int, wild: str
    ) -> torch.Tensor:
        """Published block ids: unique with -1 last, or with what ``wild`` names added."""
        width = shape[-1]
        order = torch.argsort(self._rand((*shape[:-1], max(width, blocks))), dim=-1)[..., :width]
        out = order.masked_fill(order >= blocks, -1)
        live = torch.randint(0, width + 1, (*shape[:-1], 1), generator=self.generator)
        if wild != "full":
            out = out.masked_fill(torch.arange(width) >= live, -1)
        if wild == "holes":
            out = out.masked_fill(self._rand(shape) < 0.3, -1)
        elif wild == "twice" and width > 1:
            out[..., 1::2] = out[..., : width - width % 2 : 2][..., : out[..., 1::2].shape[-1]]
        elif wild == "beyond":
            out = torch.where(self._rand(shape) < 0.3, blocks + 3, out)
        elif wild == "odd":
            limits = torch.iinfo(dtype)
            held = (o for o in self.odd if limits.min <= o <= limits.max)
            odd = torch.tensor([o for o in held if not 0 <= o < blocks] or [-1])
            taken = odd[torch.randint(0, len(odd), shape, generator=self.generator)]
            out = torch.where(self._rand(shape) < 0.4, taken, out)
        return out.to(dtype)

    def integer(self, shape: tuple[int, ...], dtype: torch.dtype, high: int) -> torch.Tensor:
        """Lengths or positions in ``[0, high]``."""
        return torch.randint(0, high + 1, shape, generator=self.generator).to(dtype)

    def boolean(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Mostly True."""
        return self._rand(shape) < 0.75


def mask_leaves(targets: list[fx.Node]) -> list[fx.Node]:
    """Tensors at which the reading of these masks stops, constants left out."""
    cone = ancestors(targets, mask_leaf)
    return [n for n in cone if mask_leaf(n) and is_tensor(n)]


def draw_masks(
    leaves: list[fx.Node], draw: Draw, binding: Binding, *, special: dict[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Values for the leaves of masks; ``special`` gives some of them."""
    env: dict[fx.Node, torch.Tensor] = dict(special)
    roots: dict[fx.Node, dict[str, torch.Tensor]] = {}
    for node in leaves:
        if node in env:
            continue
        shape = binding.shape(node)
        root = selection_root(node)
        if root is not None:
            if root not in roots:
                roots[root] = draw.selection(root, binding)
            env[node] = roots[root]["values" if is_float(node) else "indices"].to(dtype_of(node))
        elif dtype_of(node) == torch.bool:
            env[node] = draw.boolean(shape)
        elif is_float(node):
            env[node] = draw.addend(shape, dtype_of(node))
        else:
            env[node] = draw.integer(shape, dtype_of(node), draw.positions)
    return env
