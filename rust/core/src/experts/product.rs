//! A few rows times some columns of one matrix, which streams from memory once.
//!
//! Where a column's numbers are neighbours, tiles of dot products read a few columns at a time; where a row's are,
//! the results are summed up in place, a few depths at a time. Every result is a sum of its own, so neither tiles nor
//! threads change a bit of it.

use std::ops::Range;

use super::format::{Code, Scales};
use super::lanes::{LANES, Lanes};
use super::number::{Bf16, Dtype, F16, Number, with_number};

/// Takes the tile whose number of rows, a constant of it, is what is left.
macro_rules! of_rows_left {
    ($level:ident, $left:expr, $tile:ident) => {
        match $left {
            6 if $level::ROWS >= 6 => $tile!(6),
            5 if $level::ROWS >= 5 => $tile!(5),
            4 if $level::ROWS >= 4 => $tile!(4),
            3 if $level::ROWS >= 3 => $tile!(3),
            2 => $tile!(2),
            _ => $tile!(1),
        }
    };
}

pub mod codes;
mod dots;
mod pack;
mod scales;
mod sums;

/// What one row of results needs of its operand: rows are zero up to a multiple of this, or of a chunk of codes.
pub const DEPTH_UNIT: usize = 32;

/// One expert's matrix: columns, each over a depth.
#[derive(Clone, Copy)]
pub struct Matrix {
    /// The first number, or byte of codes.
    pub data: *const u8,
    /// Numbers (bytes of codes) from one column to the next.
    pub column: isize,
    /// Numbers (bytes of codes) from one depth to the next.
    pub step: isize,
    /// Length of a column.
    pub depth: usize,
    /// First bias, or null.
    pub bias: *const u8,
    /// Numbers from one bias to the next.
    pub bias_step: isize,
    /// Type of the bias.
    pub bias_dtype: Dtype,
    /// What the numbers are, where they are codes.
    pub codes: Option<Codes>,
}

/// The codes of one expert's matrix.
#[derive(Clone, Copy)]
pub struct Codes {
    /// What a code stands for.
    pub code: Code,
    /// Layout of the scales.
    pub scales: Scales,
    /// The expert's first scale.
    pub data: *const u8,
}

/// `out[row][column] = rows[row] . matrix[column] + bias[column]`, in float32.
pub struct Product<'a> {
    /// The matrix of all rows.
    pub matrix: Matrix,
    /// Which columns.
    pub columns: Range<usize>,
    /// Operand rows, of the depth rounded up to `DEPTH_UNIT`.
    pub rows: &'a [*const u8],
    /// Result of the first row and column.
    pub out: *mut f32,
    /// Numbers from one row of results to the next, at least the columns rounded up to `LANES`.
    pub out_stride: usize,
}

/// The types of a product: what rows and matrices hold, and how a step over the depth is taken.
///
/// # Safety
/// As for [`Lanes`]: the level's instructions must exist, `STEP` numbers must be readable.
pub trait Terms<L: Lanes> {
    /// Numbers of operand rows.
    type Row: Number;
    /// Numbers of the matrix.
    type Weight: Loaded;
    /// A step of either.
    type Step: Copy;
    /// Depths of a step.
    const STEP: usize;

    /// A step of a row.
    unsafe fn row(from: *const Self::Row) -> Self::Step;
    /// A step of a column.
    unsafe fn weight(from: *const Self::Weight) -> Self::Step;
    /// Adds the products to the sixteen sums.
    unsafe fn add(row: Self::Step, weight: Self::Step, sums: L::Single) -> L::Single;
}

/// A weight that sixteen lanes can load.
pub trait Loaded: Number {
    /// Sixteen numbers, widened.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn load<L: Lanes>(from: *const Self) -> L::Single;
}

macro_rules! loaded {
    ($($number:ty: $load:ident),*) => {$(
        impl Loaded for $number {
            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const Self) -> L::Single {
                // SAFETY: this function's contract is that of the load.
                unsafe { L::$load(from) }
            }
        }
    )*};
}
loaded!(f32: load_f32, Bf16: load_bf16, F16: load_f16);

/// Rows in float32, weights widened.
pub struct Wide<W>(std::marker::PhantomData<W>);

/// Rows and weights in bfloat16.
pub struct Pairs;

impl<L: Lanes, W: Loaded> Terms<L> for Wide<W> {
    type Row = f32;
    type Weight = W;
    type Step = L::Single;
    const STEP: usize = LANES;

    #[inline(always)]
    unsafe fn row(from: *const f32) -> L::Single {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_f32(from) }
    }

    #[inline(always)]
    unsafe fn weight(from: *const W) -> L::Single {
        // SAFETY: this function's contract is that of the load.
        unsafe { W::load::<L>(from) }
    }

    #[inline(always)]
    unsafe fn add(row: L::Single, weight: L::Single, sums: L::Single) -> L::Single {
        // SAFETY: registers alone; the caller has the instructions.
        unsafe { L::fused(row, weight, sums) }
    }
}

impl<L: Lanes> Terms<L> for Pairs {
    type Row = Bf16;
    type Weight = Bf16;
    type Step = L::Pairs;
    const STEP: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn row(from: *const Bf16) -> L::Pairs {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_pairs(from) }
    }

    #[inline(always)]
    unsafe fn weight(from: *const Bf16) -> L::Pairs {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_pairs(from) }
    }

    #[inline(always)]
    unsafe fn add(row: L::Pairs, weight: L::Pairs, sums: L::Single) -> L::Single {
        // SAFETY: registers alone; the caller has the instructions.
        unsafe { L::fused_pairs(row, weight, sums) }
    }
}

/// Whether the matrix is read along its columns: then rows may be bfloat16.
pub fn is_read_along_columns(column: isize, step: isize, depth: usize) -> bool {
    step == 1 || column != 1 || depth == 1
}

/// Runs a product.
///
/// # Safety
/// The processor has the level's instructions; every address of the product's fields is readable for the numbers that
/// they promise, `out` writable and nobody else's.
#[inline(always)]
pub unsafe fn multiply<L: Lanes, T: Terms<L>>(product: &Product<'_>) {
    let Matrix { column, step, depth, .. } = product.matrix;
    // SAFETY: the contract of the callees is this one's.
    unsafe {
        if !is_read_along_columns(column, step, depth) {
            sums::in_place::<L, T>(product);
        } else if L::COLUMNS == 4 {
            dots::columns_at_once::<L, T, 4>(product);
        } else {
            dots::columns_at_once::<L, T, 2>(product);
        }
        add_bias(product);
    }
}

/// Adds the bias, if there is one.
unsafe fn add_bias(product: &Product<'_>) {
    if !product.matrix.bias.is_null() {
        // SAFETY: the contract of `multiply`.
        unsafe { with_number!(product.matrix.bias_dtype, add_bias_of::<_>(product)) };
    }
}

unsafe fn add_bias_of<W: Number>(product: &Product<'_>) {
    let Matrix { bias, bias_step, .. } = product.matrix;
    for row in 0..product.rows.len() {
        for (place, column) in product.columns.clone().enumerate() {
            // SAFETY: there is a bias for every column, and these results are the product's own.
            unsafe {
                let value = bias.cast::<W>().wrapping_offset(column as isize * bias_step).read_unaligned();
                *product.out.add(row * product.out_stride + place) += value.widen();
            }
        }
    }
}
