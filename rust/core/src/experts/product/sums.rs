//! Sums over the depth in the memory of the results: for matrices that are read along their rows.

use super::{Loaded, Matrix, Product, Terms};
use crate::experts::lanes::{LANES, Lanes, prefetch};
use crate::experts::number::Number;

/// Depths whose products are added in one pass over the results of few rows: weights come from memory in long pieces.
const DEPTHS: usize = 4;
/// The same for rows that fill more than a tile: results stay in registers for longer.
const DEPTHS_OF_MANY: usize = 32;
/// How many passes ahead weights are asked for.
const PASSES_AHEAD: isize = 2;

/// Sums over the depth in the memory of the results.
///
/// # Safety
/// As for [`super::multiply`].
#[inline(always)]
pub unsafe fn in_place<L: Lanes, T: Terms<L>>(product: &Product<'_>) {
    let width = product.columns.len().next_multiple_of(LANES);
    for row in 0..product.rows.len() {
        // SAFETY: a row of results holds its columns rounded up to LANES.
        unsafe { std::slice::from_raw_parts_mut(product.out.add(row * product.out_stride), width) }.fill(0.0);
    }
    let depth = product.matrix.depth;
    let many = if product.rows.len() > L::ROWS { depth / DEPTHS_OF_MANY * DEPTHS_OF_MANY } else { 0 };
    for at in (0..many).step_by(DEPTHS_OF_MANY) {
        // SAFETY: the contract is this function's.
        unsafe { pass::<L, T, DEPTHS_OF_MANY>(product, at) };
    }
    let whole = depth / DEPTHS * DEPTHS;
    for at in (many..whole).step_by(DEPTHS) {
        // SAFETY: the contract is this function's.
        unsafe { pass::<L, T, DEPTHS>(product, at) };
    }
    for at in whole..depth {
        // SAFETY: the contract is this function's.
        unsafe { pass::<L, T, 1>(product, at) };
    }
}

/// Adds the products of D depths to every result.
#[inline(always)]
unsafe fn pass<L: Lanes, T: Terms<L>, const D: usize>(product: &Product<'_>, at: usize) {
    let Matrix { data, step, .. } = product.matrix;
    let width = product.columns.len();
    let first = data.cast::<T::Weight>().wrapping_add(product.columns.start);
    for column in (0..width).step_by(LANES) {
        let mut rest = [[T::Weight::default(); LANES]; D];
        let mut weights = [std::ptr::null::<T::Weight>(); D];
        for d in 0..D {
            weights[d] = first.wrapping_offset((at + d) as isize * step).wrapping_add(column);
            if width - column < LANES {
                let bytes = (width - column) * size_of::<T::Weight>();
                // SAFETY: the matrix is readable at its columns; the copy is as long as those that are left.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        weights[d].cast::<u8>(),
                        rest[d].as_mut_ptr().cast::<u8>(),
                        bytes,
                    );
                }
                weights[d] = rest[d].as_ptr();
            } else {
                prefetch(weights[d].wrapping_offset(PASSES_AHEAD * D as isize * step).cast());
            }
        }
        let mut row = 0;
        while row < product.rows.len() {
            let left = (product.rows.len() - row).min(L::ROWS);
            macro_rules! tile {
                ($rows:literal) => {
                    // SAFETY: LANES weights are readable at each place, by the copy or by the columns that are left;
                    // `left` rows are left.
                    unsafe { pass_of_rows::<L, T, D, $rows>(product, row, at, column, &weights) }
                };
            }
            of_rows_left!(L, left, tile);
            row += left;
        }
    }
}

/// Adds the products of D depths to sixteen columns of R rows.
#[inline(always)]
unsafe fn pass_of_rows<L: Lanes, T: Terms<L>, const D: usize, const R: usize>(
    product: &Product<'_>,
    first_row: usize,
    at: usize,
    column: usize,
    weights: &[*const T::Weight; D],
) {
    let out = product.out.wrapping_add(first_row * product.out_stride + column);
    let mut rows = [std::ptr::null::<T::Row>(); R];
    for (place, row) in rows.iter_mut().enumerate() {
        *row = product.rows[first_row + place].cast::<T::Row>().wrapping_add(at);
    }
    // SAFETY: LANES weights are readable at each place, rows at every depth, results up to a multiple of LANES.
    unsafe {
        let mut sums = [L::splat(0.0); R];
        for (place, sums) in sums.iter_mut().enumerate() {
            *sums = L::load_f32(out.add(place * product.out_stride));
        }
        for (d, weights) in weights.iter().enumerate() {
            let loaded = T::Weight::load::<L>(*weights);
            for (row, sums) in rows.iter().zip(&mut sums) {
                *sums = L::fused(L::splat(row.add(d).read().widen()), loaded, *sums);
            }
        }
        for (place, sums) in sums.into_iter().enumerate() {
            L::store(out.add(place * product.out_stride), sums);
        }
    }
}
