//! The two passes of the counting sort, the padding, and the threads that share them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use super::{ExpertId, Layout, Padded, Shape};

/// Fills order, inverse, counts and offsets.
pub fn sort<I: ExpertId>(ids: &[I], shape: &Shape, layout: &mut Layout<'_>, workers: usize) {
    let chunk = shape.pairs.div_ceil(workers).max(1);
    let buckets = shape.experts + 1;
    let mut cursors = vec![0_u32; workers * buckets];

    let jobs = ids.chunks(chunk).zip(layout.inverse.chunks_mut(chunk)).zip(cursors.chunks_mut(buckets));
    on_threads(workers, jobs, |((ids, scratch), counts)| count(ids, shape.experts as u32, scratch, counts));

    counts_to_starts(&mut cursors, buckets, layout);

    let order = as_atomics(layout.order);
    let jobs = layout.inverse.chunks_mut(chunk).zip(cursors.chunks_mut(buckets)).enumerate();
    on_threads(workers, jobs, |(index, (inverse, cursors))| scatter(index * chunk, inverse, cursors, order));
}

/// Counts a chunk and leaves each pair's bucket in `scratch`: the second pass then reads memory of ours alone,
/// so an id that another thread of the caller changes meanwhile cannot send a row out of its expert's range.
fn count<I: ExpertId>(ids: &[I], experts: u32, scratch: &mut [i32], counts: &mut [u32]) {
    for (id, slot) in ids.iter().zip(scratch) {
        let bucket = id.bucket(experts);
        *slot = bucket as i32;
        counts[bucket as usize] += 1;
    }
}

/// Turns the counts of every chunk into the first row that chunk writes in every bucket.
fn counts_to_starts(cursors: &mut [u32], buckets: usize, layout: &mut Layout<'_>) {
    let mut next = 0;
    let parts = layout.counts.iter_mut().zip(layout.offsets.iter_mut());
    for (bucket, (count, end)) in parts.enumerate() {
        let begin = next;
        next = chunk_starts(cursors, buckets, bucket, begin);
        (*count, *end) = ((next - begin) as i32, next as i32);
    }
    chunk_starts(cursors, buckets, buckets - 1, next); // sentinels
}

fn chunk_starts(cursors: &mut [u32], buckets: usize, bucket: usize, mut next: u32) -> u32 {
    for chunk in cursors.chunks_exact_mut(buckets) {
        next += std::mem::replace(&mut chunk[bucket], next);
    }
    next
}

fn scatter(first_pair: usize, inverse: &mut [i32], cursors: &mut [u32], order: &[AtomicI32]) {
    for (pair, slot) in (first_pair..).zip(inverse) {
        let cursor = &mut cursors[*slot as usize];
        let row = *cursor;
        *cursor += 1;
        *slot = row as i32;
        order[row as usize].store(pair as i32, Ordering::Relaxed);
    }
}

/// Rows of one chunk lie scattered over `order`; relaxed stores are plain moves, and let threads share it safely.
fn as_atomics(order: &mut [i32]) -> &[AtomicI32] {
    // SAFETY: AtomicI32 has the size, alignment and bit validity of i32, and the exclusive borrow lasts as long as
    // the returned one, so nobody reads or writes these numbers other than through the atomics.
    unsafe { std::slice::from_raw_parts(order.as_mut_ptr().cast::<AtomicI32>(), order.len()) }
}

/// Fills the padded half from the counts.
pub fn pad(counts: &[i32], shape: &Shape, padded: &mut Padded<'_>, workers: usize) {
    let alignment = shape.alignment;
    let mut start = 0;
    let mut block = 0;
    for (expert, &rows) in counts.iter().enumerate() {
        padded.starts[expert] = start as i32;
        let blocks = (rows as usize).div_ceil(alignment);
        padded.block_expert[block..block + blocks].fill(expert as i32);
        block += blocks;
        start = block * alignment;
    }
    padded.starts[shape.experts] = start as i32;
    padded.block_expert[block..].fill(-1);

    let starts = &*padded.starts;
    let chunk = shape.rows.div_ceil(workers).max(1);
    let jobs = padded.row_expert.chunks_mut(chunk).enumerate();
    on_threads(workers, jobs, |(index, labels)| label_rows(index * chunk, labels, starts, counts));
}

/// Labels the padded rows `first..first + labels.len()`.
fn label_rows(first: usize, labels: &mut [i32], starts: &[i32], counts: &[i32]) {
    labels.fill(-1);
    let end = first + labels.len();
    let first_expert = starts[1..].partition_point(|&stop| stop as usize <= first);
    for expert in first_expert..counts.len() {
        let start = starts[expert] as usize;
        if start >= end {
            break;
        }
        let stop = (start + counts[expert] as usize).min(end);
        if stop > first {
            labels[start.max(first) - first..stop - first].fill(expert as i32);
        }
    }
}

/// Runs `work` over `jobs` on this thread and `workers - 1` others, which end before it returns.
///
/// There is no pool: a process forked after a call holds no dead threads, and can call again. If the system
/// refuses a thread, those that run take its jobs.
fn on_threads<J: Send>(workers: usize, jobs: impl Iterator<Item = J> + Send, work: impl Fn(J) + Sync) {
    if workers == 1 {
        return jobs.for_each(work);
    }
    let queue = Mutex::new(jobs);
    let drain = || {
        while let Some(job) = queue.lock().ok().and_then(|mut jobs| jobs.next()) {
            work(job);
        }
    };
    thread::scope(|scope| {
        for _ in 1..workers {
            if thread::Builder::new().spawn_scoped(scope, drain).is_err() {
                break;
            }
        }
        drain();
    });
}
