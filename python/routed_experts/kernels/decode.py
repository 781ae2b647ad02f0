"""Numbers as quantized experts store them, inside a kernel: E4M3, two E2M1 codes a byte, and scales.

Bytes stand for E4M3 where the device has no instruction that converts it (below SM89): they are then shifted into the
place of a wider number's exponent and fraction, and a multiplication by a power of two corrects its bias. That is
exact, subnormal numbers included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.product import IS_INTERPRETED

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.

# Eight codes in four bytes, low nibble first, to their bfloat16 numbers: a permutation of bytes looks both bytes of
# four numbers up at a time. The mode of its selector's sign bit, which the codes' signs are, repeats a byte's sign:
# of 0x80 that leaves 0xFF for the negative ones, whose second bit is moved to the sign's place.
_E2M1_TO_BF16 = tl.constexpr("""
{
.reg .b32 size, high, sign, upper, lower;
and.b32 size, $4, 0x77777777;
prmt.b32 upper, 0x3F3F3F00, 0x40404040, size;
prmt.b32 lower, 0xC0800000, 0xC0804000, size;
prmt.b32 sign, 0x80808080, 0x80808080, $4;
shl.b32 sign, sign, 1;
lop3.b32 upper, upper, sign, 0x80808080, 0xF8;
prmt.b32 $0, upper, lower, 0x2604;
prmt.b32 $2, upper, lower, 0x3715;
shr.u32 size, size, 16;
shr.u32 high, $4, 16;
prmt.b32 upper, 0x3F3F3F00, 0x40404040, size;
prmt.b32 lower, 0xC0800000, 0xC0804000, size;
prmt.b32 sign, 0x80808080, 0x80808080, high;
shl.b32 sign, sign, 1;
lop3.b32 upper, upper, sign, 0x80808080, 0xF8;
prmt.b32 $1, upper, lower, 0x2604;
prmt.b32 $3, upper, lower, 0x3715;
}
""")

# How far below the largest of the powers of two that become part of E4M3 numbers is one that counts as no smaller.
LEAST = tl.constexpr(12)
# Eight codes in four bytes, low nibble first, to four E4M3 numbers of the low nibbles and four of the high ones. The
# two words of a table hold the magnitudes of the eight codes without sign: a permutation of bytes looks four codes up
# at a time. All four bytes have the same table, which are operands 3 and 7.
_E2M1_TO_E4M3 = tl.constexpr("""
{
.reg .b32 code, first, second, low, high;
and.b32 code, $2, 0x77777777;
prmt.b32 first, $3, $7, code;
shr.u32 code, code, 16;
prmt.b32 second, $3, $7, code;
prmt.b32 low, first, second, 0x6420;
prmt.b32 high, first, second, 0x7531;
shl.b32 code, $2, 4;
lop3.b32 $0, code, 0x80808080, low, 0xEA;
lop3.b32 $1, $2, 0x80808080, high, 0xEA;
}
""")


@triton.jit
def widen_e4m3(tile, DTYPE: tl.constexpr):
    """E4M3 numbers, or bytes that stand for them, in a wider type; exact."""
    BFLOAT16: tl.constexpr = False if IS_INTERPRETED else DTYPE == tl.bfloat16
    if tile.dtype != tl.uint8:
        wide = tile.to(DTYPE)
    elif DTYPE == tl.float16:
        bits = tile.to(tl.uint16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    elif BFLOAT16:
        bits = tile.to(tl.uint16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
        wide = wide * tl.full((), 2.0**120, tl.bfloat16)
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    else:
        bits = tile.to(tl.uint32)
        wide = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    return wide


@triton.jit
def widen_e2m1(code, DTYPE: tl.constexpr):
    """E2M1 codes, the low four bits of bytes, in a wider type; exact."""
    bits = code.to(tl.uint32)
    wide = (((bits & 0x8) << 28) | ((bits & 0x7) << 22)).to(tl.float32, bitcast=True)
    return (wide * 2.0**126).to(DTYPE)


@triton.jit
def unfold_e2m1(tile, DTYPE: tl.constexpr):
    """The numbers in the low and in the high half of bytes."""
    BFLOAT16: tl.constexpr = False if IS_INTERPRETED else DTYPE == tl.bfloat16
    if BFLOAT16:
        low, high = tl.inline_asm_elementwise(
            _E2M1_TO_BF16, "=r,=r,=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = widen_e2m1(tile & 0xF, DTYPE), widen_e2m1(tile >> 4, DTYPE)
    return low, high


@triton.jit
def unfold_e2m1_scaled(tile, exponent, least):
    """The numbers in the low and in the high half of bytes (N, GROUPS, BYTES) as E4M3, times powers of two.

    ``exponent`` (N, GROUPS, 1) is of each group of bytes: LEAST more than ``least``, which is the most it can be,
    makes 384 of a 6. One more than ``least`` is still exact; of ``least`` itself a half is lost.
    """
    if IS_INTERPRETED:
        factor = ((exponent - least - 6 + 127).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        low, high = widen_e2m1(tile & 0xF, tl.float32) * factor, widen_e2m1(tile >> 4, tl.float32) * factor
        low = tl.where(tl.abs(low) < 2.0**-6, 0.0, low).to(tl.float8e4nv)
        high = tl.where(tl.abs(high) < 2.0**-6, 0.0, high).to(tl.float8e4nv)
    else:
        # The tables for the least exponent; each step above it adds one to the exponents of all but zero.
        first = exponent * 0x08080800 + (0x0C080000 - least * 0x08080800)
        second = exponent * 0x08080808 + (0x1C181410 - least * 0x08080808)
        low, high = tl.inline_asm_elementwise(
            _E2M1_TO_E4M3, "=r,=r,r,r,r,r,r,r,r,r,r", [tile, first, second],
            dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
        )
    return low, high


@triton.jit
def power_of_two(bits):
    """Bytes b, in int32, that stand for 2**(b - 127) in float32; infinity for 255, which is no number."""
    return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(place, mask):
    """Scales in float32: stored so, or as bytes b that stand for 2**(b - 127); 1 where the mask is off."""
    if place.dtype.element_ty == tl.uint8:
        scale = power_of_two(tl.load(place, mask=mask, other=127).to(tl.int32))
    else:
        scale = tl.load(place, mask=mask, other=1.0).to(tl.float32)
    return scale


@triton.jit
def block_of(index, Q: tl.constexpr):
    """Number of the block of Q that an index is in; Q = 0 stands for two blocks, of the even and the odd ones."""
    if Q == 0:
        block = index % 2
    else:
        block = index // Q
    return block


@triton.jit
def scale_of_columns(scale, column_N, N: tl.constexpr, S_N: tl.constexpr, Q_N: tl.constexpr):
    """Where the scales of columns begin."""
    return scale + block_of(tl.where(column_N < N, column_N, 0), Q_N).to(tl.int64) * S_N


@triton.jit
def _rounded_to_e4m3(x):
    """float32 numbers whose digits are those of E4M3: the interpreter's own conversion loses what is carried."""
    high = x * (2.0**20 + 1.0)
    normal = high - (high - x)
    subnormal = (x + 1.5 * 2.0**14) - 1.5 * 2.0**14
    return tl.where(tl.abs(x) < 2.0**-6, subnormal, normal)


@triton.jit
def to_e4m3(tile, GROUP: tl.constexpr):
    """Rows (M, N) as E4M3 and a scale for each GROUP columns, (M, N // GROUP); those of zeros have scale 1."""
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    groups = tl.reshape(tile, (M, N // GROUP, GROUP))
    size = tl.abs(groups)
    if IS_INTERPRETED:
        # NumPy warns of rows that are nothing but NaN, which unused memory may be.
        size = tl.where(size == size, size, 0.0)
    largest = tl.max(size, axis=2)
    largest = tl.where(largest > 0, tl.maximum(largest, 1e-30), 448.0)
    scale = largest * (1.0 / 448.0)
    # No product is as far above 448, the largest number, as would be rounded to another.
    groups = groups * (448.0 / largest)[:, :, None]
    if IS_INTERPRETED:
        groups = _rounded_to_e4m3(groups)
    return tl.reshape(groups, (M, N)).to(tl.float8e4nv), scale
