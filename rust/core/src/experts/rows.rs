//! One product of its own, for experts whose gate or norm is the caller's: rows in, rows in pair order out.

use super::lanes::LANES;
use super::levels::{Level, Terms};
use super::number::with_number;
use super::operand::{Operand, write};
use super::product::Product;
use super::threads::in_phases;
use super::{ROWS_AT_ONCE, Routing, RowsCall, Shared, Weights, part, workers};

/// Columns of an item.
const COLUMNS: usize = 8 * LANES;

struct Context<'a> {
    weights: &'a Weights,
    routing: &'a Routing,
    call: &'a RowsCall,
    level: &'a Level,
    terms: Terms,
    x: Operand,
}

/// Memory of one thread.
#[derive(Default)]
struct Own {
    products: Vec<f32>,
    rows: Vec<*const u8>,
}

/// Runs a call.
///
/// # Safety
/// That of [`Weights::run`]; the level's instructions exist.
pub unsafe fn run(weights: &Weights, routing: &Routing, call: &RowsCall, level: &Level) {
    let terms = weights.terms(call.x.dtype);
    let rows = routing.pairs / call.repeats.max(1);
    // SAFETY: x is readable over its sizes.
    let x = unsafe { Operand::copy(&call.x, rows, weights.depth, terms.rows()) };
    let row_bytes = weights.columns * call.x.dtype.size();
    for pair in &routing.order()[routing.rows()..] {
        // SAFETY: the result has a row for every pair.
        unsafe { call.out.wrapping_add(*pair as usize * row_bytes).write_bytes(0, row_bytes) };
    }
    let workers = workers(call.threads, routing.hits.len() * weights.bytes());
    let items = routing.hits.len() * weights.columns.div_ceil(COLUMNS);
    let context = Shared(Context { weights, routing, call, level, terms, x });
    let context = &context;
    in_phases(workers, &[items], Own::default, |_, item, own| {
        let Shared(context) = context;
        // SAFETY: every item writes its own columns of its own expert's rows.
        unsafe { context.product(item, own) };
    });
}

impl Context<'_> {
    unsafe fn product(&self, item: usize, own: &mut Own) {
        let blocks = self.weights.columns.div_ceil(COLUMNS);
        let (expert, rows) = &self.routing.hits[item / blocks];
        let columns = part(self.weights.columns, COLUMNS, item % blocks);
        let (matrix, stride) =
            (self.weights.matrix(&self.call.address, *expert), columns.len().next_multiple_of(LANES));
        let dtype = self.call.x.dtype;
        for pairs in self.routing.order()[rows.clone()].chunks(ROWS_AT_ONCE) {
            own.rows.clear();
            own.rows
                .extend(pairs.iter().map(|pair| self.x.row(*pair as usize / self.call.repeats).cast_const()));
            own.products.resize(pairs.len() * stride, 0.0);
            let out = own.products.as_mut_ptr();
            let product =
                Product { matrix, columns: columns.clone(), rows: &own.rows, out, out_stride: stride };
            // SAFETY: the contract of `run`.
            unsafe { self.level.multiply(self.terms, &product) };
            for (pair, values) in pairs.iter().zip(own.products.chunks_exact(stride)) {
                let at = (*pair as usize * self.weights.columns + columns.start) * dtype.size();
                let to = self.call.out.wrapping_add(at);
                // SAFETY: the result has a row for every pair, and these columns are this item's.
                unsafe { with_number!(dtype, write::<_>(&values[..columns.len()], to)) };
            }
        }
    }
}
