//! Columns of codes whose bytes are no neighbours, copied so that they are.

use super::Matrix;
use crate::experts::format::CHUNK;
use crate::experts::lanes::prefetch;

/// Columns that are copied at once.
pub const COLUMNS: usize = 128;
/// Bytes of a side of the squares that are turned in registers.
const SIDE: usize = 16;
/// Rows of bytes that memory should be ahead.
const AHEAD: usize = 2 * SIDE;

/// Columns one after the other, with room for a whole chunk at the end of each.
#[derive(Default)]
pub struct Packed {
    bytes: Vec<u8>,
    length: usize,
}

impl Packed {
    /// The same matrix, for `columns` columns from `first` on.
    ///
    /// # Safety
    /// The matrix must be readable over these columns and `depth` bytes of each.
    #[inline(never)] // baseline code: with wider registers compilers gather the rows, which is 20 times slower
    pub unsafe fn copy(&mut self, matrix: &Matrix, first: usize, columns: usize, depth: usize) -> Matrix {
        // An odd number of lines, so that the same places of many columns do not share one set of the cache.
        self.length = (depth.div_ceil(CHUNK) | 1) * CHUNK;
        self.bytes.resize(COLUMNS * self.length, 0);
        // SAFETY: the contract is this function's.
        unsafe {
            let turned =
                if matrix.column == 1 { [columns / SIDE * SIDE, depth / SIDE * SIDE] } else { [0; 2] };
            self.turn(matrix, first, turned);
            for column in 0..columns {
                for at in if column < turned[0] { turned[1] } else { 0 }..depth {
                    self.bytes[column * self.length + at] = address(matrix, first + column, at).read();
                }
            }
        }
        let data = self.bytes.as_ptr().wrapping_sub(first * self.length);
        Matrix { data, column: self.length as isize, step: 1, ..*matrix }
    }

    /// Rows of neighbouring bytes to columns, for whole squares.
    unsafe fn turn(&mut self, matrix: &Matrix, first: usize, [columns, depth]: [usize; 2]) {
        for at in (0..depth).step_by(SIDE) {
            for line in (0..columns).step_by(CHUNK) {
                for row in at + AHEAD..at + AHEAD + SIDE {
                    prefetch(address(matrix, first + line, row));
                }
            }
            for column in (0..columns).step_by(SIDE) {
                let to = &mut self.bytes[column * self.length + at..][..(SIDE - 1) * self.length + SIDE];
                // SAFETY: the square lies within the matrix, and within the slice.
                unsafe {
                    let from = address(matrix, first + column, at);
                    turn_square(from, matrix.step, to.as_mut_ptr(), self.length as isize);
                }
            }
        }
    }
}

fn address(matrix: &Matrix, column: usize, at: usize) -> *const u8 {
    matrix.data.wrapping_offset(column as isize * matrix.column + at as isize * matrix.step)
}

/// Rows of bytes to columns: four times, rows that are half the side apart are interleaved.
///
/// # Safety
/// `SIDE` rows of `SIDE` bytes must be readable at `from` and writable at `to`.
#[cfg(target_arch = "x86_64")]
unsafe fn turn_square(from: *const u8, step: isize, to: *mut u8, length: isize) {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm_setzero_si128, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpacklo_epi8,
    };
    // SAFETY: this function's contract; the instructions are part of every x86-64 and ask for no alignment.
    unsafe {
        let mut rows = [_mm_setzero_si128(); SIDE];
        for (place, row) in rows.iter_mut().enumerate() {
            *row = _mm_loadu_si128(from.wrapping_offset(place as isize * step).cast());
        }
        for _ in 0..SIDE.ilog2() {
            let old = rows;
            for half in 0..SIDE / 2 {
                rows[2 * half] = _mm_unpacklo_epi8(old[half], old[half + SIDE / 2]);
                rows[2 * half + 1] = _mm_unpackhi_epi8(old[half], old[half + SIDE / 2]);
            }
        }
        for (place, row) in rows.into_iter().enumerate() {
            _mm_storeu_si128(to.wrapping_offset(place as isize * length).cast(), row);
        }
    }
}

/// Rows of bytes to columns.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn turn_square(from: *const u8, step: isize, to: *mut u8, length: isize) {
    for place in 0..(SIDE * SIDE) as isize {
        let (row, across) = (place / SIDE as isize, place % SIDE as isize);
        // SAFETY: this function's contract.
        unsafe { *to.wrapping_offset(across * length + row) = *from.wrapping_offset(row * step + across) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_turned() {
        let rows: [[u8; SIDE]; SIDE] =
            std::array::from_fn(|row| std::array::from_fn(|at| (row * SIDE + at) as u8));
        let mut columns = [[0; SIDE]; SIDE];
        // SAFETY: both are squares.
        unsafe {
            turn_square(rows.as_ptr().cast(), SIDE as isize, columns.as_mut_ptr().cast(), SIDE as isize);
        }
        for row in 0..SIDE {
            for column in 0..SIDE {
                assert_eq!(columns[column][row], rows[row][column]);
            }
        }
    }
}
