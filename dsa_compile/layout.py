"""How indexer keys lie in memory: bytes of a page, its stride, what padding costs, rows of a chunk.

A page holds the values of all its tokens and then all their scales, and pages lie a stride apart.
Kernels that read pages by TMA want the stride on steps of their own: 512 bytes serve every release
of DeepGEMM, 128 those from 2.8.2 on. The formulas are sympy's, so that sizes may stay symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dsa_compile.errors import DsaError

TOKENS, HEAD_DIM, STEP = sympy.symbols("tokens head_dim step", positive=True, integer=True)
POSITIONS, COLUMNS, ITEMSIZE, BUDGET = sympy.symbols(
    "positions columns itemsize budget", positive=True, integer=True
)

VALUE_BYTES = {"fp8": HEAD_DIM, "mxfp4": HEAD_DIM / 2}
"""Bytes of the values of a token."""

SCALE_BYTES = {"fp8": sympy.Integer(4), "mxfp4": HEAD_DIM / 32}
"""Bytes of the scales of a token: one fp32, or one UE8M0 byte for 32 values."""

ROW_BYTES = COLUMNS * ITEMSIZE
"""Bytes of the scores of a query row; of a sparse one, its columns are those of its candidates."""

PAGE_SIZES = (16, 32, 64, 128)
STRIDE_STEP = 512
STEPS = {"triton": 16, "deepgemm": 512, "deepselect": 512, "cpu": 4, "reference": 4}
"""Bytes that each provider's kernels want page strides to be a multiple of, in any release."""

_BASE = {"triton": 16, "deepgemm": 16, "deepselect": 16, "cpu": 4, "reference": 4}
_LARGEST_STRIDE = {"deepgemm": 2**31, "deepselect": 2**31}


class LayoutError(DsaError, ValueError):
    """A tensor does not lie as the kernels need it, or a size cannot be laid out."""


def token_bytes(quant: str) -> sympy.Expr:
    """Bytes of a token, in terms of ``HEAD_DIM``."""
    return VALUE_BYTES[_format(quant)] + SCALE_BYTES[quant]


def page_bytes(quant: str) -> sympy.Expr:
    """Bytes from one page to the next, in terms of ``TOKENS``, ``HEAD_DIM`` and ``STEP``."""
    return sympy.ceiling(TOKENS * token_bytes(quant) / STEP) * STEP


def stride_step(provider: str | None = None, page_alignment: int = 1) -> int:
    """Bytes that a page stride must be a multiple of.

    Args:
        provider: whose kernels read the pages; None for any provider's, which is 512 bytes.
        page_alignment: what the allocator of the cache asks for besides.

    Raises:
        LayoutError: the provider is not known, or the alignment not positive.
    """
    if page_alignment < 1:
        raise LayoutError(f"page_alignment must be at least 1 byte, got {page_alignment}")
    if provider is not None and provider not in STEPS:
        known = ", ".join(STEPS)
        raise LayoutError(f"provider {provider!r} has no known layout; known are {known}")
    step = STRIDE_STEP if provider is None else STEPS[provider]
    return int(sympy.ilcm(step, page_alignment))


@dataclass(frozen=True)
class PageLayout:
    """Pages of quantised indexer keys.

    Attributes:
        tokens: of a page.
        head_dim: of a key.
        quant: ``"fp8"`` or ``"mxfp4"``.
        step: bytes that the stride is a multiple of; see :func:`stride_step`.

    Raises:
        LayoutError: names the size that cannot be laid out.
    """

    tokens: int
    head_dim: int
    quant: str = "fp8"
    step: int = STRIDE_STEP

    def __post_init__(self) -> None:
        multiple = {"fp8": 4, "mxfp4": 32}[_format(self.quant)]
        for name, least in (("tokens", 1), ("head_dim", multiple), ("step", 1)):
            if getattr(self, name) < least:
                raise LayoutError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.head_dim % multiple:
            raise LayoutError(
                f"head_dim must be a multiple of {multiple} for {self.quant}, got {self.head_dim}"
            )

    def _value(self, formula: sympy.Expr) -> int:
        sizes = {TOKENS: self.tokens, HEAD_DIM: self.head_dim, STEP: self.step}
        return int(formula.subs(sizes))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self._value(token_bytes(self.quant))

    @property
    def used_bytes(self) -> int:
        """Bytes of a page that hold something."""
        return self.tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self._value(page_bytes(self.quant))

    @property
    def scale_offset(self) -> int:
        """Where in a page the scales begin."""
        return self.tokens * self._value(VALUE_BYTES[self.quant])

    @property
    def padding(self) -> float:
        """What the padding costs, as a share of the bytes in use."""
        return self.page_bytes / self.used_bytes - 1

    def pages(self, positions: int) -> int:
        """Pages that hold ``positions`` tokens of one request."""
        return -(-positions // self.tokens)

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the pages of ``positions`` tokens of one request."""
        return self.pages(positions) * self.page_bytes

    def new_cache(self, pages: int, device: torch.device | str | None = None) -> Tensor:
        """A zeroed cache uint8 [pages, tokens, bytes of a token] with this layout's stride."""
        room = torch.zeros(pages * self.page_bytes, dtype=torch.uint8, device=device)
        shape = (pages, self.tokens, self.token_bytes)
        return room.as_strided(shape, (self.page_bytes, self.token_bytes, 1))

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of {self.token_bytes} bytes in pages {self.page_bytes} bytes "
            f"apart ({self.page_bytes - self.used_bytes} of padding, {self.padding:.1%})"
        )


