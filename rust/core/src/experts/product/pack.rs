//! Columns of codes whose bytes are no neighbours, copied so that they are.

use super::Matrix;
use crate::experts::format::CHUNK;
use crate::experts::lanes::prefetch;

/// Columns that are copied at once.
pub const COLUMNS: usize = 128;
/// Bytes of a side of the squares that are turned in registers.
const SIDE: usize = 8;
/// Rows of bytes that memory should be ahead.
const AHEAD: usize = 4 * SIDE;

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
                let mut rows = [0; SIDE];
                for (place, row) in rows.iter_mut().enumerate() {
                    let from = address(matrix, first + column, at + place).cast::<u64>();
                    // SAFETY: the square lies within the matrix; the read asks for no alignment.
                    *row = u64::from_le(unsafe { from.read_unaligned() });
                }
                let to =
                    self.bytes[column * self.length + at..][..(SIDE - 1) * self.length + SIDE].as_mut_ptr();
                for (across, row) in squared(rows).into_iter().enumerate() {
                    // SAFETY: eight bytes at every column, within the slice.
                    unsafe { to.add(across * self.length).cast::<u64>().write_unaligned(row.to_le()) };
                }
            }
        }
    }
}

fn address(matrix: &Matrix, column: usize, at: usize) -> *const u8 {
    matrix.data.wrapping_offset(column as isize * matrix.column + at as isize * matrix.step)
}

/// Rows of eight bytes to columns: halves, quarters and bytes change sides.
#[inline(always)]
fn squared(mut rows: [u64; SIDE]) -> [u64; SIDE] {
    for (distance, mask) in
        [(4, 0x0000_0000_FFFF_FFFF), (2, 0x0000_FFFF_0000_FFFF), (1, 0x00FF_00FF_00FF_00FF_u64)]
    {
        let bits = 8 * distance;
        for row in 0..SIDE {
            if row & distance == 0 {
                let (upper, lower) = (rows[row], rows[row + distance]);
                rows[row] = upper & mask | (lower & mask) << bits;
                rows[row + distance] = (upper >> bits) & mask | lower & !mask;
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_turned() {
        let rows: [[u8; SIDE]; SIDE] =
            std::array::from_fn(|row| std::array::from_fn(|column| (row * 8 + column) as u8));
        let columns = squared(rows.map(u64::from_le_bytes)).map(u64::to_le_bytes);
        for row in 0..SIDE {
            for column in 0..SIDE {
                assert_eq!(columns[column][row], rows[row][column]);
            }
        }
    }
}
