//! Rows as the products read them: packed, padded with zeros, in one of two types.

use super::format::Code;
use super::number::{Bf16, Dtype, Number, with_number};
use super::product::DEPTH_UNIT;

/// Numbers with two strides, wherever they lie.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// The first number.
    pub data: *const u8,
    /// Its type.
    pub dtype: Dtype,
    /// Numbers from one row, and from one column, to the next.
    pub strides: [isize; 2],
}

/// A line of the cache, to which rows are aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// What a product wants of its operand rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// float32 or bfloat16.
    pub dtype: Dtype,
    /// The code in whose order the numbers of a chunk lie.
    pub order: Option<Code>,
}

/// Rows of float32 or bfloat16, zero up to a multiple of `DEPTH_UNIT` or of a code's chunk.
pub struct Operand {
    /// Owns the memory; it is read and written at `start` alone, by several threads in places of their own.
    _lines: Vec<Line>,
    start: *mut u8,
    kind: Kind,
    row_bytes: usize,
}

impl Operand {
    /// Rows of zeros.
    pub fn zeros(rows: usize, depth: usize, kind: Kind) -> Self {
        // An odd number of lines, so that the same columns of many rows do not share one set of the cache.
        let unit = kind.order.map_or(DEPTH_UNIT, Code::chunk);
        let row_bytes = ((depth.next_multiple_of(unit) * kind.dtype.size()).div_ceil(64) | 1) * 64;
        let mut lines = vec![Line([0; 64]); (rows * row_bytes).div_ceil(64)];
        Self { start: lines.as_mut_ptr().cast(), _lines: lines, kind, row_bytes }
    }

    /// The rows of a grid.
    ///
    /// # Safety
    /// The grid must be readable over rows and depth.
    pub unsafe fn copy(grid: &Grid, rows: usize, depth: usize, kind: Kind) -> Self {
        let operand = Self::zeros(rows, depth, kind);
        let mut values = vec![0.0; if kind.order.is_some() { depth } else { 0 }];
        for row in 0..rows {
            // SAFETY: the grid is readable by this function's contract, and the row is `depth` numbers long.
            unsafe {
                if kind.order.is_some() {
                    with_number!(grid.dtype, widen_row::<_>(grid, row, &mut values));
                    operand.write(row, 0, &values);
                } else {
                    with_number!(grid.dtype, copy_row::<_>(grid, row, depth, kind.dtype, operand.row(row)));
                }
            }
        }
        operand
    }

    /// Writes numbers of a row from a depth on.
    ///
    /// # Safety
    /// The row must be so long, and nobody else write or read these numbers.
    pub unsafe fn write(&self, row: usize, depth: usize, values: &[f32]) {
        let Kind { dtype, order } = self.kind;
        let to = self.row(row);
        // SAFETY: the contract is this function's.
        unsafe {
            match (order, dtype) {
                (None, _) => {
                    with_number!(dtype, write::<_>(values, to.wrapping_add(depth * dtype.size())));
                }
                (Some(code), Dtype::Bf16) => scatter::<Bf16>(values, to.cast(), depth, code, dtype),
                (Some(code), _) => scatter::<f32>(values, to.cast(), depth, code, dtype),
            }
        }
    }

    /// Where a row begins.
    pub fn row(&self, row: usize) -> *mut u8 {
        self.start.wrapping_add(row * self.row_bytes)
    }
}

unsafe fn copy_row<N: Number>(grid: &Grid, row: usize, depth: usize, dtype: Dtype, to: *mut u8) {
    let from = grid.data.cast::<N>().wrapping_offset(row as isize * grid.strides[0]);
    // SAFETY: the caller's grid and row are `depth` numbers long.
    unsafe {
        if grid.dtype == dtype && grid.strides[1] == 1 {
            std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, depth * dtype.size());
        } else if dtype == Dtype::Bf16 {
            convert::<N, Bf16>(from, grid.strides[1], depth, to.cast());
        } else {
            convert::<N, f32>(from, grid.strides[1], depth, to.cast());
        }
    }
}

unsafe fn widen_row<N: Number>(grid: &Grid, row: usize, values: &mut [f32]) {
    let from = grid.data.cast::<N>().wrapping_offset(row as isize * grid.strides[0]);
    for (place, value) in values.iter_mut().enumerate() {
        // SAFETY: the caller's grid is readable; the read asks for no alignment.
        *value = unsafe { from.wrapping_offset(place as isize * grid.strides[1]).read_unaligned() }.widen();
    }
}

/// Writes numbers in the order of a code.
unsafe fn scatter<N: Number>(values: &[f32], row: *mut N, depth: usize, code: Code, dtype: Dtype) {
    let (places, chunk) = (code.places(dtype), code.chunk());
    for (at, value) in (depth..).zip(values) {
        // SAFETY: a row is whole chunks long, and every depth has a place of its own within its chunk.
        unsafe { row.add(at / chunk * chunk + places[at % chunk] as usize).write(N::narrow(*value)) };
    }
}

unsafe fn convert<N: Number, M: Number>(from: *const N, step: isize, depth: usize, to: *mut M) {
    for place in 0..depth {
        // SAFETY: the caller's places are readable and writable; the read asks for no alignment.
        unsafe {
            let value = from.wrapping_offset(place as isize * step).read_unaligned().widen();
            to.add(place).write(M::narrow(value));
        }
    }
}

/// Writes numbers one after the other.
///
/// # Safety
/// As many numbers as there are values must be writable at `to`, with any alignment.
pub unsafe fn write<N: Number>(values: &[f32], to: *mut u8) {
    let to = to.cast::<N>();
    for (place, value) in values.iter().enumerate() {
        // SAFETY: this function's contract.
        unsafe { to.add(place).write_unaligned(N::narrow(*value)) };
    }
}

/// Number at a row and column.
///
/// # Safety
/// It must be readable.
pub unsafe fn read<N: Number>(grid: &Grid, row: usize, column: usize) -> f32 {
    let at = row as isize * grid.strides[0] + column as isize * grid.strides[1];
    // SAFETY: this function's contract; the read asks for no alignment.
    unsafe { grid.data.cast::<N>().wrapping_offset(at).read_unaligned() }.widen()
}
