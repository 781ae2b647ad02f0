//! Which rows go through which expert.

use std::ops::Range;

use crate::error::CoreError;
use crate::layout::{ExpertId, Layout, Shape, layout_into};

/// Pairs sorted by expert.
pub struct Routing {
    /// T*K pairs.
    pub pairs: usize,
    buffer: Vec<i32>,
    /// Experts with rows, in order, and their sorted rows.
    pub hits: Vec<(usize, Range<usize>)>,
}

impl Routing {
    /// Sorts the pairs of (T, K) ids; ids outside `0..experts` get no row.
    ///
    /// # Errors
    /// `LayoutError` for sizes that no layout has.
    ///
    /// # Safety
    /// T x K ids must be readable at `ids` with these strides.
    pub unsafe fn new<I: ExpertId>(
        ids: *const I,
        strides: [isize; 2],
        shape: [usize; 2],
        experts: usize,
    ) -> Result<Self, CoreError> {
        let [tokens, slots] = shape;
        let pairs = tokens.saturating_mul(slots);
        let layout = Shape::new(pairs, experts, 1)?;
        // A copy, so that ids that another thread changes meanwhile cannot send a row out of its expert's range.
        let mut own = Vec::with_capacity(pairs);
        for token in 0..tokens as isize {
            for slot in 0..slots as isize {
                let at = ids.wrapping_offset(token * strides[0] + slot * strides[1]);
                // SAFETY: readable by this function's contract; the read asks for no alignment.
                own.push(unsafe { at.read_unaligned() }.bucket(experts as u32) as i32);
            }
        }
        let mut buffer = vec![0; layout.buffer_len()];
        layout_into(&own, &layout, &mut buffer, 1)?;
        let Layout { counts, offsets, .. } = Layout::cut(&mut buffer, &layout)?;
        let ends = counts.iter().zip(offsets.iter()).enumerate().filter(|(_, (count, _))| **count > 0);
        let hits = ends.map(|(e, (count, end))| (e, (end - count) as usize..*end as usize)).collect();
        Ok(Self { pairs, buffer, hits })
    }

    /// Sorted row -> pair.
    pub fn order(&self) -> &[i32] {
        &self.buffer[..self.pairs]
    }

    /// Pair -> sorted row.
    pub fn inverse(&self) -> &[i32] {
        &self.buffer[self.pairs..2 * self.pairs]
    }

    /// Sorted rows that have an expert.
    pub fn rows(&self) -> usize {
        self.hits.last().map_or(0, |(_, rows)| rows.end)
    }
}
