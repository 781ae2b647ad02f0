//! The ways to compute that this processor has, each compiled for its own instructions and chosen at run time.
//!
//! The functions below carry the name of their instructions in their path: everything outside is baseline code.

use std::sync::LazyLock;

use super::format::Code;
use super::gate::{self, Gate, Halves};
use super::lanes::Portable;
use super::number::{Bf16, Dtype, F16};
use super::product::codes::{self, E2m1, E4m3};
use super::product::{Pairs, Product, Wide, multiply};

/// What a product reads: operand rows and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terms {
    /// Rows in float32, weights of a type.
    Wide(Dtype),
    /// Both in bfloat16.
    Pairs,
    /// Rows in bfloat16 or float32 in the order of a code, weights of that code.
    Codes(Code, Dtype),
    /// Rows in float32, codes that are written as float32 first.
    Written,
}

/// Products with codes, rows in float32 and in bfloat16.
#[derive(Clone, Copy)]
struct Codes {
    e4m3: [unsafe fn(&Product<'_>); 2],
    e2m1: [unsafe fn(&Product<'_>); 2],
}

/// One way to compute.
pub struct Level {
    /// Its instructions, or `portable`.
    pub name: &'static str,
    wide_f32: unsafe fn(&Product<'_>),
    wide_bf16: unsafe fn(&Product<'_>),
    wide_f16: unsafe fn(&Product<'_>),
    pairs: unsafe fn(&Product<'_>),
    codes: Codes,
    written: unsafe fn(&Product<'_>),
    gate: unsafe fn(&Gate, Halves<'_>, &mut [f32]),
}

impl Level {
    /// Runs a product.
    ///
    /// # Safety
    /// The contract of `multiply`, of whose instructions a level of [`available`] is sure.
    pub unsafe fn multiply(&self, terms: Terms, product: &Product<'_>) {
        let function = match terms {
            Terms::Wide(Dtype::F32) => self.wide_f32,
            Terms::Wide(Dtype::Bf16) => self.wide_bf16,
            Terms::Wide(Dtype::F16) => self.wide_f16,
            Terms::Pairs => self.pairs,
            Terms::Codes(Code::E4m3, rows) => self.codes.e4m3[usize::from(rows == Dtype::Bf16)],
            Terms::Codes(Code::E2m1, rows) => self.codes.e2m1[usize::from(rows == Dtype::Bf16)],
            Terms::Written => self.written,
        };
        // SAFETY: the contract is this function's.
        unsafe { function(product) }
    }

    /// Fills `out` with the gated values of one row.
    pub fn gate(&self, gate: &Gate, row: Halves<'_>, out: &mut [f32]) {
        // SAFETY: a level is only handed out where its instructions are.
        unsafe { (self.gate)(gate, row, out) }
    }
}

macro_rules! level {
    ($name:ident, $lanes:ty $(, $features:literal, $of_codes:literal)?) => {
        mod $name {
            #[allow(clippy::wildcard_imports, reason = "one list of names for all levels")]
            use super::*;

            pub const LEVEL: Level = Level {
                name: stringify!($name),
                wide_f32,
                wide_bf16,
                wide_f16,
                pairs,
                codes: Codes { e4m3: [e4m3_wide, e4m3_pairs], e2m1: [e2m1_wide, e2m1_pairs] },
                written,
                gate,
            };
            level!(@product wide_f32, $lanes, Wide<f32> $(, $features)?);
            level!(@product wide_bf16, $lanes, Wide<Bf16> $(, $features)?);
            level!(@product wide_f16, $lanes, Wide<F16> $(, $features)?);
            level!(@product pairs, $lanes, Pairs $(, $features)?);
            level!(@codes e4m3_wide, $lanes, E4m3, f32, 2 $(, $of_codes)?);
            level!(@codes e4m3_pairs, $lanes, E4m3, Bf16, 2 $(, $of_codes)?);
            level!(@codes e2m1_wide, $lanes, E2m1, f32, 4 $(, $of_codes)?);
            level!(@codes e2m1_pairs, $lanes, E2m1, Bf16, 4 $(, $of_codes)?);

            $(#[target_feature(enable = $features)])?
            unsafe fn written(product: &Product<'_>) {
                // SAFETY: as for the products below.
                unsafe { codes::multiply_written::<$lanes>(product) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn gate(gate: &Gate, row: Halves<'_>, out: &mut [f32]) {
                gate::apply(gate, row, out);
            }
        }
    };
    (@product $function:ident, $lanes:ty, $terms:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $function(product: &Product<'_>) {
            // SAFETY: the caller of an unsafe function of this module has its instructions, and a product that holds
            // what it promises.
            unsafe { multiply::<$lanes, $terms>(product) }
        }
    };
    (@codes $function:ident, $lanes:ty, $code:ty, $row:ty, $registers:literal $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $function(product: &Product<'_>) {
            // SAFETY: as above.
            unsafe { codes::multiply::<$lanes, $code, $row, $registers>(product) }
        }
    };
}

level!(portable, Portable);
#[cfg(target_arch = "x86_64")]
level!(avx2, super::super::avx2::Avx2, "avx2,fma,f16c", "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(
    avx512,
    super::super::avx512::Avx512,
    "avx512f,avx512vl,avx2,fma,f16c",
    "avx512bw,avx512f,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
level!(
    avx512bf16,
    super::super::avx512::Avx512Bf16,
    "avx512bf16,avx512f,avx512vl,avx2,fma,f16c",
    "avx512bf16,avx512vbmi,avx512bw,avx512f,avx512vl,avx2,fma,f16c"
);

/// The levels of this processor, the fastest first; portable code is the last.
pub fn available() -> &'static [Level] {
    static LEVELS: LazyLock<Vec<Level>> = LazyLock::new(found);
    &LEVELS
}

fn found() -> Vec<Level> {
    let mut levels = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("fma") && has!("f16c");
        // Every processor with these two has BW as well; one with BF16 had no VBMI.
        let avx512 = avx2 && has!("avx512f") && has!("avx512vl") && has!("avx512bw");
        let codes = if has!("avx512vbmi") { avx512bf16::LEVEL.codes } else { avx512::LEVEL.codes };
        let bf16 = Level { codes, ..avx512bf16::LEVEL };
        levels.extend((avx512 && has!("avx512bf16")).then_some(bf16));
        levels.extend(avx512.then_some(avx512::LEVEL));
        levels.extend(avx2.then_some(avx2::LEVEL));
    }
    levels.push(portable::LEVEL);
    levels
}
