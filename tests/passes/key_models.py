"""Decode steps that write their new keys into fused pages, and score all keys of the pages then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from paged_models import Paged, fused_fp8, fused_mxfp4
from pass_models import captured
from query_models import ROTATIONS, by_matrix, fp8
from torch import Tensor, fx, nn

from dsa_compile.passes.graph_tools import called_op
from dsa_compile.passes.pipeline import PipelineResult, run_pipeline

DIM, ROTARY, HIDDEN, HEADS, PAGE, PAGES, EPS = 32, 16, 24, 16, 16, 7, 1e-6

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]

# -- writes of codes [N, ..] and scales [N, ..], bytes both, into a cache at slots [N] ------------


def at_tokens(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Pages and tokens of views of both parts of the pages."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    at = (slots // page, slots % page)
    flat[:, :size].view(pages, page, -1)[at] = codes
    flat[:, size:].view(pages, page, -1)[at] = scales


def as_numbers(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Likewise through views of fp8 and fp32."""
    pages, page, _ = cache.shape
    flat, size = cache.view(pages, -1), page * codes.shape[1]
    at = (slots // page, slots % page)
    values = flat[:, :size].view(torch.float8_e4m3fn).view(pages, page, -1)
    values[at] = codes.view(torch.float8_e4m3fn)
    flat[:, size:].view(torch.float32)[at] = scales.view(torch.float32).squeeze(-1)


def offsets(cache: Tensor, width: int, first: int, slots: Tensor) -> Tensor:
    """Byte offsets [N, width] in the flattened cache, ``first`` bytes into each page."""
    page, bytes_of_token = cache.shape[1:]
    start = slots // page * (page * bytes_of_token) + first + slots % page * width
    return start[:, None] + torch.arange(width)


def at_bytes(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    flat, size = cache.view(-1), cache.shape[1] * codes.shape[1]
    flat[offsets(cache, codes.shape[1], 0, slots).flatten()] = codes.flatten()
    flat[offsets(cache, scales.shape[1], size, slots).flatten()] = scales.flatten()


def by_index_copy(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    flat, size = cache.view(-1), cache.shape[1] * codes.shape[1]
    flat.index_copy_(0, offsets(cache, codes.shape[1], 0, slots).flatten(), codes.flatten())
    flat.index_copy_(0, offsets(cache, scales.shape[1], size, slots).flatten(), scales.flatten())


def by_scatter(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    size = cache.shape[1] * codes.shape[1]
    first = offsets(cache, codes.shape[1], 0, slots)
    second = offsets(cache, scales.shape[1], size, slots)
    at, data = torch.cat([first, second], 1), torch.cat([codes, scales], 1)
    cache.view(-1).scatter_(0, at.flatten(), data.flatten())


def dropping(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """What has no slot goes into a page behind the last, which is cut off again."""
    pages, page, width = cache.shape
    wide = torch.cat([cache, cache.new_zeros(1, page, width)])
    at_tokens(wide, codes, scales, torch.where(slots < 0, pages * page, slots))
    cache.copy_(wide[:pages])


def masked(cache: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """What has no slot is left out before the write."""
    real = slots >= 0
    at_tokens(cache, codes[real], scales[real], slots[real])


WRITES: dict[str, tuple[Write, str]] = {
    "at tokens": (at_tokens, "wrap"),
    "as numbers": (as_numbers, "wrap"),
    "at bytes": (at_bytes, "wrap"),
    "index_copy": (by_index_copy, "fail"),
    "scatter": (by_scatter, "fail"),
    "dropping": (dropping, "skip"),
    "masked": (masked, "skip"),
}
"""Name -> write, and what it does to a slot of -1."""

# -- formats: codes and scales of keys, as bytes -------------------------------------------------


def fp8_bytes(k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    codes, scale = fp8(k, **options)
    return codes.view(torch.uint8), scale.view(torch.uint8)


def mxfp4_bytes(k: Tensor) -> tuple[Tensor, Tensor]:
    """By the nearest of the eight magnitudes, ties to the even one."""
    groups = k.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 6.0)))
    y = (groups / scale).flatten(-2)
    size = y.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = code | (y < 0).to(torch.uint8) << 3
    packed = code[..., 0::2] | code[..., 1::2] << 4
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu).view(torch.uint8)


class KeyModel(nn.Module):
    """One indexer over fused pages: writes N new keys, then selects for three requests.

    Args:
        write: how codes and scales get into the cache.
        rotation: a name of ``query_models.ROTATIONS``, or None.
        hadamard: whether keys are transformed.
        norm: ``"layer"``, ``"rms"`` or None.
        quant: format of the pages.
        dtype: of the projection.
        held: whether the cache is a buffer, not an input.
    """

    def __init__(
        self,
        write: Write = at_tokens,
        *,
        rotation: str | None = "rotate half",
        hadamard: bool = False,
        norm: str | None = "layer",
        quant: str = "fp8",
        dtype: torch.dtype = torch.float32,
        held: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.rotation, self.hadamard = write, rotation, hadamard
        self.norm, self.quant = norm, quant
        self.wk = nn.Linear(HIDDEN, DIM, bias=False, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(DIM))
        self.bias = nn.Parameter(torch.randn(DIM))
        self.register_buffer("freqs", 1e2 ** -torch.linspace(0, 1, ROTARY // 2))
        self.register_buffer("cache", step(quant)[5] if held else None)
        self.scores = Paged(fused_fp8 if quant == "fp8" else fused_mxfp4, candidates=False)

    def normed(self, k: Tensor) -> Tensor:
        if self.norm == "layer":
            wide = nn.functional.layer_norm(k.float(), (DIM,), self.weight, self.bias, EPS)
        elif self.norm == "rms":
            wide = nn.functional.rms_norm(k.float(), (DIM,), self.weight, EPS)
        else:
            wide = k
        return wide.to(k.dtype)

    def turned(self, k: Tensor, positions: Tensor) -> Tensor:
        if self.rotation is not None:
            angle = positions[:, None].float() * self.freqs
            part, rest = k[:, :ROTARY], k[:, ROTARY:]
            part = ROTATIONS[self.rotation][0](part[None, :, None], angle)[0, :, 0]
            k = torch.cat([part, rest], -1).to(k.dtype)
        return by_matrix(k) if self.hadamard else k

    def quantised(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_bytes(k) if self.quant == "fp8" else mxfp4_bytes(k)

    def put(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        k = self.turned(self.normed(self.wk(x)), positions)
        self.write(cache, *self.quantised(k), slots)

    def forward(self, *inputs: Tensor) -> Any:
        x, q, w, positions, slots, cache, table, lens = inputs
        torch._check(slots.shape[0] == x.shape[0])
        torch._check(positions.shape[0] == x.shape[0])
        cache = cache if self.cache is None else self.cache
        self.put(cache, x, positions, slots)
        return self.scores(q, w, cache, table, lens, lens)


def step(
    quant: str = "fp8", keys: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """x, q, w, positions, slots, cache, table and lens; every slot is in range."""
    made = torch.Generator().manual_seed(seed)
    width = DIM + 4 if quant == "fp8" else DIM // 2 + DIM // 32
    cache = torch.zeros(PAGES, PAGE, width, dtype=torch.uint8)
    old = torch.randn(PAGES * PAGE, DIM, generator=made)
    torch.ops.dsa.indexer_k_quant_and_cache(old, cache, torch.arange(PAGES * PAGE), quant=quant)
    # No page twice: equal keys would tie.
    table = torch.stack([torch.randperm(PAGES, generator=made)[:4] for _ in range(3)])
    return (
        torch.randn(keys, HIDDEN, generator=made).to(dtype),
        torch.randn(3, 2, HEADS, DIM, generator=made),
        torch.randn(3, 2, HEADS, generator=made),
        torch.randint(0, 4000, (keys,), generator=made),
        torch.randperm(PAGES * PAGE, generator=made)[:keys],
        cache,
        table,
        torch.tensor([60, 20, 33]),
    )


class Several(nn.Module):
    """Steps side by side, each with a cache of its own behind the shared inputs."""

    def __init__(self, *steps: nn.Module) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, *inputs: Tensor) -> list[Any]:
        shared, caches = inputs[:7], inputs[7:]
        return [
            run(*shared[:5], cache, *shared[5:])
            for run, cache in zip(self.steps, caches, strict=True)
        ]


def steps(count: int, **options: Any) -> tuple[Tensor, ...]:
    """Inputs of ``Several``."""
    x, q, w, positions, slots, cache, table, lens = step(**options)
    return (x, q, w, positions, slots, table, lens, *(cache.clone() for _ in range(count)))


# -- what the tests look at ----------------------------------------------------------------------

ADDED = "its key write is one op: "
LEFT = "its key write is left as it is: "


def rewritten(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> PipelineResult:
    return run_pipeline(captured(model, *inputs, **options))


def writes(result: PipelineResult) -> list[fx.Node]:
    nodes = [n for n in result.graph_module.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if "indexer_k_quant_and_cache" in str(called_op(n))]


def notes(result: PipelineResult) -> list[str]:
    """What the report says of the key write of each site."""
    every = [[n for n in site.notes if n.startswith((ADDED, LEFT))] for site in result.sites]
    assert all(len(found) == 1 for found in every)
    return [found[0] for found in every]


def option(node: fx.Node, name: str) -> Any:
    given = {a.name: a.default_value for a in called_op(node)._schema.arguments}
    return node.kwargs.get(name, given[name])


def check(model: nn.Module, result: PipelineResult, inputs: tuple[Tensor, ...]) -> None:
    """Picks and all bytes of the caches, after the model and after the rewritten graph."""
    mine, theirs = (tuple(t.clone() for t in inputs) for _ in range(2))
    with torch.no_grad():
        new = result.graph_module(*mine)
        want = model(*theirs)
    want = want if isinstance(want, (list, tuple)) else [want]
    caches = [t for t in theirs if t.dtype == torch.uint8]
    for got, wanted in zip(new, [*caches, *want], strict=True):
        if wanted.dtype != torch.uint8:
            got, wanted = got.sort(-1).values, wanted.sort(-1).values
        assert torch.equal(got, wanted)
