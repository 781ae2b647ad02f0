//! The experts of a layer on a CPU: both products, the gate between them, and the weighted sum in one pass.
//!
//! Letters: T tokens, K slots a token, S = T*K pairs, E experts, H hidden size, I intermediate size, N columns of the
//! first product (2I with a gate). Few tokens are a stream of weights: every expert that is hit is read once, in place,
//! and its rows are multiplied while it passes.

#![allow(
    clippy::inline_always,
    reason = "only what is inlined into a function with target features is compiled for its instructions"
)]

use std::ops::Range;

use crate::error::CoreError;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod codes_avx2;
#[cfg(target_arch = "x86_64")]
mod codes_avx512;
pub mod format;
pub mod gate;
mod lanes;
mod layer;
pub mod levels;
pub mod number;
pub mod operand;
mod product;
mod routing;
mod rows;
mod threads;

use format::Format;
use gate::Gate;
use levels::{Level, Terms};
use number::Dtype;
use operand::{Grid, Kind};
use product::{Codes, Matrix};
pub use routing::Routing;

/// Where the numbers of every expert's matrix and bias lie, without their address.
#[derive(Debug, Clone, Copy)]
pub struct Weights {
    /// Columns of the product.
    pub columns: usize,
    /// Length of a column.
    pub depth: usize,
    /// Numbers (bytes of codes) from one expert, column and depth (byte of codes) to the next.
    pub strides: [isize; 3],
    /// Numbers from one expert's bias to the next, and from one column's.
    pub bias_strides: [isize; 2],
    /// Type of the bias.
    pub bias: Dtype,
    /// How the matrix is stored.
    pub format: Format,
}

/// Addresses of a call's weights.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    /// First number of all matrices.
    pub matrix: *const u8,
    /// First bias, or null.
    pub bias: *const u8,
    /// First scale of codes.
    pub scales: *const u8,
}

/// The declared layout of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// First product, (E, N, H).
    pub up: Weights,
    /// Second product, (E, H, I).
    pub down: Weights,
    /// What stands between them.
    pub gate: Gate,
}

/// One call of a layer: x is (T, H), the routing weights (T, K), the result (T, H) in the type of x, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// (T, K).
    pub shape: [usize; 2],
    /// Tokens.
    pub x: Grid,
    /// Routing weights.
    pub weights: Grid,
    /// Both matrices.
    pub addresses: [Address; 2],
    /// Result.
    pub out: *mut u8,
    /// Threads that may be used.
    pub threads: usize,
}

/// One product without a gate: rows (S / `repeats`, depth) to (S, columns) in pair order.
#[derive(Debug, Clone, Copy)]
pub struct RowsCall {
    /// Rows.
    pub x: Grid,
    /// Pairs that share a row of x.
    pub repeats: usize,
    /// The matrix.
    pub address: Address,
    /// Result, in the type of x, one after the other; rows without an expert read 0.
    pub out: *mut u8,
    /// Threads that may be used.
    pub threads: usize,
}

impl Layer {
    /// Runs a call on the fastest level, or on one that is asked for.
    ///
    /// # Safety
    /// Every address must be readable (the result writable, and nobody else's) over the sizes and strides declared.
    pub unsafe fn run(&self, routing: &Routing, call: &Call, level: Option<&Level>) {
        // SAFETY: the contract is this function's.
        unsafe { layer::run(self, routing, call, level.unwrap_or(&levels::available()[0])) }
    }
}

impl Weights {
    /// Runs one product on the fastest level, or on one that is asked for.
    ///
    /// # Safety
    /// As for [`Layer::run`].
    pub unsafe fn run(&self, routing: &Routing, call: &RowsCall, level: Option<&Level>) {
        // SAFETY: the contract is this function's.
        unsafe { rows::run(self, routing, call, level.unwrap_or(&levels::available()[0])) }
    }

    /// One expert's matrix.
    fn matrix(&self, address: &Address, expert: usize) -> Matrix {
        let [of_expert, column, step] = self.strides;
        let at = |data: *const u8, stride: isize, size: usize| {
            if data.is_null() { data } else { data.wrapping_offset(expert as isize * stride * size as isize) }
        };
        let codes = match self.format {
            Format::Plain(_) => None,
            Format::Codes(code, scales) => {
                let data = at(address.scales, scales.strides[0], scales.dtype.size());
                Some(Codes { code, scales, data })
            }
        };
        Matrix {
            data: at(address.matrix, of_expert, self.format.unit()),
            column,
            step,
            depth: self.depth,
            bias: at(address.bias, self.bias_strides[0], self.bias.size()),
            bias_step: self.bias_strides[1],
            bias_dtype: self.bias,
            codes,
        }
    }

    /// What products of rows of a type read: bfloat16 rows stay as they are where processors multiply them in pairs.
    fn terms(&self, rows: Dtype) -> Terms {
        match self.format {
            Format::Plain(Dtype::Bf16) if rows == Dtype::Bf16 && self.is_read_along_columns() => Terms::Pairs,
            Format::Plain(dtype) => Terms::Wide(dtype),
            Format::Codes(code, scales) if scales.groups(code, self.depth).is_some() => {
                Terms::Codes(code, if rows == Dtype::Bf16 { Dtype::Bf16 } else { Dtype::F32 })
            }
            Format::Codes(..) => Terms::Written,
        }
    }

    fn is_read_along_columns(&self) -> bool {
        product::is_read_along_columns(self.strides[1], self.strides[2], self.depth)
    }

    fn bytes(&self) -> usize {
        self.columns * self.format.bytes(self.depth)
    }
}

impl Terms {
    /// Type and order of the operand rows.
    fn rows(self) -> Kind {
        match self {
            Self::Pairs => Kind { dtype: Dtype::Bf16, order: None },
            Self::Codes(code, dtype) => Kind { dtype, order: Some(code) },
            Self::Wide(_) | Self::Written => Kind { dtype: Dtype::F32, order: None },
        }
    }
}

/// Rows that a product takes at once: enough to stay ahead of memory, few enough to stay in the cache.
const ROWS_AT_ONCE: usize = 64;
/// Bytes of weights that one thread should at least have.
const BYTES_A_WORKER: usize = 1 << 18;

/// Threads worth using over `bytes` of weights.
fn workers(threads: usize, bytes: usize) -> usize {
    threads.min(bytes / BYTES_A_WORKER).max(1)
}

/// Consecutive parts of `total` of at most `size`.
fn part(total: usize, size: usize, index: usize) -> Range<usize> {
    index * size..total.min((index + 1) * size)
}

/// A value that threads share although it holds addresses.
struct Shared<T>(T);
// SAFETY: the addresses are read by all and written in places that no two items share; see layer.rs and rows.rs.
unsafe impl<T> Sync for Shared<T> {}

/// Checks that the sizes of a layer can be computed with.
///
/// # Errors
/// `LayoutError` where sizes are so large that an address would wrap.
pub fn check_sizes(rows: usize, columns: usize, depth: usize) -> Result<(), CoreError> {
    const LIMIT: usize = isize::MAX as usize / 64;
    let product = |a: usize, b: usize| a.checked_mul(b.max(1)).is_some_and(|bytes| bytes < LIMIT);
    if product(rows, columns) && product(rows, depth) && product(columns, depth) {
        return Ok(());
    }
    Err(CoreError {
        kind: crate::error::ErrorKind::LayoutError,
        message: "experts of sizes that no memory holds".to_owned(),
        found: Some(format!("{rows} rows, {columns} columns, depth {depth}")),
        needed: Some(format!("products below {LIMIT}")),
        hint: Some("pass the sizes of the tensors".to_owned()),
    })
}
