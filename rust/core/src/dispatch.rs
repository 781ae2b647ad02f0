//! The plan of an expert-parallel exchange: which rows go to which rank, and the way back.
//!
//! Letters: T tokens, K slots a token, S = T*K pairs, E experts, W ranks, C chunks, M = min(K, W). Rank w owns experts
//! `w*E/W .. (w+1)*E/W`. A token travels once to each rank that owns any of its experts, so there are at most T*M rows;
//! they are sorted by rank, then by token. A pair whose id is outside `0..E` goes nowhere.

use crate::error::{CoreError, ErrorKind};
use crate::layout::ExpertId;

/// Who owns which experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    experts: u32,
    count: usize,
    share: u32,
}

impl Ranks {
    /// Shares E experts among W ranks.
    ///
    /// # Errors
    /// `LayoutError` if either is zero or too large, or E is no multiple of W.
    pub fn new(experts: usize, ranks: usize) -> Result<Self, CoreError> {
        const LIMIT: usize = i32::MAX as usize;
        if experts == 0 || ranks == 0 || experts > LIMIT || !experts.is_multiple_of(ranks) {
            return Err(CoreError {
                kind: ErrorKind::LayoutError,
                message: format!("{experts} experts cannot be shared equally by {ranks} ranks"),
                found: Some(format!("{experts} experts, {ranks} ranks")),
                needed: Some("a number of experts that is a multiple of the number of ranks".to_owned()),
                hint: Some("choose a number of ranks that divides the number of experts".to_owned()),
            });
        }
        Ok(Self { experts: experts as u32, count: ranks, share: (experts / ranks) as u32 })
    }

    /// W.
    pub fn ranks(&self) -> usize {
        self.count
    }

    fn owner<I: ExpertId>(&self, id: I) -> Option<usize> {
        let expert = id.bucket(self.experts);
        (expert < self.experts).then(|| (expert / self.share) as usize)
    }
}

/// Sizes of one plan, checked once: every index of every part fits in an int32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    tokens: usize,
    slots: usize,
    ranks: Ranks,
}

impl Shape {
    /// Checks T tokens of K slots over some ranks.
    ///
    /// # Errors
    /// `LayoutError` if an index would not fit in an int32.
    pub fn new(tokens: usize, slots: usize, ranks: Ranks) -> Result<Self, CoreError> {
        let shape = Self { tokens, slots, ranks };
        let places =
            tokens.checked_mul(slots).and_then(|pairs| pairs.checked_mul(shape.most_rows_of_token()));
        if places.is_none_or(|places| places > i32::MAX as usize) {
            return Err(CoreError {
                kind: ErrorKind::LayoutError,
                message: "a plan numbers its slots in int32".to_owned(),
                found: Some(format!("T={tokens}, K={slots}, {} ranks", ranks.count)),
                needed: Some("T * K * min(K, ranks) less than 2**31".to_owned()),
                hint: Some("split the tokens over several calls".to_owned()),
            });
        }
        Ok(shape)
    }

    /// S, the number of ids.
    pub fn pairs(&self) -> usize {
        self.tokens * self.slots
    }

    /// M, the most rows that one token becomes.
    pub fn most_rows_of_token(&self) -> usize {
        self.slots.min(self.ranks.count)
    }

    /// T*M, the most rows of a plan.
    pub fn most_rows(&self) -> usize {
        self.tokens * self.most_rows_of_token()
    }

    /// Length of the buffer that holds all parts, as [`Plan::cut`] cuts it.
    pub fn buffer_len(&self) -> usize {
        self.ranks.count + self.pairs() + 2 * self.most_rows() + self.most_rows() * self.slots
    }
}

/// The parts of a plan, in the order in which they lie in one buffer.
#[derive(Debug)]
pub struct Plan<'a> {
    /// (W) rows for each rank.
    pub rows: &'a mut [i32],
    /// (T*M) row -> token, -1 behind the last row.
    pub source: &'a mut [i32],
    /// (T*M, K) row and place -> pair; a row's pairs come first, in slot order, and -1 after them.
    pub pairs: &'a mut [i32],
    /// (T, K) pair -> row*K + place, -1 for a pair that goes nowhere.
    pub place: &'a mut [i32],
    /// (T, M) token -> its rows, in the order of the ranks, -1 after them.
    pub homes: &'a mut [i32],
}

