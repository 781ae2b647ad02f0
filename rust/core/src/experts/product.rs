//! A few rows times some columns of one matrix, which streams from memory once.
//!
//! Where a column's numbers are neighbours, tiles of dot products read a few columns at a time; where a row's are,
//! the results are summed up in place, a few depths at a time. Every result is a sum of its own, so neither tiles nor
//! threads change a bit of it.

use std::ops::Range;

use super::lanes::{LANES, Lanes, prefetch};
use super::number::{Bf16, F16, Number};

/// What one row of results needs of its operand: rows are zero up to a multiple of this.
pub const DEPTH_UNIT: usize = 32;

/// One expert's matrix: columns, each over a depth.
#[derive(Clone, Copy)]
pub struct Matrix {
    /// The first number.
    pub data: *const u8,
    /// Numbers from one column to the next.
    pub column: isize,
    /// Numbers from one depth to the next.
    pub step: isize,
    /// Length of a column.
    pub depth: usize,
    /// First bias, or null.
    pub bias: *const u8,
    /// Numbers from one bias to the next.
    pub bias_step: isize,
}

/// `out[row][column] = rows[row] . matrix[column] + bias[column]`, in float32.
pub struct Product<'a> {
    /// The matrix of all rows.
    pub matrix: Matrix,
    /// Which columns.
    pub columns: Range<usize>,
    /// Operand rows, of the depth rounded up to `DEPTH_UNIT`.
    pub rows: &'a [*const u8],
    /// Result of the first row and column.
    pub out: *mut f32,
    /// Numbers from one row of results to the next, at least the columns rounded up to `LANES`.
    pub out_stride: usize,
}

/// The types of a product: what rows and matrices hold, and how a step over the depth is taken.
///
/// # Safety
/// As for [`Lanes`]: the level's instructions must exist, `STEP` numbers must be readable.
pub trait Terms<L: Lanes> {
    /// Numbers of operand rows.
    type Row: Number;
    /// Numbers of the matrix.
    type Weight: Loaded;
    /// A step of either.
    type Step: Copy;
    /// Depths of a step.
    const STEP: usize;

    /// A step of a row.
    unsafe fn row(from: *const Self::Row) -> Self::Step;
    /// A step of a column.
    unsafe fn weight(from: *const Self::Weight) -> Self::Step;
    /// Adds the products to the sixteen sums.
    unsafe fn add(row: Self::Step, weight: Self::Step, sums: L::Single) -> L::Single;
}

/// A weight that sixteen lanes can load.
pub trait Loaded: Number {
    /// Sixteen numbers, widened.
    ///
    /// # Safety
    /// As for [`Lanes`].
    unsafe fn load<L: Lanes>(from: *const Self) -> L::Single;
}

macro_rules! loaded {
    ($($number:ty: $load:ident),*) => {$(
        impl Loaded for $number {
            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const Self) -> L::Single {
                // SAFETY: this function's contract is that of the load.
                unsafe { L::$load(from) }
            }
        }
    )*};
}
loaded!(f32: load_f32, Bf16: load_bf16, F16: load_f16);

/// Rows in float32, weights widened.
pub struct Wide<W>(std::marker::PhantomData<W>);

/// Rows and weights in bfloat16.
pub struct Pairs;

impl<L: Lanes, W: Loaded> Terms<L> for Wide<W> {
    type Row = f32;
    type Weight = W;
    type Step = L::Single;
    const STEP: usize = LANES;

    #[inline(always)]
    unsafe fn row(from: *const f32) -> L::Single {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_f32(from) }
    }

    #[inline(always)]
    unsafe fn weight(from: *const W) -> L::Single {
        // SAFETY: this function's contract is that of the load.
        unsafe { W::load::<L>(from) }
    }

    #[inline(always)]
    unsafe fn add(row: L::Single, weight: L::Single, sums: L::Single) -> L::Single {
        // SAFETY: registers alone; the caller has the instructions.
        unsafe { L::fused(row, weight, sums) }
    }
}

impl<L: Lanes> Terms<L> for Pairs {
    type Row = Bf16;
    type Weight = Bf16;
    type Step = L::Pairs;
    const STEP: usize = 2 * LANES;

    #[inline(always)]
    unsafe fn row(from: *const Bf16) -> L::Pairs {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_pairs(from) }
    }

    #[inline(always)]
    unsafe fn weight(from: *const Bf16) -> L::Pairs {
        // SAFETY: this function's contract is that of the load.
        unsafe { L::load_pairs(from) }
    }

    #[inline(always)]
    unsafe fn add(row: L::Pairs, weight: L::Pairs, sums: L::Single) -> L::Single {
        // SAFETY: registers alone; the caller has the instructions.
        unsafe { L::fused_pairs(row, weight, sums) }
    }
}

/// Whether the matrix is read along its columns: then rows may be bfloat16.
pub fn is_read_along_columns(column: isize, step: isize, depth: usize) -> bool {
    step == 1 || column != 1 || depth == 1
}

/// Runs a product.
///
/// # Safety
/// The processor has the level's instructions; every address of the product's fields is readable for the numbers that
/// they promise, `out` writable and nobody else's.
#[inline(always)]
pub unsafe fn multiply<L: Lanes, T: Terms<L>>(product: &Product<'_>) {
    let Matrix { column, step, depth, .. } = product.matrix;
    // SAFETY: the contract of the callees is this one's.
    unsafe {
        if !is_read_along_columns(column, step, depth) {
            sum_in_place::<L, T>(product);
        } else if L::COLUMNS == 4 {
            columns_at_once::<L, T, 4>(product);
        } else {
            columns_at_once::<L, T, 2>(product);
        }
        add_bias::<T::Weight>(product);
    }
}

/// Dot products, C columns at a time.
#[inline(always)]
unsafe fn columns_at_once<L: Lanes, T: Terms<L>, const C: usize>(product: &Product<'_>) {
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
        match left {
            6 if L::ROWS >= 6 => tile!(6),
            5 if L::ROWS >= 5 => tile!(5),
            4 if L::ROWS >= 4 => tile!(4),
            3 if L::ROWS >= 3 => tile!(3),
            2 => tile!(2),
            _ => tile!(1),
        }
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

/// Depths whose products are added in one pass over the results of few rows: weights come from memory in long pieces.
const DEPTHS: usize = 4;
/// The same for rows that fill more than a tile: results stay in registers for longer.
const DEPTHS_OF_MANY: usize = 32;
/// How many passes ahead weights are asked for.
const PASSES_AHEAD: isize = 2;

/// Sums over the depth in the memory of the results.
#[inline(always)]
unsafe fn sum_in_place<L: Lanes, T: Terms<L>>(product: &Product<'_>) {
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
            match left {
                6 if L::ROWS >= 6 => tile!(6),
                5 if L::ROWS >= 5 => tile!(5),
                4 if L::ROWS >= 4 => tile!(4),
                3 if L::ROWS >= 3 => tile!(3),
                2 => tile!(2),
                _ => tile!(1),
            }
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

#[inline(always)]
unsafe fn add_bias<W: Number>(product: &Product<'_>) {
    let Matrix { bias, bias_step, .. } = product.matrix;
    if bias.is_null() {
        return;
    }
    for row in 0..product.rows.len() {
        for (place, column) in product.columns.clone().enumerate() {
            // SAFETY: there is a bias for every column, and these results are the product's own.
            unsafe {
                let value = bias.cast::<W>().wrapping_offset(column as isize * bias_step).read_unaligned();
                *product.out.add(row * product.out_stride + place) += value.widen();
            }
        }
    }
}
