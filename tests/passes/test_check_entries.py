"""Numbers that stand for a page, beyond all that a draw holds, keep their meaning."""

from __future__ import annotations

import pytest
import torch
from paged_models import Paged, by_index, setting
from pass_models import captured, same_sets
from torch import Tensor

from dsa_compile.passes.pipeline import run_pipeline


@pytest.mark.parametrize("number", [9999, -77, 1 << 20])
def test_a_number_that_stands_for_a_page_keeps_its_meaning(number: int) -> None:
    def read(cache: Tensor, table: Tensor) -> Tensor:
        return by_index(cache, torch.where(table == number, 1, table))

    given = setting(unused=0)
    model = Paged(read).eval()
    result = run_pipeline(captured(model, *given), provider="cpu")
    odd = list(given)
    odd[3] = torch.where(given[3] == given[3][0, 0], number, given[3])
    for inputs in (given, tuple(odd)):
        assert same_sets([model(*inputs)], result.graph_module(*inputs))
