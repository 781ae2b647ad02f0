//! Dot products with columns of codes, which registers unfold: no number of the matrix is written to memory.
//!
//! A chunk of a column is unfolded, its products are summed in sixteen lanes, and the lanes are added to the column's
//! sums times the scale of each lane's block. What all products are short of, a power of two, is made up for at the end.

use std::ops::Range;

use super::pack::{COLUMNS, Packed};
use super::scales::Rows;
use super::{Codes, Matrix, Product, Wide, add_bias, dots};
use crate::experts::format::{CHUNK, Code, E4M3_FACTOR};
use crate::experts::lanes::{Lanes, prefetch};
use crate::experts::number::{Bf16, Number};

/// Bytes that memory should be ahead of the products.
const AHEAD: usize = 1 << 14;

/// A code, unfolded to N registers of pairs a chunk.
///
/// # Safety
/// As for [`Lanes`].
pub trait Unfold<L: Lanes, const N: usize> {
    /// Its name.
    const CODE: Code;
    /// What products are short of.
    const FACTOR: f32;
    /// A chunk.
    unsafe fn unfold(from: *const u8) -> [L::Pairs; N];
}

/// Codes of eight bits.
pub struct E4m3;
/// Codes of four bits.
pub struct E2m1;

impl<L: Lanes> Unfold<L, 2> for E4m3 {
    const CODE: Code = Code::E4m3;
    const FACTOR: f32 = E4M3_FACTOR;

    #[inline(always)]
    unsafe fn unfold(from: *const u8) -> [L::Pairs; 2] {
        // SAFETY: this function's contract is the callee's.
        unsafe { L::e4m3(from) }
    }
}

impl<L: Lanes> Unfold<L, 4> for E2m1 {
    const CODE: Code = Code::E2m1;
    const FACTOR: f32 = 1.0;

    #[inline(always)]
    unsafe fn unfold(from: *const u8) -> [L::Pairs; 4] {
        // SAFETY: this function's contract is the callee's.
        unsafe { L::e2m1(from) }
    }
}

/// Operand rows in the order of a code.
///
/// # Safety
/// As for [`Lanes`].
pub trait Row<L: Lanes> {
    /// Their numbers.
    type Number: Number;
    /// Adds the products of a register of pairs.
    unsafe fn add(row: *const Self::Number, weights: L::Pairs, sums: L::Single) -> L::Single;
}

impl<L: Lanes> Row<L> for f32 {
    type Number = f32;

    #[inline(always)]
    unsafe fn add(row: *const f32, weights: L::Pairs, sums: L::Single) -> L::Single {
        // SAFETY: this function's contract is that of the callees; second numbers lie before the first.
        unsafe {
            let [second, first] = L::halves(weights);
            let sums = L::fused(L::load_f32(row), second, sums);
            L::fused(L::load_f32(row.add(16)), first, sums)
        }
    }
}

impl<L: Lanes> Row<L> for Bf16 {
    type Number = Bf16;

    #[inline(always)]
    unsafe fn add(row: *const Bf16, weights: L::Pairs, sums: L::Single) -> L::Single {
        // SAFETY: this function's contract is that of the callees.
        unsafe { L::fused_pairs(L::load_pairs(row), weights, sums) }
    }
}

/// What is the same for all tiles of a product.
struct Columns<'a, L: Lanes> {
    product: &'a Product<'a>,
    codes: Codes,
    /// Chunks that are whole in memory, and bytes behind them.
    whole: usize,
    rest: usize,
    /// Scales of a chunk.
    groups: usize,
    pattern: L::Pattern,
}

/// One tile's columns: their bytes, what is left of them in a chunk of its own, and where their scales begin.
struct Tile<const C: usize> {
    bytes: [*const u8; C],
    rest: [[u8; CHUNK]; C],
    scales: [usize; C],
    ahead: isize,
    first: usize,
}

/// Runs a product.
///
/// # Safety
/// As for [`super::multiply`]; the matrix holds codes of `D`, whose scales registers can tell apart.
#[inline(always)]
pub unsafe fn multiply<L: Lanes, D: Unfold<L, N>, X: Row<L>, const N: usize>(product: &Product<'_>) {
    let Some(codes) = product.matrix.codes else { return };
    let depth = D::CODE.bytes(product.matrix.depth);
    // SAFETY: the contract of the callees is this one's; packed columns hold what the matrix holds.
    unsafe {
        if product.matrix.step == 1 || depth == 1 {
            columns_at_once::<L, D, X, N>(product, codes);
        } else {
            let mut packed = Packed::default();
            let Range { start, end } = product.columns;
            for first in (start..end).step_by(COLUMNS) {
                let columns = first..end.min(first + COLUMNS);
                let matrix = packed.copy(&product.matrix, first, columns.len(), depth);
                let out = product.out.wrapping_add(first - start);
                columns_at_once::<L, D, X, N>(&Product { matrix, columns, out, ..*product }, codes);
            }
        }
        add_bias(product);
    }
}

