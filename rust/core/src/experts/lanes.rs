//! Sixteen float32 in a row: what every way of computing is written in, so that all give the same bits.
//!
//! A sum of products runs in sixteen lanes, each a chain of fused multiply-adds, and ends in one tree. Wider or
//! narrower registers change how many lanes an instruction holds, and nothing else.

use super::format::{Code, E2M1, e4m3};
use super::number::{Bf16, Dtype, F16, Number};

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
    /// Second and first numbers of the pairs.
    unsafe fn halves(pairs: Self::Pairs) -> [Self::Single; 2];
    /// Sixty-four codes, in the order of [`Code::places`]; their numbers divided by `E4M3_FACTOR`.
    unsafe fn e4m3(from: *const u8) -> [Self::Pairs; 2];
    /// A hundred and twenty-eight codes in sixty-four bytes, in the order of [`Code::places`].
    unsafe fn e2m1(from: *const u8) -> [Self::Pairs; 4];
    /// Which of 1, 2 or 4 numbers each lane takes: all lanes one, or as many lanes each in turn.
    type Pattern: Copy;
    /// The pattern of so many numbers.
    unsafe fn pattern(numbers: usize) -> Self::Pattern;
    /// Four numbers, of which a pattern's lanes take theirs.
    unsafe fn spread(from: *const f32, pattern: Self::Pattern) -> Self::Single;
}

/// Which of `numbers` each lane takes.
pub fn lanes_of(numbers: usize) -> [i32; LANES] {
    std::array::from_fn(|lane| (lane * numbers / LANES) as i32)
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

    #[inline(always)]
    unsafe fn halves(pairs: Self::Pairs) -> [Self::Single; 2] {
        pairs
    }

    #[inline(always)]
    unsafe fn e4m3(from: *const u8) -> [Self::Pairs; 2] {
        // SAFETY: sixty-four bytes are readable.
        let codes = unsafe { from.cast::<[u8; 64]>().read() };
        unfold(Code::E4m3, codes.map(e4m3))
    }

    #[inline(always)]
    unsafe fn e2m1(from: *const u8) -> [Self::Pairs; 4] {
        // SAFETY: sixty-four bytes are readable.
        let codes = unsafe { from.cast::<[u8; 64]>().read() };
        let number = |depth: usize| E2M1[(codes[depth / 2] >> (depth % 2 * 4) & 0xF) as usize];
        unfold(Code::E2m1, std::array::from_fn::<_, 128, _>(number))
    }

    type Pattern = [i32; LANES];

    #[inline(always)]
    unsafe fn pattern(numbers: usize) -> Self::Pattern {
        lanes_of(numbers)
    }

    #[inline(always)]
    unsafe fn spread(from: *const f32, pattern: Self::Pattern) -> Self::Single {
        // SAFETY: four numbers are readable, and a pattern has none beyond.
        pattern.map(|lane| unsafe { from.add(lane as usize).read_unaligned() })
    }
}

/// Numbers of a chunk in the order of its code: float32 rows are second numbers, then first ones, register by register.
#[inline(always)]
fn unfold<const D: usize, const R: usize>(code: Code, numbers: [f32; D]) -> [[[f32; LANES]; 2]; R] {
    let mut registers = [[[0.0; LANES]; 2]; R];
    for (number, place) in numbers.iter().zip(code.places(Dtype::F32)) {
        let place = place as usize;
        registers[place / 32][place / 16 % 2][place % 16] = *number;
    }
    registers
}
