//! Sixteen lanes in two registers of AVX2.

use std::arch::x86_64::{
    __m256, __m256i, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_ps, _mm_loadu_si128, _mm_movehl_ps,
    _mm_shuffle_ps, _mm256_add_ps, _mm256_and_si256, _mm256_castps128_ps256, _mm256_castps256_ps128,
    _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_permutevar8x32_ps, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_slli_epi32, _mm256_storeu_ps,
};

use super::codes_avx2;
use super::lanes::{Lanes, lanes_of};
use super::number::{Bf16, F16};

/// AVX2, FMA and F16C.
pub struct Avx2;

// SAFETY of every block below: the trait's caller answers for the instructions and the memory; all loads and stores
// are those that need no alignment.
impl Lanes for Avx2 {
    type Single = [__m256; 2];
    type Pairs = [__m256; 4];
    const COLUMNS: usize = 2;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Single {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self::Single {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const Bf16) -> Self::Single {
        // SAFETY: see above.
        unsafe { [widen_bf16(from), widen_bf16(from.add(8))] }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const F16) -> Self::Single {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Single) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }

    #[inline(always)]
    unsafe fn fused(a: Self::Single, b: Self::Single, c: Self::Single) -> Self::Single {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    unsafe fn sum(value: Self::Single) -> f32 {
        // SAFETY: see above.
        unsafe { sum_of_eight(_mm256_add_ps(value[0], value[1])) }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const Bf16) -> Self::Pairs {
        // SAFETY: see above.
        unsafe {
            let (low, high) = (halves(from), halves(from.add(16)));
            [low.0, high.0, low.1, high.1]
        }
    }

    #[inline(always)]
    unsafe fn fused_pairs(a: Self::Pairs, b: Self::Pairs, c: Self::Single) -> Self::Single {
        // SAFETY: see above.
        unsafe {
            let second = [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
            [_mm256_fmadd_ps(a[2], b[2], second[0]), _mm256_fmadd_ps(a[3], b[3], second[1])]
        }
    }

    #[inline(always)]
    unsafe fn halves(pairs: Self::Pairs) -> [Self::Single; 2] {
        [[pairs[0], pairs[1]], [pairs[2], pairs[3]]]
    }

    #[inline(always)]
    unsafe fn e4m3(from: *const u8) -> [Self::Pairs; 2] {
        // SAFETY: see above.
        unsafe { codes_avx2::e4m3(from) }
    }

    #[inline(always)]
    unsafe fn e2m1(from: *const u8) -> [Self::Pairs; 4] {
        // SAFETY: see above.
        unsafe { codes_avx2::e2m1(from) }
    }

    type Pattern = [__m256i; 2];

    #[inline(always)]
    unsafe fn pattern(numbers: usize) -> Self::Pattern {
        let lanes = lanes_of(numbers);
        // SAFETY: see above; there are sixteen lanes.
        unsafe { [_mm256_loadu_si256(lanes.as_ptr().cast()), _mm256_loadu_si256(lanes[8..].as_ptr().cast())] }
    }

    #[inline(always)]
    unsafe fn spread(from: *const f32, pattern: Self::Pattern) -> Self::Single {
        // SAFETY: see above; four numbers are readable.
        unsafe {
            let four = _mm256_castps128_ps256(_mm_loadu_ps(from));
            [_mm256_permutevar8x32_ps(four, pattern[0]), _mm256_permutevar8x32_ps(four, pattern[1])]
        }
    }
}

#[inline(always)]
unsafe fn widen_bf16(from: *const Bf16) -> __m256 {
    // SAFETY: eight numbers are readable at `from`, which the callers above were promised.
    unsafe {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
    }
}

/// Second and first numbers of eight pairs, as float32.
#[inline(always)]
unsafe fn halves(from: *const Bf16) -> (__m256, __m256) {
    // SAFETY: sixteen numbers are readable at `from`, which the caller above was promised.
    unsafe {
        let pairs: __m256i = _mm256_loadu_si256(from.cast());
        let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
        (_mm256_castsi256_ps(second), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)))
    }
}

/// Lanes 4 apart, then 2 and 1.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(eight: __m256) -> f32 {
    // SAFETY: registers alone; the callers have the instructions.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
