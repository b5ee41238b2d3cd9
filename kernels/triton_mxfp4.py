"""fp8 and MXFP4 inside kernels: rows to codes and scales, and codes back to numbers.

An e2m1 code is a sign, two bits of exponent and one of mantissa. Moved to the top of a bf16 or fp32
exponent field it is the same number times 2**-126, subnormal codes included, so that two products
with powers of two widen it exactly.

e5m2 holds the numbers of a whole vector exactly, too, divided by one power of two, where the scales
of its groups lie within 2**26 of the largest; smaller ones count as 2**-26 of that. The largest
becomes 2**13.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two_above(x):
    """The smallest power of two that is not below a positive fp32 number; NaN stays."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Largest magnitude of fp32 numbers along an axis; NaN above all."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp8_code(x):
    """e4m3 codes [uint8] of fp32 numbers in [-448, 448] or NaN, by integers."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 121)
    # In units of the last place, of which a number has at most 16.
    unit = (257 - exponent) << 23
    units = tl.abs(x) * unit.to(tl.float32, bitcast=True)
    units = ((units + 8388608.0) - 8388608.0).to(tl.int32)
    # Rounding up to the next power of two carries into the exponent by itself.
    code = units + ((exponent - 121) << 3)
    code = tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def fp8_rows(x, floor, POW2: tl.constexpr, INTEGERS: tl.constexpr):
    """e4m3 codes [uint8] of rows [ROWS, DIM] fp32, and their scales [ROWS]."""
    amax = tl.maximum(largest(x, 1), floor, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(amax, 448.0)
    if POW2:
        scale = power_of_two_above(scale)
        x = x * tl.div_rn(1.0, scale)[:, None]
    else:
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTEGERS:
        # The interpreter does not round to nearest, and GPUs before sm_89 know no fp8.
        codes = _fp8_code(x)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes, scale


@triton.jit
def mxfp4_rows(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Packed e2m1 codes [ROWS, DIM / 2] and UE8M0 scales [ROWS, DIM / 32], uint8, of fp32 rows."""
    groups = tl.reshape(x, [ROWS, DIM // 32, 32])
    # 6 * 2**-126, below which a scale would not be a normal number.
    amax = tl.maximum(largest(groups, 2), 7.052966104933725e-38, propagate_nan=tl.PropagateNan.ALL)
    scale = power_of_two_above(tl.div_rn(amax, 6.0))
    x = groups * tl.div_rn(1.0, scale)[:, :, None]
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    code = tl.where(x != x, 0, code)
    low, high = tl.split(tl.reshape(code, [ROWS, DIM // 2, 2]))
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (low | (high << 4)).to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def ue8m0(byte):
    """fp32 scales of UE8M0 bytes; 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code, scale):
    """fp32 numbers of the codes in the low four bits of int32, times fp32 scales."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    # 2**126; the product is exact, and no scale times it would be.
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale


@triton.jit
def widen(packed, scale, TYPE: tl.constexpr, FAST: tl.constexpr):
    """Numbers of the low and of the high nibbles of ``packed`` [uint8], in ``TYPE``.

    Args:
        scale: fp32 powers of two of the same shape.
        FAST: four bytes at a time, as bf16 (``TYPE``) and with instructions of sm_80.
    """
    if FAST:
        # Bytes move to 16-bit lanes. A product with two powers of two puts a nibble's sign at bit
        # 15 and the rest at bits 8 to 6, where it is a bf16 number too small by 2**126 (0x7E80).
        # Adding -0.0 keeps the signs of zeros.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 lane, some, up, zero;
            mov.b32 up, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            prmt.b32 lane, $4, 0, 0x4140;
            and.b32 some, lane, 0x000F000F;
            mul.lo.u32 some, some, 0x1040;
            and.b32 some, some, 0x81C081C0;
            fma.rn.bf16x2 some, some, up, zero;
            fma.rn.bf16x2 $0, some, $5, zero;
            and.b32 some, lane, 0x00F000F0;
            mul.lo.u32 some, some, 0x104;
            and.b32 some, some, 0x81C081C0;
            fma.rn.bf16x2 some, some, up, zero;
            fma.rn.bf16x2 $2, some, $5, zero;
            prmt.b32 lane, $4, 0, 0x4342;
            and.b32 some, lane, 0x000F000F;
            mul.lo.u32 some, some, 0x1040;
            and.b32 some, some, 0x81C081C0;
            fma.rn.bf16x2 some, some, up, zero;
            fma.rn.bf16x2 $1, some, $6, zero;
            and.b32 some, lane, 0x00F000F0;
            mul.lo.u32 some, some, 0x104;
            and.b32 some, some, 0x81C081C0;
            fma.rn.bf16x2 some, some, up, zero;
            fma.rn.bf16x2 $3, some, $6, zero;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        code = packed.to(tl.int32)
        low, high = _e2m1(code, scale).to(TYPE), _e2m1(code >> 4, scale).to(TYPE)
    return low, high


@triton.jit
def largest_byte(word):
    """The largest of the four bytes of int32 words."""
    # Each byte in turn on top of the word: shifts to the left and two comparisons.
    top = word.to(tl.uint32, bitcast=True)
    top = tl.maximum(tl.maximum(top, top << 8), tl.maximum(top << 16, top << 24))
    return (top >> 24).to(tl.int32)


@triton.jit
def byte_of(word, turn):
    """The byte ``turn``, counted from the lowest, of int32 words, in one instruction."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;",
        "=r,r,r",
        [word, turn + 0x4440],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def scale_step(byte, most):
    """How far UE8M0 scales lie below the largest of their vector [int32], -26 to 0."""
    return tl.maximum(byte.to(tl.int32) - most.to(tl.int32), -26)


@triton.jit
def widen_relative(packed, scale, most):
    """e5m2 numbers of the low and of the high nibbles of ``packed`` [uint8], by fp32 arithmetic.

    Args:
        scale, most: UE8M0 bytes of the codes' groups, and the largest of their vector's.
    """
    power = ((scale_step(scale, most) + 140) << 23).to(tl.float32, bitcast=True)
    code = packed.to(tl.int32)
    low, high = _e2m1(code, power), _e2m1(code >> 4, power)
    return low.to(tl.float8e5), high.to(tl.float8e5)


@triton.jit
def widen_relative_fast(packed, step):
    """The same, four bytes at a time.

    Args:
        step: ``scale_step`` of each byte; four bytes that a thread holds in a row share one.
    """
    # The codes of e5m2 for the eight sizes are looked up in two registers; a step of the scale adds
    # 4 to each but that of 0. Signs are put back at bit 7 of each byte.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 small, large, some, other, first, second;
        mad.lo.u32 small, $3, 0x04040400, 0x72706C00;
        mad.lo.u32 large, $3, 0x04040404, 0x7A787674;
        and.b32 some, $2, 0x77777777;
        shr.u32 other, some, 16;
        prmt.b32 first, small, large, some;
        prmt.b32 second, small, large, other;
        prmt.b32 some, first, second, 0x6420;
        prmt.b32 other, first, second, 0x7531;
        shl.b32 first, $2, 4;
        lop3.b32 $0, first, 0x80808080, some, 0xEA;
        lop3.b32 $1, $2, 0x80808080, other, 0xEA;
        }
        """,
        "=&r,=&r,r,r,r,r,r",
        [packed, step],
        dtype=(tl.float8e5, tl.float8e5),
        is_pure=True,
        pack=4,
    )
