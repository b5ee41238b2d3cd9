"""Keys into pages and out again, against torch's own norms and caches read byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from . import serving_oracle as oracle
from .serving_samples import filled_cache, token_bytes

provider = pytest.mark.parametrize("provider", ["dsa", "dsa_cpu"])
quant_format = pytest.mark.parametrize("quant", ["fp8", "mxfp4"])


def ops(provider: str) -> Any:
    return getattr(torch.ops, provider)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@provider
@quant_format
@pytest.mark.parametrize("page", [1, 16, 64])
def test_keys_are_written_where_the_slots_say(provider: str, quant: str, page: int) -> None:
    k, pages = draw(0, 20, 64), 70 // page + 1
    cache = filled_cache(pages, page, 64, quant, 3)
    room = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)
    room[room.numel() - 16 :] = 77
    before = cache.clone()
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(1))[:20]
    slots[4], slots[9], slots[13] = -1, pages * page, -(2**40)
    ops(provider).indexer_k_quant_and_cache(k, cache, slots, quant=quant)
    values, scales = ops(provider).indexer_k_quant(k, quant=quant)
    written = {int(s): n for n, s in enumerate(slots.tolist()) if 0 <= s < pages * page}
    for slot in range(pages * page):
        got = oracle.token(cache, slot // page, slot % page, quant)
        if slot in written:
            n = written[slot]
            if quant == "fp8":
                want = values[n].double() * scales[n].double()
            else:
                codes = [c for b in values[n].tolist() for c in (b & 15, b >> 4)]
                size = torch.tensor([oracle.E2M1[c & 7] * (-1 if c & 8 else 1) for c in codes])
                want = size.double() * 2.0 ** (scales[n].double() - 127).repeat_interleave(32)
        else:
            want = oracle.token(before, slot // page, slot % page, quant)
        assert torch.equal(got, want), slot
    assert bool((room[room.numel() - 16 :] == 77).all()), "written past the last page"


@provider
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_torchs(provider: str, norm: str, dtype: torch.dtype) -> None:
    k = (draw(0, 30, 64) * 3 + 1).to(dtype)
    weight, bias = draw(1, 64), draw(2, 64)
    if norm == "layer":
        want = torch.nn.functional.layer_norm(k.float(), (64,), weight, bias, 1e-6)
    else:
        want = torch.nn.functional.rms_norm(k.float(), (64,), weight, 1e-6) + bias
    more = {"norm": norm, "norm_weight": weight, "norm_bias": bias}
    values, scales = ops(provider).indexer_k_quant(k, **more)
    plain = ops(provider).indexer_k_quant(want.to(dtype))
    # Rounding of the mean moves a few numbers by one step of e4m3.
    got, near = (v.float() * s[:, None] for v, s in ((values, scales), plain))
    assert float((got != near).float().mean()) < 0.01
    torch.testing.assert_close(got, near, rtol=0.13, atol=float(scales.max()))


@provider
@quant_format
def test_rotation_is_that_of_the_queries(provider: str, quant: str) -> None:
    k, cos, sin = draw(0, 12, 64), draw(1, 40, 8), draw(2, 40, 8)
    positions = torch.arange(12) * 3
    turned = {"rope": "interleaved", "rope_start": 48, "hadamard": True, "quant": quant}
    got = ops(provider).indexer_k_quant(k, cos=cos, sin=sin, positions=positions, **turned)
    want = torch.ops.dsa.fused_indexer_q(
        k[None, :, None],
        torch.ones(1, 12, 1),
        cos=cos,
        sin=sin,
        positions=positions[None],
        **turned,
    )
    assert torch.equal(got[0].view(torch.uint8), want[0][0, :, 0].view(torch.uint8))
    assert torch.equal(got[1], want[1][0, :, 0])
    lines = ops(provider).indexer_k_quant(k, cos=cos[positions], sin=sin[positions], **turned)
    assert torch.equal(lines[1], got[1])


@provider
@quant_format
def test_a_workspace_is_packed_request_by_request(provider: str, quant: str) -> None:
    page, pages = 16, 9
    cache = filled_cache(pages, page, 64, quant, 5)
    table = torch.tensor([[4, 0, 7], [2, -1, 99], [1, 3, 8], [6, 6, 6]], dtype=torch.int32)
    starts = torch.tensor([0, 33, 33 + 40, 33 + 40, 33 + 40 + 7], dtype=torch.int32)
    values, scales = ops(provider).gather_indexer_k(
        cache, table, starts, num_tokens=85, quant=quant
    )
    for t in range(85):
        owner = next((r for r in range(4) if starts[r] <= t < starts[r + 1]), None)
        got = values[t].float()
        if quant == "fp8":
            key = got.double() * scales[t].double()
        else:
            codes = [c for b in values[t].tolist() for c in (b & 15, b >> 4)]
            size = torch.tensor([oracle.E2M1[c & 7] * (-1 if c & 8 else 1) for c in codes])
            key = size.double() * 2.0 ** (scales[t].double() - 127).repeat_interleave(32)
        place = -1 if owner is None else t - int(starts[owner])
        where = -1 if owner is None else int(table[owner, place // page])
        if 0 <= where < pages:
            assert torch.equal(key, oracle.token(cache, where, place % page, quant)), t
        else:
            assert not bool(got.any()) and not bool(scales[t].float().any()), t


@provider
@quant_format
def test_nothing_to_write_or_read(provider: str, quant: str) -> None:
    width = token_bytes(32, quant)
    empty = torch.zeros(0, 16, width, dtype=torch.uint8)
    one = torch.zeros(1, dtype=torch.int64)
    ops(provider).indexer_k_quant_and_cache(torch.ones(1, 32), empty, one, quant=quant)
    cache = torch.zeros(2, 16, width, dtype=torch.uint8)
    ops(provider).indexer_k_quant_and_cache(torch.ones(0, 32), cache, one[:0], quant=quant)
    assert not bool(cache.any())
    starts = torch.tensor([0, 3])
    for have, table in ((empty, one[None]), (cache, torch.zeros(1, 0, dtype=torch.int64))):
        values, scales = ops(provider).gather_indexer_k(
            have, table, starts, num_tokens=3, quant=quant
        )
        assert not bool(values.view(torch.uint8).any()) and not bool(scales.any())
