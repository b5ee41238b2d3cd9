"""Selection: exactly the reference's columns, in its order where one is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from dsa_compile.kernels import triton_topk
from dsa_compile.kernels.triton_groups import group_maxima
from dsa_compile.kernels.triton_remap import topk_remap
from dsa_compile.kernels.triton_split import Split, split_again, split_rows
from dsa_compile.kernels.triton_topk import (
    _launch_select,
    select_rows,
    topk,
    topk_positions,
)

from .conftest import ON_GPU


def by_column(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The same slots in order of columns, empty ones last."""
    order = torch.where(columns < 0, 2**31, columns.long()).argsort(-1)
    return values.gather(-1, order), columns.gather(-1, order)


def check(scores: Tensor, end: Tensor, k: int, device: str, **kwargs: Any) -> None:
    # Not on the GPU, where PyTorch sorts NaNs with a sign last.
    want = tuple(x.to(device) for x in torch.ops.dsa.topk(scores.cpu(), end.cpu(), topk=k))
    scores, end = scores.to(device), end.to(device)
    got = select_rows("topk", scores, topk=k, ends=end, **kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    got = select_rows("topk", scores, topk=k, ends=end, sorted=False, **kwargs)
    torch.testing.assert_close(by_column(*got), by_column(*want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width, k", [(1, 1), (5, 9), (100, 7), (1000, 16), (1000, 33), (40, 40)])
def test_random_scores(width: int, k: int, dtype: torch.dtype, device: str) -> None:
    end = torch.randint(-1, width + 2, (2, 2)).int()
    check(torch.randn(2, 2, width).to(dtype), end, k, device)


@pytest.mark.parametrize("kind", ["few values", "constant", "one group", "nan", "inf", "zeros"])
def test_scores_that_defeat_a_threshold(kind: str, device: str) -> None:
    """Long ties, and rows whose best columns all fall into few groups."""
    x = torch.randn(1, 2, 3000)
    if kind == "few values":
        x = x.round()
    elif kind == "constant":
        x = torch.full_like(x, 1.5)
    elif kind == "one group":
        x[..., ::32] = 100 + torch.arange(94.0)
    elif kind == "nan":
        x[..., ::7] = torch.nan
        x[..., 3::7] = -torch.tensor(torch.nan)
    elif kind == "inf":
        x[..., ::3], x[..., 1::3] = torch.inf, -torch.inf
    else:
        x = torch.where(torch.rand_like(x) < 0.5, 0.0, -0.0)
    check(x, torch.tensor([[3000, 2777]]), 9, device)


@pytest.mark.parametrize(
    "split, ties", [(None, True), (Split(5, 8000), True), (Split(3, 13344), False)]
)
def test_rows_wider_than_registers(ties: bool, split: Split | None, device: str) -> None:
    x = torch.randn(1, 1, 40_000)
    x = (2 * x).round() if ties else x
    check(x, torch.tensor([[39_999]]), 40, device, split=split)


@pytest.mark.parametrize("kind", ["random", "ties", "nan", "few", "all"])
def test_one_row_that_many_programs_share(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the row, parts of what those hand on, and what these do."""
    parts: list[int] = []

    def launch(*args: Any) -> None:
        parts.append(args[5].parts)
        _launch_select(*args)

    monkeypatch.setattr(triton_topk, "_launch_select", launch)
    x, end = torch.randn(1, 1, 1 << 17), torch.tensor([[(1 << 17) - 5]])
    if kind == "ties":
        x = (2 * x).round()
    elif kind == "nan":
        x[..., ::3] = torch.nan
    elif kind == "few":
        end = torch.tensor([[300]])
    elif kind == "all":
        x[:] = 1.5
    check(x, end, 300, device)
    assert parts == [32, 8, 1] * 2


def test_hidden_columns_that_many_programs_share(device: str) -> None:
    """Where -inf can be selected, the lowest columns of those are, and no empty slot."""
    x = torch.full((1, 1, (1 << 17) - 7), -torch.inf)
    x[..., 70_000:70_020] = torch.arange(20.0)
    best = list(range(70_019, 69_999, -1)) + list(range(280))
    end = torch.full((1, 1), x.shape[-1], device=device)
    got = select_rows("topk", x.to(device), topk=300, ends=end, keep_all=True)
    assert got[1].flatten().tolist() == best
    assert torch.equal(got[0].cpu(), x[..., best])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", [True, False])
def test_maxima_of_groups(bounds: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(1, 2, 10_007, device=device).to(dtype)
    x[0, 1, ::5] = torch.nan
    starts = torch.tensor([[777, 9000]], device=device) if bounds else None
    ends = torch.tensor([[10_007, 9003]], device=device) if bounds else None
    got = group_maxima(x, 2048, starts, ends)
    column = torch.arange(10_240, device=device)
    seen = column < 10_007
    if starts is not None and ends is not None:
        seen = (column >= starts[..., None]) & (column < ends[..., None])
    wide = torch.full((1, 2, 10_240), -torch.inf, device=device)
    wide[..., :10_007] = x.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    want = wide.masked_fill(~seen, -torch.inf).view(2, 5, 2048).amax(1)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["random", "ties", "nan", "few"])
def test_whole_rows_wider_than_registers(kind: str, device: str) -> None:
    """Rows enough to leave each to one program, which has the maxima of groups found first."""
    x, end = torch.randn(1, 2, 20_011), torch.tensor([[20_011, 19_000]])
    if kind == "ties":
        x = (2 * x).round()
    elif kind == "nan":
        x[..., ::3] = torch.nan
    elif kind == "few":
        end = torch.tensor([[3, 0]])
    check(x, end, 40, device, split=Split(1, 20_016))


def test_clustered_scores(device: str) -> None:
    """Neighbouring columns score alike, as in real contexts."""
    x = torch.sin(torch.arange(20_000) / 900)[None, None] + 1e-3 * torch.randn(1, 1, 20_000)
    check(x, torch.tensor([[20_000]]), 64, device)


@pytest.mark.parametrize("how", ["transposed", "sliced", "padded"])
def test_strides(how: str, device: str) -> None:
    if how == "transposed":
        x = torch.randn(1, 300, 7).mT
    elif how == "sliced":
        x = torch.randn(1, 7, 500)[..., 3:303]
    else:
        x = torch.randn(1, 7, 512)[..., :300]
    check(x, torch.full((1, 1), 300), 5, device)


def test_rows_beyond_two_to_the_31_elements(device: str) -> None:
    room = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device)
    x = room.as_strided((1, 3, 300), (0, 2**30, 1))
    for row in range(3):
        x[:, row] = torch.randn(1, 300, device=device).bfloat16()
    check(x, torch.full((1, 1), 300), 16, device)


def test_equal_calls_give_equal_results(device: str) -> None:
    x = torch.randint(-50, 50, (1, 3, 1000)).float().to(device)
    end = torch.tensor([[1000, 512, 1]], device=device)
    first = topk(x, end, topk=30, sorted=False)
    for _ in range(10 if ON_GPU else 2):
        again = topk(x, end, topk=30, sorted=False)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("k", [512, 2048, 4096] if ON_GPU else [600])
def test_slots_that_models_ask_for(k: int, device: str) -> None:
    """One row in the interpreter, whose sort is slow; many and wide ones on a GPU."""
    for rows, width in ((64, 16_384), (3, 200_000), (1, 2**21)) if ON_GPU else ((1, 4000),):
        x = torch.randn(1, rows, width)
        end = torch.randint(1, width + 1, (1, rows))
        end[0, 0] = width
        check(x, end, k, device)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("fill", [None, -1e9])
def test_positions_in_one_launch(anchored: bool, fill: float | None, device: str) -> None:
    """Hidden positions for empty slots are part of the meaning: exactly the reference's."""
    n, sparse_block = 70, 4
    blocks = torch.stack([torch.randperm(17)[:12].sort().values for _ in range(6)])
    blocks = blocks.view(2, 3, 12).int().to(device)
    start = torch.randint(0, 9, (2, 1), device=device)
    x = torch.randn(2, 3, 48, device=device)
    end = torch.tensor([[48, 20, 0], [3, 47, 12]], device=device)
    kwargs = {
        "num_positions": n,
        "sparse_block": sparse_block,
        "anchored": anchored,
        "fill": fill,
    }
    picked = torch.ops.dsa.topk(x, end, topk=25)
    want = torch.ops.dsa.topk_remap(*picked, blocks, start, **kwargs)
    got = topk_positions(x, end, blocks, start, topk=25, **kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    alone = topk_remap(*picked, blocks, start, **kwargs)
    torch.testing.assert_close(alone, want, rtol=0, atol=0)
    loose = topk_positions(x, end, blocks, start, topk=25, sorted=False, **kwargs)
    torch.testing.assert_close(
        by_column(*loose), by_column(*want), rtol=0, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("sorted", [True, False])
def test_survivors_that_repeat_end(
    sorted: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Inductor runs the kernels of a package once, one by one, on memory full of zeros."""

    def zeros(source: Any, starts: Any, ends: Any, survivors: Tensor, *rest: Any) -> None:
        survivors.zero_()

    monkeypatch.setattr(triton_topk, "_launch_select", zeros)
    out = (torch.ones(3, 2, 6, device=device), torch.full((3, 2, 6), -7, device=device).int())
    first = tuple(x[:1] for x in out)
    select_rows(
        "topk", torch.randn(1, 2, 40, device=device), topk=6, ends=None, sorted=sorted, out=first
    )
    assert all((x[:1] == 0).all() for x in out)
    assert (out[0][1:] == 1).all() and (out[1][1:] == -7).all()


def test_remap_finds_empty_slots_anywhere(device: str) -> None:
    columns = torch.tensor([[[-1, 3, -1, 0]]], dtype=torch.int32, device=device)
    values = torch.tensor([[[9.0, 1.0, 9.0, 2.0]]], device=device)
    blocks = torch.tensor([[[4]]], dtype=torch.int32, device=device)
    kwargs = {"num_positions": 20, "sparse_block": 4}
    got = topk_remap(values, columns, blocks, **kwargs)
    want = torch.ops.dsa.topk_remap(values, columns, blocks, **kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_limits_are_named(device: str) -> None:
    x, end = torch.zeros(1, 1, 5000, device=device), torch.tensor([[1]], device=device)
    with pytest.raises(ValueError, match="4097"):
        topk(x, end, topk=4097)
    with pytest.raises(TypeError, match="float64"):
        topk(x.double(), end, topk=4)


def test_symbolic_rows_are_reduced_a_fixed_number_of_times() -> None:
    """Without a guard: one compiled graph serves every length."""
    environment = ShapeEnv()
    wide = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=environment)
    x = mode.from_tensor(torch.empty(1, 37, 41_000), symbolic_context=wide)
    for width, again in ((x.shape[2], True), (16_384, False)):
        first = split_rows(x.shape[1], width, 1024, None)
        second = split_again(x.shape[1], first.parts * 1024, 1024, 1, None)
        assert isinstance(second.parts, torch.SymInt) == again
        third = split_again(x.shape[1], second.parts * 1024, 1024, 2, None)
        assert isinstance(third.parts, int) and third.parts == 1
    assert environment.guards == []