#[inline(always)]
unsafe fn columns_at_once<L: Lanes, D: Unfold<L, N>, X: Row<L>, const N: usize>(
    product: &Product<'_>,
    codes: Codes,
) {
    let depth = product.matrix.depth;
    let bytes = D::CODE.bytes(depth);
    let groups = codes.scales.groups(D::CODE, depth).unwrap_or(1);
    // SAFETY: registers alone; the caller has the instructions.
    let pattern = unsafe { L::pattern(groups) };
    let columns = Columns::<L> { product, codes, whole: bytes / CHUNK, rest: bytes % CHUNK, groups, pattern };
    let group = D::CODE.chunk() / groups;
    let mut scales = Rows::new(L::COLUMNS, bytes.div_ceil(CHUNK), groups, group, depth);
    let Range { start, end } = product.columns;
    let mut column = start;
    while column < end {
        // SAFETY: columns up to `end` are readable; a tile of several is only taken where they are left.
        unsafe {
            if end - column >= L::COLUMNS && L::COLUMNS == 4 {
                of_columns::<L, D, X, N, 4>(&columns, &mut scales, column);
                column += 4;
            } else if end - column >= 2 && L::COLUMNS == 2 {
                of_columns::<L, D, X, N, 2>(&columns, &mut scales, column);
                column += 2;
            } else {
                of_columns::<L, D, X, N, 1>(&columns, &mut scales, column);
                column += 1;
            }
        }
    }
}

/// Bytes from a code to the one that is asked for meanwhile: whole tiles.
fn ahead(column: isize, columns: usize) -> isize {
    let tile = column.unsigned_abs() * columns;
    column.wrapping_mul((columns * AHEAD.div_ceil(tile.max(1))) as isize)
}

/// C columns times every row.
#[inline(always)]
unsafe fn of_columns<L: Lanes, D: Unfold<L, N>, X: Row<L>, const N: usize, const C: usize>(
    columns: &Columns<'_, L>,
    scales: &mut Rows,
    first: usize,
) {
    let Matrix { data, column, .. } = columns.product.matrix;
    let mut tile = Tile::<C> {
        bytes: [data; C],
        rest: [[0; CHUNK]; C],
        scales: [0; C],
        // The first rows read the codes from memory, and ask for the columns that come next.
        ahead: ahead(column, C),
        first,
    };
    for c in 0..C {
        tile.bytes[c] = data.wrapping_offset((first + c) as isize * column);
        // SAFETY: a column is readable over its bytes, scales over its rows.
        unsafe {
            if columns.rest > 0 {
                let rest = tile.bytes[c].wrapping_add(columns.whole * CHUNK);
                tile.rest[c] = [0; CHUNK];
                std::ptr::copy_nonoverlapping(rest, tile.rest[c].as_mut_ptr(), columns.rest);
            }
            tile.scales[c] = scales.of(&columns.codes, first + c, c);
        }
    }
    let mut row = 0;
    while row < columns.product.rows.len() {
        let left = (columns.product.rows.len() - row).min(L::ROWS);
        macro_rules! of_rows {
            ($rows:literal) => {
                // SAFETY: `left` rows are left; columns, rows and results are this product's.
                unsafe { of_rows::<L, D, X, N, C, $rows>(columns, &tile, scales, row) }
            };
        }
        of_rows_left!(L, left, of_rows);
        row += left;
        tile.ahead = 0;
    }
}