impl<'a> Plan<'a> {
    /// Cuts a buffer into its parts.
    ///
    /// # Errors
    /// `LayoutError` unless the buffer holds exactly `shape.buffer_len()` numbers.
    pub fn cut(buffer: &'a mut [i32], shape: &Shape) -> Result<Self, CoreError> {
        check_length("output numbers", buffer.len(), shape.buffer_len())?;
        let (rows, rest) = buffer.split_at_mut(shape.ranks.count);
        let (source, rest) = rest.split_at_mut(shape.most_rows());
        let (pairs, rest) = rest.split_at_mut(shape.most_rows() * shape.slots);
        let (place, homes) = rest.split_at_mut(shape.pairs());
        Ok(Self { rows, source, pairs, place, homes })
    }
}

/// Counts the rows of each of C runs of tokens for each rank into `rows` (C, W), and returns the most pairs of a row.
///
/// Run c holds tokens `c*T/C .. (c+1)*T/C`, rounded down.
///
/// # Errors
/// `LayoutError` if ids or output are not of the shape's sizes; nothing is written then.
pub fn count_rows<I: ExpertId>(ids: &[I], shape: &Shape, rows: &mut [i64]) -> Result<usize, CoreError> {
    check_length("ids", ids.len(), shape.pairs())?;
    let ranks = shape.ranks.count;
    if rows.is_empty() || !rows.len().is_multiple_of(ranks) {
        check_length("counts", rows.len(), ranks)?;
    }
    rows.fill(0);
    let chunks = rows.len() / ranks;
    let mut pairs_of = vec![0_usize; ranks];
    let mut widest = 0;
    for (chunk, counts) in rows.chunks_exact_mut(ranks).enumerate() {
        let (first, end) = (chunk * shape.tokens / chunks, (chunk + 1) * shape.tokens / chunks);
        for token in ids[first * shape.slots..end * shape.slots].chunks_exact(shape.slots.max(1)) {
            pairs_of.fill(0);
            for rank in token.iter().filter_map(|&id| shape.ranks.owner(id)) {
                counts[rank] += i64::from(pairs_of[rank] == 0);
                pairs_of[rank] += 1;
                widest = widest.max(pairs_of[rank]);
            }
        }
    }
    Ok(widest)
}

/// Fills `buffer` with the plan of `ids`.
///
/// # Errors
/// `LayoutError` if the ids or the buffer are not of the shape's sizes; nothing is written then.
pub fn plan_into<I: ExpertId>(ids: &[I], shape: &Shape, buffer: &mut [i32]) -> Result<(), CoreError> {
    check_length("ids", ids.len(), shape.pairs())?;
    check_length("output numbers", buffer.len(), shape.buffer_len())?;
    let ranks = shape.ranks.count;
    let mut counts = vec![0_i64; ranks];
    count_rows(ids, shape, &mut counts)?;
    buffer.fill(-1);
    let mut plan = Plan::cut(buffer, shape)?;
    let mut next = vec![0_usize; ranks];
    let mut start = 0;
    for ((rank, &count), first) in counts.iter().enumerate().zip(&mut next) {
        plan.rows[rank] = count as i32;
        *first = start;
        start += count as usize;
    }
    let mut open = vec![None; ranks];
    for (token, ids) in ids.chunks_exact(shape.slots.max(1)).enumerate() {
        place_token(token, ids, shape, &mut plan, &mut next, &mut open);
    }
    Ok(())
}

/// Places one token's pairs; `next` is every rank's next row, and `open` is left as it was found: all None.
fn place_token<I: ExpertId>(
    token: usize,
    ids: &[I],
    shape: &Shape,
    plan: &mut Plan<'_>,
    next: &mut [usize],
    open: &mut [Option<(usize, usize)>],
) {
    let slots = shape.slots;
    for (slot, &id) in ids.iter().enumerate() {
        let Some(rank) = shape.ranks.owner(id) else { continue };
        let (row, used) = open[rank].unwrap_or_else(|| {
            next[rank] += 1;
            (next[rank] - 1, 0)
        });
        let place = row * slots + used;
        plan.source[row] = token as i32;
        plan.pairs[place] = (token * slots + slot) as i32;
        plan.place[token * slots + slot] = place as i32;
        open[rank] = Some((row, used + 1));
    }
    let width = shape.most_rows_of_token();
    let homes = &mut plan.homes[token * width..(token + 1) * width];
    let mut filled = 0;
    for slot in open.iter_mut() {
        if let Some((row, _)) = slot.take() {
            homes[filled] = row as i32;
            filled += 1;
        }
    }
}

fn check_length(what: &str, found: usize, needed: usize) -> Result<(), CoreError> {
    if found == needed {
        return Ok(());
    }
    Err(CoreError {
        kind: ErrorKind::LayoutError,
        message: format!("the number of {what} does not fit the plan"),
        found: Some(found.to_string()),
        needed: Some(needed.to_string()),
        hint: Some("make the shape from these ids, and ask it for sizes".to_owned()),
    })
}
