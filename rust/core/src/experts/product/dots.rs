//! Dot products of an expert's columns with every row: for matrices that are read along their columns.

use std::ops::Range;

use super::{DEPTH_UNIT, Matrix, Product, Terms};
use crate::experts::lanes::{Lanes, prefetch};
use crate::experts::number::Number;

/// Dot products, C columns at a time.
///
/// # Safety
/// As for [`super::multiply`].
#[inline(always)]
pub unsafe fn columns_at_once<L: Lanes, T: Terms<L>, const C: usize>(product: &Product<'_>) {
    let Range { start, end } = product.columns;
    let mut packed = Vec::new();
    let mut column = start;
    while column < end {
        // SAFETY: columns up to `end` are readable; a tile of C is only taken where C are left.
        unsafe {
            if end - column >= C {
                dots::<L, T, C>(product, column, &mut packed);
                column += C;
            } else {
                dots::<L, T, 1>(product, column, &mut packed);
                column += 1;
            }
        }
    }
}

/// Dot products of C columns with every row.
#[inline(always)]
unsafe fn dots<L: Lanes, T: Terms<L>, const C: usize>(
    product: &Product<'_>,
    first: usize,
    packed: &mut Vec<T::Weight>,
) {
    let Matrix { data, column, step, depth, .. } = product.matrix;
    let data = data.cast::<T::Weight>();
    let mut weights = [data; C];
    for (place, weight) in weights.iter_mut().enumerate() {
        *weight = data.wrapping_offset((first + place) as isize * column);
    }
    // The first rows read the weights from memory, and ask for the columns that come next.
    let mut ahead = column.wrapping_mul((C * size_of::<T::Weight>()) as isize);
    if step != 1 && depth != 1 {
        // SAFETY: the matrix is readable at every column and depth.
        unsafe { pack(&mut weights, step, depth, packed) };
    }
    // What is left of the depth behind the last whole step, and zeros.
    let whole = depth / T::STEP * T::STEP;
    let mut rest = [[T::Weight::default(); DEPTH_UNIT]; C];
    for c in 0..C {
        for place in whole..depth {
            // SAFETY: a column is readable over its depth.
            rest[c][place - whole] = unsafe { weights[c].add(place).read_unaligned() };
        }
    }
    let out = product.out.wrapping_add(first - product.columns.start);
    let mut row = 0;
    while row < product.rows.len() {
        let left = (product.rows.len() - row).min(L::ROWS);
        macro_rules! tile {
            ($rows:literal) => {
                // SAFETY: `left` rows are left; columns, rows and results are this product's.
                unsafe { tile::<L, T, C, $rows>(product, row, &weights, &rest, ahead, out) }
            };
        }
        of_rows_left!(L, left, tile);
        row += left;
        ahead = 0;
    }
}

/// Copies columns whose numbers are no neighbours.
unsafe fn pack<W: Number, const C: usize>(
    columns: &mut [*const W; C],
    step: isize,
    depth: usize,
    packed: &mut Vec<W>,
) {
    packed.clear();
    for column in columns.iter() {
        for place in 0..depth as isize {
            // SAFETY: this function's caller has columns that are readable over their depth.
            packed.push(unsafe { column.wrapping_offset(place * step).read_unaligned() });
        }
    }
    for (place, column) in columns.iter_mut().enumerate() {
        *column = packed.as_ptr().wrapping_add(place * depth);
    }
}

/// C columns times R rows.
#[inline(always)]
unsafe fn tile<L: Lanes, T: Terms<L>, const C: usize, const R: usize>(
    product: &Product<'_>,
    first_row: usize,
    weights: &[*const T::Weight; C],
    rest: &[[T::Weight; DEPTH_UNIT]; C],
    ahead: isize,
    out: *mut f32,
) {
    let depth = product.matrix.depth;
    let whole = depth / T::STEP * T::STEP;
    let mut rows = [std::ptr::null::<T::Row>(); R];
    for (place, row) in rows.iter_mut().enumerate() {
        *row = product.rows[first_row + place].cast();
    }
    // First the columns, then what is left of them: one loop, for accumulators fill the registers.
    let mut from = *weights;
    let (mut at, mut end) = (0, whole);
    // SAFETY: columns are readable over the depth, rows up to the next multiple of DEPTH_UNIT, which is one of STEP; the
    // results of these rows and columns are writable.
    unsafe {
        let mut sums = [[L::splat(0.0); C]; R];
        loop {
            while at < end {
                let mut starts = from;
                for start in &mut starts {
                    *start = start.wrapping_add(at);
                    prefetch(start.cast::<u8>().wrapping_offset(ahead));
                }
                step::<L, T, C, R>(&rows, at, &starts, &mut sums);
                at += T::STEP;
            }
            if at >= depth {
                break;
            }
            end = depth;
            for c in 0..C {
                from[c] = rest[c].as_ptr().wrapping_sub(whole);
            }
        }
        for (place, sums) in sums.into_iter().enumerate() {
            let out = out.add((first_row + place) * product.out_stride);
            out.cast::<[f32; C]>().write_unaligned(L::sums(sums));
        }
    }
}

/// One step over the depth of a tile.
#[inline(always)]
unsafe fn step<L: Lanes, T: Terms<L>, const C: usize, const R: usize>(
    rows: &[*const T::Row; R],
    at: usize,
    weights: &[*const T::Weight; C],
    sums: &mut [[L::Single; C]; R],
) {
    // SAFETY: the tile hands over places from which a step is readable.
    unsafe {
        let mut loaded = [T::weight(weights[0]); C];
        for c in 1..C {
            loaded[c] = T::weight(weights[c]);
        }
        for r in 0..R {
            let row = T::row(rows[r].add(at));
            for c in 0..C {
                sums[r][c] = T::add(row, loaded[c], sums[r][c]);
            }
        }
    }
}
