//! The scales of a tile's columns as float32, one for every group of lanes of every chunk.

use super::Codes;
use crate::experts::format::Scales;

/// Scales that are read at once, of which a pattern takes some.
const READ: usize = 4;

/// Rows of scales that were asked for last.
pub struct Rows {
    values: Vec<f32>,
    filled: Vec<usize>,
    length: usize,
    /// Depths of a group.
    group: usize,
    depth: usize,
}

impl Rows {
    /// Room for the rows of so many columns.
    pub fn new(columns: usize, chunks: usize, groups: usize, group: usize, depth: usize) -> Self {
        let length = chunks * groups + READ;
        Self { values: vec![1.0; columns * length], filled: vec![usize::MAX; columns], length, group, depth }
    }

    /// Where a column's scales begin in [`Rows::data`], for columns of a tile in their order.
    ///
    /// # Safety
    /// The codes' scales must be readable over rows and depth.
    #[inline(always)]
    pub unsafe fn of(&mut self, codes: &Codes, column: usize, place: usize) -> usize {
        let row = codes.scales.row(column);
        // Columns of one block share a row, the next tile's as well.
        let place = if self.filled[0] == row { 0 } else { place };
        let values = &mut self.values[place * self.length..][..self.length - READ];
        if self.filled[place] != row {
            self.filled[place] = row;
            // SAFETY: the contract is this function's.
            unsafe { fill(codes, row, self.group, self.depth, values) };
        }
        place * self.length
    }

    /// All scales.
    pub fn data(&self) -> *const f32 {
        self.values.as_ptr()
    }
}

/// The scale of every group; those behind the depth stay as they are, for their numbers are zeros.
#[inline(always)]
unsafe fn fill(codes: &Codes, row: usize, group: usize, depth: usize, values: &mut [f32]) {
    let Scales { block: [_, along], .. } = codes.scales;
    let groups = depth.div_ceil(group);
    let values = &mut values[..groups];
    // SAFETY: a row has a scale for every block of its depth.
    unsafe {
        if along == group {
            codes.scales.read_all(codes.data, row, values);
        } else {
            for (block, values) in values.chunks_mut(along.min(depth).div_ceil(group)).enumerate() {
                values.fill(codes.scales.read(codes.data, row, block));
            }
        }
    }
}