/// C columns times R rows.
#[inline(always)]
unsafe fn of_rows<L: Lanes, D: Unfold<L, N>, X: Row<L>, const N: usize, const C: usize, const R: usize>(
    columns: &Columns<'_, L>,
    tile: &Tile<C>,
    scales: &Rows,
    first_row: usize,
) {
    let product = columns.product;
    let scales = tile.scales.map(|at| scales.data().wrapping_add(at));
    let mut rows = [std::ptr::null::<X::Number>(); R];
    for (place, row) in rows.iter_mut().enumerate() {
        *row = product.rows[first_row + place].cast();
    }
    // First the columns, then what is left of them: one loop, for accumulators fill the registers.
    let mut bytes = tile.bytes;
    let (mut chunk, mut end) = (0, columns.whole);
    // SAFETY: a chunk of bytes is readable at each place, rows up to the next whole chunk, and four scales from that
    // of every chunk on; the results of these rows and columns are writable.
    unsafe {
        let mut sums = [[L::splat(0.0); C]; R];
        loop {
            while chunk < end {
                let mut starts = bytes;
                let mut scale = [L::splat(0.0); C];
                for c in 0..C {
                    starts[c] = starts[c].wrapping_add(chunk * CHUNK);
                    prefetch(starts[c].wrapping_offset(tile.ahead));
                    scale[c] = L::spread(scales[c].add(chunk * columns.groups), columns.pattern);
                }
                let at = chunk * 32 * N;
                // Few rows have few chains of sums: those of all columns then take turns.
                if R <= 2 {
                    let products = of_chunks::<L, D, X, N, C, R>(&rows, at, &starts);
                    for r in 0..R {
                        for c in 0..C {
                            sums[r][c] = L::fused(products[r][c], scale[c], sums[r][c]);
                        }
                    }
                } else {
                    for c in 0..C {
                        let products = of_chunks::<L, D, X, N, 1, R>(&rows, at, &[starts[c]]);
                        for r in 0..R {
                            sums[r][c] = L::fused(products[r][0], scale[c], sums[r][c]);
                        }
                    }
                }
                chunk += 1;
            }
            if chunk > columns.whole || columns.rest == 0 {
                break;
            }
            end = columns.whole + 1;
            for (bytes, rest) in bytes.iter_mut().zip(&tile.rest) {
                *bytes = rest.as_ptr().wrapping_sub(columns.whole * CHUNK);
            }
        }
        for (place, sums) in sums.into_iter().enumerate() {
            let out = product
                .out
                .add((first_row + place) * product.out_stride + tile.first - product.columns.start);
            let mut values = L::sums(sums);
            for value in &mut values {
                *value *= D::FACTOR;
            }
            out.cast::<[f32; C]>().write_unaligned(values);
        }
    }
}

/// Products of a chunk of C columns and R rows, summed in their lanes.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "it indexes what stands in the second place")]
unsafe fn of_chunks<L: Lanes, D: Unfold<L, N>, X: Row<L>, const N: usize, const C: usize, const R: usize>(
    rows: &[*const X::Number; R],
    at: usize,
    from: &[*const u8; C],
) -> [[L::Single; C]; R] {
    // SAFETY: the tile hands over places from which a chunk is readable.
    unsafe {
        let mut products = [[L::splat(0.0); C]; R];
        let mut weights = [D::unfold(from[0]); C];
        for c in 1..C {
            weights[c] = D::unfold(from[c]);
        }
        for n in 0..N {
            for r in 0..R {
                let row = rows[r].add(at + 32 * n);
                for c in 0..C {
                    products[r][c] = X::add(row, weights[c][n], products[r][c]);
                }
            }
        }
        products
    }
}

/// Columns that are written as numbers at once.
const WRITTEN: usize = 16;

/// Runs a product whose blocks end where registers cannot tell: a few columns at a time are written as float32.
///
/// # Safety
/// As for [`super::multiply`].
#[inline(always)]
pub unsafe fn multiply_written<L: Lanes>(product: &Product<'_>) {
    let Matrix { depth, codes: Some(codes), .. } = product.matrix else { return };
    let mut numbers = vec![0.0; WRITTEN * depth];
    let Range { start, end } = product.columns;
    for first in (start..end).step_by(WRITTEN) {
        let count = WRITTEN.min(end - first);
        for (place, numbers) in numbers.chunks_exact_mut(depth.max(1)).take(count).enumerate() {
            // SAFETY: the column is readable over its depth.
            unsafe { write_column(&product.matrix, &codes, first + place, numbers) };
        }
        let data = numbers.as_ptr().cast();
        let matrix = Matrix { data, column: depth as isize, step: 1, ..product.matrix };
        let out = product.out.wrapping_add(first - start);
        let part = Product { matrix, columns: 0..count, out, ..*product };
        // SAFETY: so many columns of float32 lie there.
        unsafe {
            if L::COLUMNS == 4 {
                dots::columns_at_once::<L, Wide<f32>, 4>(&part);
            } else {
                dots::columns_at_once::<L, Wide<f32>, 2>(&part);
            }
        }
    }
    // SAFETY: the contract of `multiply`.
    unsafe { add_bias(product) };
}

unsafe fn write_column(matrix: &Matrix, codes: &Codes, column: usize, numbers: &mut [f32]) {
    let bytes = matrix.data.wrapping_offset(column as isize * matrix.column);
    let row = codes.scales.row(column);
    for (block, numbers) in numbers.chunks_mut(codes.scales.block[1]).enumerate() {
        // SAFETY: a row has a scale for every block of its depth.
        let scale = unsafe { codes.scales.read(codes.data, row, block) };
        for (place, number) in numbers.iter_mut().enumerate() {
            let depth = block * codes.scales.block[1] + place;
            // SAFETY: the column is readable over its depth.
            *number = unsafe { codes.code.read(bytes, matrix.step, depth) } * scale;
        }
    }
}
