//! Codes of 8 and 4 bits unfolded in registers of AVX-512, in the order of `Code::places`.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_and_si512, _mm512_castsi512_si256, _mm512_cmpeq_epi16_mask,
    _mm512_cvtph_ps, _mm512_extracti64x4_epi64, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_epi16,
    _mm512_permutex2var_epi8, _mm512_permutexvar_epi16, _mm512_permutexvar_epi64, _mm512_permutexvar_ps,
    _mm512_set1_epi8, _mm512_set1_epi16, _mm512_setr_epi64, _mm512_slli_epi16, _mm512_srai_epi16,
    _mm512_srli_epi16, _mm512_srli_epi32, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi8,
};

use super::avx512::as_pairs;
use super::format::E2M1;

/// Sixty-four codes as float32: second and first numbers of two registers of pairs.
///
/// # Safety
/// The instructions of AVX-512 F and BW exist.
#[inline(always)]
pub unsafe fn e4m3(codes: __m512i) -> [[__m512; 2]; 2] {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        // Of every sixteen bytes the first eight go to the first register.
        let codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes);
        let second = as_halves(codes);
        let first = as_halves(_mm512_slli_epi16::<8>(codes));
        [
            [_mm512_cvtph_ps(_mm512_castsi512_si256(second)), _mm512_cvtph_ps(_mm512_castsi512_si256(first))],
            [
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(second)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(first)),
            ],
        ]
    }
}

/// Codes in the upper bytes as float16; exponents of both begin behind the sign, one bit apart in length.
#[inline(always)]
unsafe fn as_halves(codes: __m512i) -> __m512i {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        let halves = _mm512_and_si512(_mm512_srai_epi16::<1>(codes), _mm512_set1_epi16(0xBF80_u16 as i16));
        let magnitude = _mm512_slli_epi16::<1>(halves);
        let is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F00));
        _mm512_mask_mov_epi16(halves, is_nan, _mm512_set1_epi16(0x7E00))
    }
}

/// A hundred and twenty-eight codes as float32: second and first numbers of four registers of pairs.
///
/// # Safety
/// The instructions of AVX-512 F exist.
#[inline(always)]
pub unsafe fn e2m1(codes: __m512i) -> [[__m512; 2]; 4] {
    // SAFETY: registers alone, and a table of sixteen numbers; the caller has the instructions.
    unsafe {
        let numbers = _mm512_loadu_ps(E2M1.as_ptr());
        // The lowest four bits of a lane choose.
        macro_rules! register {
            ($first:literal, $second:literal) => {
                [
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<$second>(codes), numbers),
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<$first>(codes), numbers),
                ]
            };
        }
        [register!(0, 16), register!(4, 20), register!(8, 24), register!(12, 28)]
    }
}

/// Bytes of the bfloat16 of every code without its sign: low ones, high ones.
static E4M3_BYTES: [[u8; 128]; 2] = e4m3_bytes();

const fn e4m3_bytes() -> [[u8; 128]; 2] {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let (exponent, mantissa) = (code >> 3, code & 7);
        // The number divided by 256: bias 127 instead of 7, less 8.
        let bits = if code == 0x7F {
            0x7FC0
        } else if exponent > 0 {
            (exponent + 112) << 7 | mantissa << 4
        } else if mantissa > 0 {
            // mantissa * 2^-17, whose leading bit becomes the hidden one
            let shift = (mantissa as u32).ilog2();
            (127 - 17 + shift as usize) << 7 | (mantissa << (7 - shift)) & 0x7F
        } else {
            0
        };
        bytes[0][code] = bits as u8;
        bytes[1][code] = (bits >> 8) as u8;
        code += 1;
    }
    bytes
}

/// The bfloat16 of four bits, twice: the lowest five bits of a word choose.
static E2M1_WORDS: [u16; 32] = e2m1_words();

const fn e2m1_words() -> [u16; 32] {
    let mut words = [0; 32];
    let mut code = 0;
    while code < 32 {
        words[code] = (E2M1[code % 16].to_bits() >> 16) as u16;
        code += 1;
    }
    words
}

/// Sixty-four codes as pairs of bfloat16.
///
/// # Safety
/// The instructions of AVX-512 F, BW and VBMI exist.
#[inline(always)]
pub unsafe fn e4m3_pairs(codes: __m512i) -> [__m512bh; 2] {
    // SAFETY: registers alone, and two tables of 128 bytes; the caller has the instructions.
    unsafe {
        let low = chosen(&E4M3_BYTES[0], codes);
        let unsigned = chosen(&E4M3_BYTES[1], codes);
        // The code's sign is that of the high byte: unsigned | codes & 0x80
        let high = _mm512_ternarylogic_epi32::<0xF8>(unsigned, codes, _mm512_set1_epi8(i8::MIN));
        [as_pairs(_mm512_unpacklo_epi8(low, high)), as_pairs(_mm512_unpackhi_epi8(low, high))]
    }
}

/// Bytes of a table, each chosen by the lowest seven bits of a byte.
#[inline(always)]
unsafe fn chosen(table: &[u8; 128], codes: __m512i) -> __m512i {
    // SAFETY: the table is two registers long; the caller has the instructions.
    unsafe {
        let low = _mm512_loadu_si512(table.as_ptr().cast());
        _mm512_permutex2var_epi8(low, codes, _mm512_loadu_si512(table.as_ptr().add(64).cast()))
    }
}

/// A hundred and twenty-eight codes as pairs of bfloat16.
///
/// # Safety
/// The instructions of AVX-512 F and BW exist.
#[inline(always)]
pub unsafe fn e2m1_pairs(codes: __m512i) -> [__m512bh; 4] {
    // SAFETY: registers alone, and a table of 32 words; the caller has the instructions.
    unsafe {
        let words = _mm512_loadu_si512(E2M1_WORDS.as_ptr().cast());
        [
            as_pairs(_mm512_permutexvar_epi16(codes, words)),
            as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), words)),
            as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), words)),
            as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), words)),
        ]
    }
}
