"""Pages of quantised keys: their bytes, what fits and what is refused, rows of a chunk."""

from __future__ import annotations

import math

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_compile.kernels  # noqa: F401 (registers the ops)
from dsa_compile.errors import DsaError
from dsa_compile.layout import (
    COLUMNS,
    HEAD_DIM,
    PAGE_SIZES,
    STEP,
    TOKENS,
    LayoutError,
    PageLayout,
    check_cache,
    chunk_rows,
    page_bytes,
    row_share,
    sparse_block,
    stride_step,
    token_bytes,
)


def test_a_position_takes_132_bytes_in_fp8_and_68_in_mxfp4() -> None:
    assert token_bytes("fp8").subs(HEAD_DIM, 128) == 132
    assert token_bytes("mxfp4").subs(HEAD_DIM, 128) == 68


@pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("alignment", [1, 16, 96, 512, 576, 4096])
def test_page_bytes_are_the_smallest_multiple_that_holds_a_page(
    quant: str, page: int, alignment: int
) -> None:
    layout = PageLayout(page, 128, quant, stride_step(page_alignment=alignment))
    step = math.lcm(512, alignment)
    assert layout.step == step and layout.page_bytes % step == 0
    assert layout.used_bytes <= layout.page_bytes < layout.used_bytes + step
    formula = page_bytes(quant).subs({TOKENS: page, HEAD_DIM: 128, STEP: step})
    assert formula == layout.page_bytes
    assert layout.padding == pytest.approx(layout.page_bytes / layout.used_bytes - 1)


def test_known_pages() -> None:
    fp8 = PageLayout(64, 128, "fp8")
    assert (fp8.used_bytes, fp8.page_bytes, fp8.scale_offset) == (8448, 8704, 8192)
    assert fp8.cache_bytes(65) == 2 * 8704 and fp8.pages(0) == 0
    assert "256 of padding, 3.0%" in str(fp8)
    mxfp4 = PageLayout(64, 128, "mxfp4", stride_step("triton"))
    assert (mxfp4.used_bytes, mxfp4.page_bytes, mxfp4.scale_offset) == (4352, 4352, 4096)
    assert mxfp4.padding == 0.0


def test_a_provider_may_ask_for_less() -> None:
    assert stride_step("triton") == 16 and stride_step("triton", 24) == 48
    assert stride_step("deepgemm") == stride_step() == 512
    with pytest.raises(LayoutError, match="provider 'tritn' has no known layout"):
        stride_step("tritn")
    with pytest.raises(LayoutError, match="page_alignment must be at least 1 byte, got 0"):
        stride_step(page_alignment=0)


def test_sizes_may_stay_symbols() -> None:
    pages = sympy.Symbol("pages", positive=True, integer=True)
    total = pages * page_bytes("mxfp4")
    assert total.free_symbols == {pages, TOKENS, HEAD_DIM, STEP}
    assert total.subs({pages: 3, TOKENS: 16, HEAD_DIM: 128, STEP: 512}) == 3 * 1536


