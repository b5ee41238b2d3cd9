"""Round trips through fp8 and MXFP4 against torch's own casts and a search over all codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels import quantise
from dsa_compile.kernels.quantise import FP8

from . import serving_oracle as oracle


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-6, 7, shape, generator=generator)
    return torch.randn(*shape, generator=generator) * 2.0**size


def halfway() -> Tensor:
    """Every e4m3 number, the points halfway between them and their neighbours, both signs."""
    values = torch.tensor(oracle.E4M3)
    middle = (values[1:] + values[:-1]) / 2
    up, down = middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9))
    line = torch.cat((values, middle, up, down))
    return torch.cat((line, -line))


def test_fp8_is_torchs_own_cast_of_the_quotient() -> None:
    x = numbers(0, 50, 128)
    for power_of_two in (True, False):
        values, scale = quantise.quantise_fp8(x, power_of_two=power_of_two, floor=1e-4)
        quotient = (x / scale[:, None]).clamp(-448, 448)
        assert torch.equal(values.view(torch.uint8), quotient.to(FP8).view(torch.uint8))
        assert torch.equal(quantise.dequantise_fp8(values, scale), values.float() * scale[:, None])


def test_fp8_rounds_to_nearest_even() -> None:
    line = halfway()
    # A power of two as the largest number leaves the rest as they are: 448 has the scale 1.
    values, scale = quantise.quantise_fp8(
        torch.cat((torch.tensor([448.0]), line))[None], power_of_two=True, floor=1e-4
    )
    assert scale.item() == 1.0
    want = [oracle.nearest_code(float(x), oracle.E4M3) for x in line]
    got = values.view(torch.uint8)[0, 1:]
    assert (got & 0x7F).tolist() == want
    assert torch.equal(got >> 7, line.signbit().to(torch.uint8))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("floor", [1e-4, 1e-10])
def test_fp8_rows_equal_the_search(power_of_two: bool, floor: float) -> None:
    x = numbers(1, 6, 64)
    x[0] = 0
    x[1] *= 1e-9
    values, scale = quantise.quantise_fp8(x, power_of_two=power_of_two, floor=floor)
    for row in range(6):
        want, factor = oracle.fp8_row(x[row].tolist(), power_of_two, floor)
        assert scale[row].item() == factor
        assert (values[row].double() * factor).tolist() == want


def test_scales_at_powers_of_two() -> None:
    """448 * 2**e needs the scale 2**e exactly; the next number up needs twice that."""
    exact = torch.tensor([448.0 * 2.0**e for e in range(-20, 20)])
    above = exact.nextafter(torch.tensor(1e30)) * (1 + 2.0**-20)
    for amax, step in ((exact, 0), (above, 1)):
        _, scale = quantise.quantise_fp8(amax[:, None], power_of_two=True, floor=1e-10)
        assert scale.tolist() == [2.0 ** (e + step) for e in range(-20, 20)]


def test_e2m1_rounds_to_nearest_even() -> None:
    step = 1 / 64
    line = torch.arange(-8, 8 + step, step)
    near = torch.cat((line, line.nextafter(torch.tensor(9.0)), line.nextafter(torch.tensor(-9.0))))
    codes = quantise.encode_e2m1(near)
    want = [
        oracle.nearest_code(float(x), oracle.E2M1) | (8 if math.copysign(1, x) < 0 else 0)
        for x in near.tolist()
    ]
    assert codes.tolist() == want
    assert torch.equal(quantise.decode_e2m1(torch.arange(8)), torch.tensor(oracle.E2M1))
    every = torch.arange(16)
    assert torch.equal(quantise.encode_e2m1(quantise.decode_e2m1(every)).long(), every)


def test_mxfp4_equals_the_search_and_comes_back() -> None:
    x = numbers(2, 9, 96)
    x[0] = 0
    x[1, :32] = 1e-40
    x[2] *= 1e30
    packed, scale = quantise.quantise_mxfp4(x)
    assert packed.shape == (9, 48) and scale.shape == (9, 3) and packed.dtype == torch.uint8
    back = quantise.dequantise_mxfp4(packed, scale)
    for row in range(9):
        for group in range(3):
            part = x[row, 32 * group : 32 * group + 32].tolist()
            codes, byte = oracle.mxfp4_group(part)
            own = packed[row, 16 * group : 16 * group + 16].tolist()
            assert [c for b in own for c in (b & 15, b >> 4)] == codes
            assert int(scale[row, group]) == byte
            want = [(-1 if c & 8 else 1) * oracle.E2M1[c & 7] * 2.0 ** (byte - 127) for c in codes]
            assert back[row, 32 * group : 32 * group + 32].double().tolist() == want
    again = quantise.quantise_mxfp4(back)
    assert torch.equal(quantise.dequantise_mxfp4(*again), back)


def test_scale_bytes_are_torchs_float8_e8m0fnu() -> None:
    every = torch.arange(256).to(torch.uint8)
    values = quantise.byte_scales(every)
    assert torch.equal(values[:255], 2.0 ** (torch.arange(255).double() - 127).float())
    assert bool(values[255].isnan())
    assert torch.equal(quantise.scale_bytes(values), every)
    assert torch.equal(values[1:255].to(torch.float8_e8m0fnu).view(torch.uint8), every[1:255])


def test_codes_are_those_of_torchs_packed_type() -> None:
    """float4_e2m1fn_x2 keeps the first of two numbers in the low half of a byte."""
    packed, _ = quantise.quantise_mxfp4(numbers(3, 2, 64))
    typed = packed.view(torch.float4_e2m1fn_x2)
    assert typed.shape == packed.shape and torch.equal(typed.view(torch.uint8), packed)
    one = torch.zeros(1, 32)
    one[0, 0] = 6.0
    assert quantise.quantise_mxfp4(one)[0][0, 0] == 7


def test_missing_numbers_poison_their_group_alone() -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    back = quantise.dequantise_mxfp4(*quantise.quantise_mxfp4(x))
    assert bool(back[1, :32].isnan().all()) and bool((back[1, 32:] == 1).all())
    assert not bool(back[2, 32:].isfinite().any()) and bool((back[2, :32] == 1).all())
    values, scale = quantise.quantise_fp8(x, power_of_two=True, floor=1e-4)
    wide = quantise.dequantise_fp8(values, scale)
    assert bool(wide[1].isnan().all()) and not bool(wide[2].isfinite().any())
    assert bool((wide[0] == 1).all())
