"""A stack comes back from ``cat`` and ``view``, and nothing else turns into one."""

import torch
from pass_models import captured
from torch import Tensor, fx, nn

from dsa_compile.passes import restore_stacks
from dsa_compile.passes.context import PassContext


class Joined(nn.Module):
    def __init__(self, parts: int, dim: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parts, self.dim, self.shape = parts, dim, shape

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * (i + 1) for i in range(self.parts)], self.dim).view(self.shape)


def rewritten(model: nn.Module, x: Tensor) -> fx.GraphModule:
    graph_module = captured(model, x)
    restore_stacks.run(graph_module, PassContext())
    graph_module.recompile()
    assert torch.equal(graph_module(x)[0], model(x))
    return graph_module


def stacks(graph_module: fx.GraphModule) -> int:
    return sum("stack" in str(n.target) for n in graph_module.graph.nodes)


def test_equal_parts_split_at_their_dim_are_a_stack() -> None:
    x = torch.randn(2, 3, 4)
    assert stacks(rewritten(Joined(5, 1, (2, 5, 3, 4)), x)) == 1
    assert stacks(rewritten(Joined(5, -1, (2, 3, 5, 4)), x)) == 1
    assert stacks(rewritten(Joined(3, 0, (3, 2, 3, 4)), x)) == 1


def test_other_views_of_a_cat_stay() -> None:
    x = torch.randn(2, 3, 4)
    assert stacks(rewritten(Joined(5, 1, (2, 3, 5, 4)), x)) == 0
    assert stacks(rewritten(Joined(5, 1, (2, 15, 2, 2)), x)) == 0
    assert stacks(rewritten(Joined(4, 2, (2, 3, 2, 2, 4)), x)) == 0
