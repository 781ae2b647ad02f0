//! Sixteen lanes in one register of AVX-512, with and without its products of bfloat16.

use std::arch::x86_64::{
    __m128, __m512, __m512bh, __m512i, _mm_loadu_ps, _mm_storeu_ps, _mm256_add_ps, _mm256_castpd_ps,
    _mm256_loadu_si256, _mm512_add_ps, _mm512_and_si512, _mm512_castps_pd, _mm512_castps128_ps512,
    _mm512_castps512_ps128, _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_dpbf16_ps, _mm512_extractf64x4_pd, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_maskz_compress_ps, _mm512_permute_ps, _mm512_permutexvar_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_storeu_ps,
};

use super::avx2::sum_of_eight;
use super::codes_avx512 as codes;
use super::lanes::{Lanes, lanes_of};
use super::number::{Bf16, F16};

/// AVX-512 as all of its processors have it.
pub struct Avx512;

/// AVX-512 with products of bfloat16 pairs. They are the two fused multiply-adds of the other ways, but take
/// subnormal numbers for zero.
pub struct Avx512Bf16;

macro_rules! lanes_in_one_register {
    ($name:ty, $pairs:ty, $load_pairs:expr, $fused_pairs:expr, $halves:expr, $e4m3:expr, $e2m1:expr) => {
        // SAFETY of every block below: the trait's caller answers for the instructions and the memory; all loads and
        // stores are those that need no alignment.
        impl Lanes for $name {
            type Single = __m512;
            type Pairs = $pairs;
            const COLUMNS: usize = 4;
            const ROWS: usize = 6;

            #[inline(always)]
            unsafe fn splat(value: f32) -> __m512 {
                // SAFETY: see above.
                unsafe { _mm512_set1_ps(value) }
            }

            #[inline(always)]
            unsafe fn load_f32(from: *const f32) -> __m512 {
                // SAFETY: see above.
                unsafe { _mm512_loadu_ps(from) }
            }

            #[inline(always)]
            unsafe fn load_bf16(from: *const Bf16) -> __m512 {
                // SAFETY: see above.
                unsafe {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
            }

            #[inline(always)]
            unsafe fn load_f16(from: *const F16) -> __m512 {
                // SAFETY: see above.
                unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
            }

            #[inline(always)]
            unsafe fn store(to: *mut f32, value: __m512) {
                // SAFETY: see above.
                unsafe { _mm512_storeu_ps(to, value) }
            }

            #[inline(always)]
            unsafe fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
                // SAFETY: see above.
                unsafe { _mm512_fmadd_ps(a, b, c) }
            }

            #[inline(always)]
            unsafe fn sum(value: __m512) -> f32 {
                // SAFETY: see above.
                unsafe {
                    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(value)));
                    sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(value), upper))
                }
            }

            #[inline(always)]
            unsafe fn sums<const C: usize>(values: [__m512; C]) -> [f32; C] {
                let mut sums = [0.0; C];
                // SAFETY: see above; four sums are stored where there are four.
                unsafe {
                    if C == 4 {
                        _mm_storeu_ps(
                            sums.as_mut_ptr(),
                            sums_of_four(values[0], values[1], values[2], values[3]),
                        );
                    } else {
                        for c in 0..C {
                            sums[c] = Self::sum(values[c]);
                        }
                    }
                }
                sums
            }

            #[inline(always)]
            unsafe fn load_pairs(from: *const Bf16) -> $pairs {
                // SAFETY: see above.
                unsafe { $load_pairs(_mm512_loadu_si512(from.cast())) }
            }

            #[inline(always)]
            unsafe fn fused_pairs(a: $pairs, b: $pairs, c: __m512) -> __m512 {
                // SAFETY: see above.
                unsafe { $fused_pairs(a, b, c) }
            }

            #[inline(always)]
            unsafe fn halves(pairs: $pairs) -> [__m512; 2] {
                // SAFETY: see above.
                unsafe { $halves(pairs) }
            }

            #[inline(always)]
            unsafe fn e4m3(from: *const u8) -> [$pairs; 2] {
                // SAFETY: see above.
                unsafe { $e4m3(_mm512_loadu_si512(from.cast())) }
            }

            #[inline(always)]
            unsafe fn e2m1(from: *const u8) -> [$pairs; 4] {
                // SAFETY: see above.
                unsafe { $e2m1(_mm512_loadu_si512(from.cast())) }
            }

            type Pattern = __m512i;

            #[inline(always)]
            unsafe fn pattern(numbers: usize) -> __m512i {
                // SAFETY: see above; there are sixteen lanes.
                unsafe { _mm512_loadu_si512(lanes_of(numbers).as_ptr().cast()) }
            }

            #[inline(always)]
            unsafe fn spread(from: *const f32, pattern: __m512i) -> __m512 {
                // SAFETY: see above; four numbers are readable.
                unsafe { _mm512_permutexvar_ps(pattern, _mm512_castps128_ps512(_mm_loadu_ps(from))) }
            }
        }
    };
}
lanes_in_one_register!(Avx512, [__m512; 2], halves, fused_halves, same, codes::e4m3, codes::e2m1);
lanes_in_one_register!(
    Avx512Bf16,
    __m512bh,
    as_pairs,
    dot_pairs,
    halves_of_pairs,
    codes::e4m3_pairs,
    codes::e2m1_pairs
);

/// Four sums at once, each by the tree of `sum`.
#[inline(always)]
unsafe fn sums_of_four(a: __m512, b: __m512, c: __m512, d: __m512) -> __m128 {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
        let four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
        let two = _mm512_add_ps(four, _mm512_permute_ps::<0x4E>(four));
        let one = _mm512_add_ps(two, _mm512_permute_ps::<0xB1>(two));
        _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one))
    }
}

/// Second and first numbers of the pairs, as float32.
#[inline(always)]
unsafe fn halves(pairs: __m512i) -> [__m512; 2] {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe {
        let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
        [_mm512_castsi512_ps(second), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))]
    }
}

#[inline(always)]
unsafe fn fused_halves(a: [__m512; 2], b: [__m512; 2], c: __m512) -> __m512 {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe { _mm512_fmadd_ps(a[1], b[1], _mm512_fmadd_ps(a[0], b[0], c)) }
}

#[inline(always)]
pub(super) unsafe fn as_pairs(pairs: __m512i) -> __m512bh {
    // SAFETY: two views of one register.
    unsafe { std::mem::transmute(pairs) }
}

#[inline(always)]
unsafe fn dot_pairs(a: __m512bh, b: __m512bh, c: __m512) -> __m512 {
    // SAFETY: registers alone; the caller has the instructions.
    unsafe { _mm512_dpbf16_ps(c, a, b) }
}

#[inline(always)]
unsafe fn halves_of_pairs(pairs: __m512bh) -> [__m512; 2] {
    // SAFETY: two views of one register.
    unsafe { halves(std::mem::transmute::<__m512bh, __m512i>(pairs)) }
}

#[inline(always)]
unsafe fn same(halves: [__m512; 2]) -> [__m512; 2] {
    halves
}
