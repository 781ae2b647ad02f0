//! Sixteen float32 in a row: what every way of computing is written in, so that all give the same bits.
//!
//! A sum of products runs in sixteen lanes, each a chain of fused multiply-adds, and ends in one tree. Wider or
//! narrower registers change how many lanes an instruction holds, and nothing else.

use super::number::{Bf16, F16, Number};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sixteen float32, and thirty-two bfloat16 as sixteen pairs.
///
/// # Safety
/// A type may only be used where its instructions exist. Pointers need no alignment; sixteen numbers (pairs: thirty-two)
/// must be readable or writable there.
pub trait Lanes {
    /// Sixteen float32.
    type Single: Copy;
    /// Sixteen pairs of bfloat16.
    type Pairs: Copy;
    /// Matrix columns that a tile of dot products holds.
    const COLUMNS: usize;
    /// Rows that a tile holds.
    const ROWS: usize;

    /// The same number in every lane.
    unsafe fn splat(value: f32) -> Self::Single;
    /// Sixteen numbers.
    unsafe fn load_f32(from: *const f32) -> Self::Single;
    /// Sixteen numbers, widened.
    unsafe fn load_bf16(from: *const Bf16) -> Self::Single;
    /// Sixteen numbers, widened.
    unsafe fn load_f16(from: *const F16) -> Self::Single;
    /// Sixteen numbers.
    unsafe fn store(to: *mut f32, value: Self::Single);
    /// a * b + c, rounded once.
    unsafe fn fused(a: Self::Single, b: Self::Single, c: Self::Single) -> Self::Single;
    /// Sum of the lanes: those 8 apart, then 4, 2 and 1.
    unsafe fn sum(value: Self::Single) -> f32;
    /// The sums of some vectors.
    #[inline(always)]
    unsafe fn sums<const C: usize>(values: [Self::Single; C]) -> [f32; C] {
        let mut sums = [0.0; C];
        for c in 0..C {
            // SAFETY: registers alone; the caller has the instructions.
            sums[c] = unsafe { Self::sum(values[c]) };
        }
        sums
    }
    /// Thirty-two numbers.
    unsafe fn load_pairs(from: *const Bf16) -> Self::Pairs;
    /// Adds to each lane the product of the pairs' second numbers, rounds, adds that of the first, rounds.
    unsafe fn fused_pairs(a: Self::Pairs, b: Self::Pairs, c: Self::Single) -> Self::Single;
}

/// Asks for a line of memory ahead of its use, into the second cache, which can have more lines under way than the
/// first (measured: 1.4 times the bytes a second). Any address will do.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64, and a hint: it faults on no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Plain Rust: runs everywhere, and says what the others must give.
pub struct Portable;

impl Lanes for Portable {
    type Single = [f32; LANES];
    type Pairs = [[f32; LANES]; 2];
    const COLUMNS: usize = 2;
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Single {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self::Single {
        // SAFETY: sixteen numbers are readable, and the read asks for no alignment.
        unsafe { from.cast::<Self::Single>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const Bf16) -> Self::Single {
        // SAFETY: as above.
        unsafe { from.cast::<[Bf16; LANES]>().read_unaligned() }.map(Number::widen)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const F16) -> Self::Single {
        // SAFETY: as above.
        unsafe { from.cast::<[F16; LANES]>().read_unaligned() }.map(Number::widen)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Single) {
        // SAFETY: sixteen numbers are writable, and the write asks for no alignment.
        unsafe { to.cast::<Self::Single>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn fused(a: Self::Single, b: Self::Single, c: Self::Single) -> Self::Single {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    unsafe fn sum(value: Self::Single) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|lane| value[lane] + value[lane + 8]);
        let four: [f32; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const Bf16) -> Self::Pairs {
        // SAFETY: thirty-two numbers are readable, and the read asks for no alignment.
        let numbers = unsafe { from.cast::<[[Bf16; 2]; LANES]>().read_unaligned() };
        [1, 0].map(|place| numbers.map(|pair| pair[place].widen()))
    }

    #[inline(always)]
    unsafe fn fused_pairs(a: Self::Pairs, b: Self::Pairs, c: Self::Single) -> Self::Single {
        // Two bfloat16 have an exact product in float32, so that two instructions give what one would.
        std::array::from_fn(|lane| (c[lane] + a[0][lane] * b[0][lane]) + a[1][lane] * b[1][lane])
    }
}