@pytest.mark.parametrize(
    "args, pattern",
    [
        ((0, 128), "tokens must be at least 1, got 0"),
        ((64, 126), "head_dim must be a multiple of 4 for fp8, got 126"),
        ((64, 80, "mxfp4"), "head_dim must be a multiple of 32 for mxfp4, got 80"),
        ((64, 128, "int8"), "quant must be one of fp8, mxfp4, got 'int8'"),
        ((64, 128, "fp8", 0), "step must be at least 1"),
    ],
)
def test_bad_layouts_are_refused(args: tuple[object, ...], pattern: str) -> None:
    with pytest.raises(LayoutError, match=pattern):
        PageLayout(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
def test_a_new_cache_fits_and_is_what_the_ops_take(quant: str) -> None:
    layout = PageLayout(16, 64, quant)
    cache = layout.new_cache(3)
    check_cache("cache", cache, layout)
    k = torch.randn(5, 64)
    slots = torch.tensor([0, 17, 47, -1, 20])
    torch.ops.dsa.indexer_k_quant_and_cache(k, cache, slots, quant=quant)
    raw = cache.as_strided((3, layout.page_bytes), (layout.page_bytes, 1))
    assert bool(raw[0, : layout.used_bytes].any())
    assert not bool(raw[:, layout.used_bytes :].any())
    table = torch.tensor([[0, 1, 2]])
    values, _ = torch.ops.dsa.gather_indexer_k(
        cache, table, torch.tensor([0, 48]), num_tokens=48, quant=quant
    )
    wanted, _ = torch.ops.dsa.indexer_k_quant(k, quant=quant)
    got = values.view(torch.uint8)[torch.tensor([0, 17, 47, 20])]
    assert torch.equal(got, wanted.view(torch.uint8)[torch.tensor([0, 1, 2, 4])])


def laid_out(stride: int, offset: int = 0, pages: int = 2) -> torch.Tensor:
    room = torch.zeros(pages * stride + 8704 + offset, dtype=torch.uint8)
    return room[offset:].as_strided((pages, 64, 132), (stride, 132, 1), offset)


@pytest.mark.parametrize(
    "cache, provider, pattern",
    [
        (laid_out(8448), None, "8448 bytes is no multiple of 512; allocate pages 8704 .*3.0%"),
        (laid_out(8448 + 128), "deepgemm", "no multiple of 512; allocate pages 8704"),
        (laid_out(8192), "triton", "pages overlap: 8448 bytes each, 8192 bytes apart"),
        (laid_out(8704, 8), "triton", "does not begin at a multiple of 16 bytes"),
        (laid_out(8704).transpose(1, 2), "triton", r"must be uint8 \[pages, 64, 132\]"),
        (laid_out(8704).float(), "triton", "must be uint8"),
        (torch.zeros(2, 132, 64, dtype=torch.uint8).mT, "triton", "pages are not contiguous"),
    ],
)
def test_a_cache_that_does_not_fit_is_named(
    cache: torch.Tensor, provider: str | None, pattern: str
) -> None:
    layout = PageLayout(64, 128, "fp8", 16 if provider == "triton" else 512)
    with pytest.raises(LayoutError, match=f"(?s)layers.3.key_cache.*{pattern}") as caught:
        check_cache("layers.3.key_cache", cache, layout, provider)
    assert isinstance(caught.value, DsaError)


def test_a_stride_on_smaller_steps_serves_triton() -> None:
    check_cache("cache", laid_out(8448), PageLayout(64, 128, "fp8", 16), "triton")
    check_cache("cache", laid_out(9216), PageLayout(64, 128, "fp8"))


def test_a_cache_without_memory_is_checked_too() -> None:
    layout = PageLayout(64, 128, "fp8")
    with FakeTensorMode() as mode:
        check_cache("cache", mode.from_tensor(laid_out(8704)), layout)
        with pytest.raises(LayoutError, match="cache cannot be read in place.*\n.*multiple of 16"):
            check_cache("cache", mode.from_tensor(laid_out(8704, 8)), layout)


@pytest.mark.parametrize("size, block", [(8, 8), (16, 16), (24, 8), (32, 16), (48, 16), (64, 16)])
def test_sparse_block(size: int, block: int) -> None:
    assert sparse_block(size) == block


@pytest.mark.parametrize("size", [0, -8, 1, 4, 12, 20])
def test_no_sparse_block(size: int) -> None:
    with pytest.raises(LayoutError, match=f"layer 24: block_size = {size}"):
        sparse_block(size, "layer 24: block_size")


def test_a_chunk_is_budgeted_by_its_columns() -> None:
    """16,384 bf16 columns are half of as many fp32 scores, whatever the context."""
    assert row_share().subs(COLUMNS, 16384) == 8192
    assert chunk_rows(512 << 20, 16384) == 16384
    assert chunk_rows(512 << 20, 16384, itemsize=4) == 8192
    assert chunk_rows(32768 * 3 + 5, 16384) == 3
    with pytest.raises(LayoutError, match="chunk_bytes = 100 bytes hold no row of 16384 scores"):
        chunk_rows(100, 16384)
    with pytest.raises(LayoutError, match="got 0 columns"):
        chunk_rows(100, 0)
