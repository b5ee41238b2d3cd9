"""What every test shares: fixed seeds and a compiler cache that starts empty."""

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Graphs and recompile counts of one test never decide another."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
