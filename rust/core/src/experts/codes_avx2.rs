//! Codes of 8 and 4 bits unfolded in registers of AVX2, in the order of `Code::places`.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmpeq_epi16,
    _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_or_ps, _mm256_or_si256,
    _mm256_permute4x64_epi64, _mm256_permutevar8x32_ps, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setr_ps,
    _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srai_epi16, _mm256_srli_epi32,
};

/// Lanes 0 to 7 and 8 to 15 of the second numbers, then of the first.
type Pairs = [__m256; 4];

/// Sixty-four codes.
///
/// # Safety
/// The instructions exist, and the bytes are readable.
#[inline(always)]
pub unsafe fn e4m3(from: *const u8) -> [Pairs; 2] {
    // SAFETY: this function's contract.
    unsafe {
        let (low, high) = (of_32_bytes(from), of_32_bytes(from.add(32)));
        [[low[0][0], high[0][0], low[0][1], high[0][1]], [low[1][0], high[1][0], low[1][1], high[1][1]]]
    }
}

/// Eight lanes of both registers: second and first numbers.
#[inline(always)]
unsafe fn of_32_bytes(from: *const u8) -> [[__m256; 2]; 2] {
    // SAFETY: thirty-two bytes are readable; the rest is registers.
    unsafe {
        // Of every sixteen bytes the first eight go to the first register.
        let codes: __m256i = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_loadu_si256(from.cast()));
        let second = as_halves(codes);
        let first = as_halves(_mm256_slli_epi16::<8>(codes));
        [
            [_mm256_cvtph_ps(_mm256_castsi256_si128(second)), _mm256_cvtph_ps(_mm256_castsi256_si128(first))],
            [
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(second)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(first)),
            ],
        ]
    }
}

/// Codes in the upper bytes as float16; exponents of both begin behind the sign, one bit apart in length.
#[inline(always)]
unsafe fn as_halves(codes: __m256i) -> __m256i {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        let halves = _mm256_and_si256(_mm256_srai_epi16::<1>(codes), _mm256_set1_epi16(0xBF80_u16 as i16));
        let magnitude = _mm256_slli_epi16::<1>(halves);
        // All ones, which only NaN has, are NaN in float16 as well.
        _mm256_or_si256(halves, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F00)))
    }
}

/// A hundred and twenty-eight codes.
///
/// # Safety
/// The instructions exist, and sixty-four bytes are readable.
#[inline(always)]
pub unsafe fn e2m1(from: *const u8) -> [Pairs; 4] {
    // SAFETY: this function's contract.
    unsafe {
        let (low, high) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
        macro_rules! register {
            ($first:literal, $second:literal) => {
                [
                    number::<$second, { 28 - $second }>(low),
                    number::<$second, { 28 - $second }>(high),
                    number::<$first, { 28 - $first }>(low),
                    number::<$first, { 28 - $first }>(high),
                ]
            };
        }
        [register!(0, 16), register!(4, 20), register!(8, 24), register!(12, 28)]
    }
}

/// The code at a bit of every lane; three bits choose the magnitude, the fourth is the sign.
#[inline(always)]
unsafe fn number<const BIT: i32, const TO_SIGN: i32>(codes: __m256i) -> __m256 {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        let magnitudes = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
        let magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32::<BIT>(codes));
        let sign = _mm256_and_si256(_mm256_slli_epi32::<TO_SIGN>(codes), _mm256_set1_epi32(i32::MIN));
        _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
    }
}
