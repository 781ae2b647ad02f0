//! Columns of codes whose bytes are no neighbours, copied so that they are.

use super::Matrix;
use crate::experts::format::CHUNK;

/// Columns that are copied at once.
pub const COLUMNS: usize = 64;
/// Bytes of a side of the squares that are turned in registers.
const SIDE: usize = 8;

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
    pub unsafe fn copy(&mut self, matrix: &Matrix, first: usize, columns: usize, depth: usize) -> Matrix {
        self.length = depth.next_multiple_of(CHUNK);
        self.bytes.resize(COLUMNS * self.length, 0);
        let whole = [columns / SIDE * SIDE, depth / SIDE * SIDE];
        for at in (0..whole[1]).step_by(SIDE) {
            for column in (0..whole[0]).step_by(SIDE) {
                // SAFETY: the square lies within the columns and the depth.
                unsafe { self.square(matrix, first, column, at) };
            }
        }
        for column in 0..columns {
            for at in if column < whole[0] { whole[1] } else { 0 }..depth {
                let from = address(matrix, first + column, at);
                // SAFETY: the matrix is readable there.
                self.bytes[column * self.length + at] = unsafe { from.read() };
            }
        }
        let data = self.bytes.as_ptr().wrapping_sub(first * self.length);
        Matrix { data, column: self.length as isize, step: 1, ..*matrix }
    }

    #[inline(always)]
    unsafe fn square(&mut self, matrix: &Matrix, first: usize, column: usize, at: usize) {
        let mut rows = [[0; SIDE]; SIDE];
        for (place, row) in rows.iter_mut().enumerate() {
            let from = address(matrix, first + column, at + place);
            for (across, byte) in row.iter_mut().enumerate() {
                // SAFETY: the square lies within the matrix.
                *byte = unsafe { from.wrapping_offset(across as isize * matrix.column).read() };
            }
        }
        for (across, row) in turned(rows.map(u64::from_le_bytes)).into_iter().enumerate() {
            let to = (column + across) * self.length + at;
            self.bytes[to..to + SIDE].copy_from_slice(&row.to_le_bytes());
        }
    }
}

fn address(matrix: &Matrix, column: usize, at: usize) -> *const u8 {
    matrix.data.wrapping_offset(column as isize * matrix.column + at as isize * matrix.step)
}

/// Rows of eight bytes to columns: halves, quarters and bytes change sides.
#[inline(always)]
fn turned(mut rows: [u64; SIDE]) -> [u64; SIDE] {
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
        let columns = turned(rows.map(u64::from_le_bytes)).map(u64::to_le_bytes);
        for row in 0..SIDE {
            for column in 0..SIDE {
                assert_eq!(columns[column][row], rows[row][column]);
            }
        }
    }
}
