//! From expert ids to rows sorted by expert: a stable counting sort into buffers of the caller.
//!
//! Letters: T tokens, K slots a token, S = T*K pairs, E experts, A alignment, R padded rows. A pair whose id is
//! outside `0..E` is a sentinel: it is nobody's row, and sorts behind every expert in pair order.

use crate::error::{CoreError, ErrorKind};

mod sort;

/// Pairs one thread must have to be worth starting; a start costs tens of microseconds, a pair about 2 ns.
const PAIRS_PER_WORKER: usize = 1 << 17;

/// An integer type that expert ids come in.
pub trait ExpertId: Copy + Send + Sync + Into<i128> {
    /// The expert, or `experts` for a sentinel (negative or too large).
    fn bucket(self, experts: u32) -> u32;
}

macro_rules! expert_ids {
    ($($id:ty),*) => {$(
        impl ExpertId for $id {
            #[inline]
            #[allow(clippy::cast_lossless, reason = "the same cast must read for every width")]
            fn bucket(self, experts: u32) -> u32 {
                // Sign extension makes every negative id larger than any expert count: one compare does both ends.
                (self as i64 as u64).min(u64::from(experts)) as u32
            }
        }
    )*};
}
expert_ids!(u8, i8, i16, i32, i64, u16, u32, u64);

/// Sizes of one layout, checked once: every index of every part fits in an int32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pairs: usize,
    experts: usize,
    alignment: usize,
    rows: usize,
}

impl Shape {
    /// Checks S pairs over E experts at alignment A.
    ///
    /// # Errors
    /// `LayoutError` if E or A is zero, or an index would not fit in an int32.
    pub fn new(pairs: usize, experts: usize, alignment: usize) -> Result<Self, CoreError> {
        const LIMIT: usize = i32::MAX as usize;
        if experts == 0 || experts > LIMIT {
            return Err(refuse(
                "the number of experts",
                experts,
                "1 <= E < 2**31",
                "pass the E of this module",
            ));
        }
        if alignment == 0 || alignment > LIMIT {
            let hint = "pass 1 for rows without padding";
            return Err(refuse("the alignment", alignment, "1 <= A < 2**31", hint));
        }
        if pairs > LIMIT {
            let hint = "offsets are int32: split the tokens over several calls";
            return Err(refuse("T*K, the number of (token, slot) pairs", pairs, "less than 2**31", hint));
        }
        // The bound needs no look at the ids, so that a device can allocate without waiting for them.
        let rows = pairs.saturating_add(pairs.min(experts).saturating_mul(alignment - 1));
        if rows > LIMIT {
            let hint = "use a smaller alignment, or split the tokens over several calls";
            return Err(refuse("the number of padded rows", rows, "less than 2**31", hint));
        }
        Ok(Self { pairs, experts, alignment, rows })
    }

    /// S, the number of ids.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Length of the buffer that holds all parts, as [`Layout::cut`] cuts it.
    pub fn buffer_len(&self) -> usize {
        let plain = 2 * self.pairs + 2 * self.experts;
        if self.alignment == 1 {
            plain
        } else {
            plain + self.experts + 1 + self.rows + self.rows / self.alignment
        }
    }

    /// Threads worth using when the caller may use `threads`.
    pub fn workers(&self, threads: usize) -> usize {
        // Merging the counts of the threads walks E numbers for each, which must stay small beside the sort.
        threads.min(self.pairs / PAIRS_PER_WORKER.max(self.experts)).max(1)
    }
}

fn refuse(what: &str, found: usize, needed: &str, hint: &str) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: format!("{what} is out of range"),
        found: Some(found.to_string()),
        needed: Some(needed.to_owned()),
        hint: Some(hint.to_owned()),
    }
}

/// The parts of a layout, in the order in which they lie in one buffer.
#[derive(Debug)]
pub struct Layout<'a> {
    /// (S) sorted row -> pair.
    pub order: &'a mut [i32],
    /// (S) pair -> sorted row.
    pub inverse: &'a mut [i32],
    /// (E) pairs of each expert.
    pub counts: &'a mut [i32],
    /// (E) exclusive end of each expert's sorted rows.
    pub offsets: &'a mut [i32],
    /// With A > 1, where the rows lie once every expert starts at a multiple of A.
    pub padded: Option<Padded<'a>>,
}

/// The padded half of a layout.
#[derive(Debug)]
pub struct Padded<'a> {
    /// (E+1) first padded row of each expert; the last is the end of the rows in use.
    pub starts: &'a mut [i32],
    /// (R) expert of each padded row, -1 on padding and behind the end.
    pub row_expert: &'a mut [i32],
    /// (R/A) expert of each block of A rows, -1 behind the end.
    pub block_expert: &'a mut [i32],
}

impl<'a> Layout<'a> {
    /// Cuts a buffer into its parts.
    ///
    /// # Errors
    /// `LayoutError` unless the buffer holds exactly `shape.buffer_len()` numbers.
    pub fn cut(buffer: &'a mut [i32], shape: &Shape) -> Result<Self, CoreError> {
        if buffer.len() != shape.buffer_len() {
            let needed = shape.buffer_len().to_string();
            return Err(refuse("the length of the output buffer", buffer.len(), &needed, "ask buffer_len()"));
        }
        let (order, rest) = buffer.split_at_mut(shape.pairs);
        let (inverse, rest) = rest.split_at_mut(shape.pairs);
        let (counts, rest) = rest.split_at_mut(shape.experts);
        let (offsets, rest) = rest.split_at_mut(shape.experts);
        let padded = (shape.alignment > 1).then(|| {
            let (starts, rest) = rest.split_at_mut(shape.experts + 1);
            let (row_expert, block_expert) = rest.split_at_mut(shape.rows);
            Padded { starts, row_expert, block_expert }
        });
        Ok(Self { order, inverse, counts, offsets, padded })
    }
}

/// Fills `buffer` with the layout of `ids`, on exactly `workers` threads; the result does not depend on them.
///
/// # Errors
/// `LayoutError` if the ids or the buffer are not of the shape's sizes; nothing is written then.
pub fn layout_into<I: ExpertId>(
    ids: &[I],
    shape: &Shape,
    buffer: &mut [i32],
    workers: usize,
) -> Result<(), CoreError> {
    if ids.len() != shape.pairs {
        let needed = shape.pairs.to_string();
        return Err(refuse("the number of ids", ids.len(), &needed, "make the shape from these ids"));
    }
    let mut layout = Layout::cut(buffer, shape)?;
    let workers = workers.clamp(1, shape.pairs.max(1));
    sort::sort(ids, shape, &mut layout, workers);
    if let Some(padded) = &mut layout.padded {
        sort::pad(layout.counts, shape, padded, workers);
    }
    Ok(())
}

/// Position and value of the first id outside `0..experts`, if there is one.
pub fn first_out_of_range<I: ExpertId>(ids: &[I], experts: u32) -> Option<(usize, i128)> {
    // Blocks without an early exit let the common case, no such id, run at full width.
    const BLOCK: usize = 256;
    let outside = |id: &I| id.bucket(experts) == experts;
    let block = ids.chunks(BLOCK).position(|block| block.iter().fold(false, |any, id| any | outside(id)))?;
    let first = block * BLOCK;
    let position = first + ids[first..].iter().position(outside)?;
    Some((position, ids[position].into()))
}
