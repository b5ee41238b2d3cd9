"""Models as a command names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsa_compile.demo_model import Sizes, TwoLevel, two_level

SMALL = Sizes(hidden=16, heads=16, dim=16, topk=6, block=4, blocks=3, consumers=1)

model, example = two_level(33, 9, SMALL)


def make_model() -> nn.Module:
    return two_level(33, 9, SMALL)[0]


def make_both() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return two_level(33, 9, SMALL)


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1).topk(2).indices


def router() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Router(), (torch.randn(3, 8),)


class Unlike(TwoLevel):
    """Gives other results at every call."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        return super().forward(x, cache).float() + torch.rand(())


def fails() -> nn.Module:
    raise ValueError("out of order")


def ends() -> nn.Module:
    raise SystemExit(0)


def lacks_one() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return model, example[:1]


a_number = 3