def check_cache(name: str, cache: Tensor, layout: PageLayout, provider: str | None = None) -> None:
    """Raises unless a cache lies as ``layout`` says and as a provider's kernels can read it.

    A stride larger than the layout's is well if it is on the layout's steps.

    Args:
        name: of the tensor, for the message.
        cache: [pages, tokens, bytes of a token].
        provider: whose kernels read it; None for any provider's.

    Raises:
        LayoutError: lists everything that does not fit, by the tensor's name.
    """
    wanted = (layout.tokens, layout.token_bytes)
    if cache.dtype != torch.uint8 or cache.dim() != 3 or tuple(cache.shape[1:]) != wanted:
        raise LayoutError(
            f"{name} must be uint8 [pages, {wanted[0]}, {wanted[1]}], "
            f"got {cache.dtype} {tuple(cache.shape)}"
        )
    faults = []
    stride, within, byte = cache.stride()
    if byte != 1 or within != layout.token_bytes:
        faults.append(f"its pages are not contiguous (strides {cache.stride()})")
    step = int(sympy.ilcm(layout.step, stride_step(provider)))
    if cache.shape[0] > 1:
        fitting = -(-max(stride, layout.used_bytes) // step) * step
        if stride < layout.used_bytes:
            faults.append(
                f"its pages overlap: {layout.used_bytes} bytes each, {stride} bytes apart; "
                f"allocate them {fitting} bytes apart"
            )
        elif stride % step:
            faults.append(
                f"its page stride of {stride} bytes is no multiple of {step}; allocate pages "
                f"{fitting} bytes apart ({fitting / layout.used_bytes - 1:.1%} more memory than "
                "the keys take)"
            )
        elif stride >= _LARGEST_STRIDE.get(provider or "deepgemm", 2**63):
            faults.append(f"its page stride of {stride} bytes does not fit 32 bits")
    base = _BASE.get(provider or "deepgemm", 16)
    if _start(cache) % base:
        faults.append(f"it does not begin at a multiple of {base} bytes")
    if faults:
        raise LayoutError("\n  ".join([f"{name} cannot be read in place:", *faults]))


def _start(tensor: Tensor) -> int:
    """Address of a tensor, or its place in its storage where there is no memory yet."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return int(tensor.storage_offset() * tensor.element_size())
    return tensor.data_ptr()


def sparse_block(block_size: int, name: str = "block_size") -> int:
    """Positions of a block that the sparse scorers gather: the largest of 16 and 8 that divides
    the candidates' block.

    Raises:
        LayoutError: neither divides it; the message has ``name``.
    """
    for size in (16, 8):
        if block_size > 0 and block_size % size == 0:
            return size
    raise LayoutError(
        f"{name} = {block_size}: candidate blocks must be a multiple of 8 positions for the "
        "kernels that gather blocks of 8 or 16"
    )


def row_share(itemsize: int = 2) -> sympy.Expr:
    """A sparse row of ``COLUMNS`` scores, in units of an fp32 score."""
    return ROW_BYTES.subs(ITEMSIZE, itemsize) / 4


def chunk_rows(budget: int, columns: int, *, itemsize: int = 2, name: str = "chunk_bytes") -> int:
    """Query rows of a prefill chunk whose scores fit a budget, at the sparse width.

    Args:
        budget: bytes for scores.
        columns: candidate columns of a row, not positions of the context.
        itemsize: bytes of a score; 2 for the bf16 of DeepGEMM.
        name: of the option that holds the budget, for the message.

    Raises:
        LayoutError: not even one row fits.
    """
    if columns < 1 or itemsize < 1:
        raise LayoutError(f"a row needs columns and bytes, got {columns} columns of {itemsize}")
    sizes: dict[Any, int] = {BUDGET: budget, COLUMNS: columns, ITEMSIZE: itemsize}
    rows = int(sympy.floor(BUDGET / ROW_BYTES).subs(sizes))
    if rows < 1:
        raise LayoutError(
            f"{name} = {budget} bytes hold no row of {columns} scores, which takes "
            f"{columns * itemsize}"
        )
    return rows


def _format(quant: str) -> str:
    if quant not in VALUE_BYTES:
        known = ", ".join(VALUE_BYTES)
        raise LayoutError(f"quant must be one of {known}, got {quant!r}")
    return quant
