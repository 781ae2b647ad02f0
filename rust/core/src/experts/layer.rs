//! A whole layer in two phases: first product and gate, then second product and weighted sum.

use std::ops::Range;

use super::gate::Halves;
use super::lanes::LANES;
use super::levels::{Level, Terms};
use super::number::with_number;
use super::operand::{Operand, read, write};
use super::product::{Matrix, Product};
use super::threads::in_phases;
use super::{Call, Layer, ROWS_AT_ONCE, Routing, Shared, part, workers};

/// Bytes of one matrix that an item of the first phase reads: it stays in the cache while more rows pass.
const ITEM_BYTES: usize = 1 << 18;
/// Numbers of the second product that a thread holds before they are summed.
const HELD: usize = 1 << 17;
/// Items a thread should get, so that none waits long for the last.
const ITEMS_A_WORKER: usize = 8;

/// What all threads see of a call.
struct Context<'a> {
    layer: &'a Layer,
    routing: &'a Routing,
    call: &'a Call,
    level: &'a Level,
    terms: [Terms; 2],
    x: Operand,
    gated: Operand,
    units: usize,
    columns: usize,
}

/// Memory of one thread.
#[derive(Default)]
struct Own {
    products: Vec<f32>,
    values: Vec<f32>,
    rows: Vec<*const u8>,
}

/// Runs a call.
///
/// # Safety
/// That of [`Layer::run`]; the level's instructions exist.
pub unsafe fn run(layer: &Layer, routing: &Routing, call: &Call, level: &Level) {
    let [tokens, _] = call.shape;
    let terms = [layer.up.terms(call.x.dtype), layer.down.terms(call.x.dtype)];
    let workers = workers(call.threads, routing.hits.len() * (layer.up.bytes() + layer.down.bytes()));
    // SAFETY: x is readable over its sizes.
    let x = unsafe { Operand::copy(&call.x, tokens, layer.up.depth, terms[0].rows()) };
    let gated = Operand::zeros(routing.rows(), layer.down.depth, terms[1].rows());
    let (units, columns) = (units_of_item(layer, routing, workers), columns_of_item(layer, routing, workers));
    let context = Shared(Context { layer, routing, call, level, terms, x, gated, units, columns });
    let context = &context;
    let phases = [
        routing.hits.len() * layer.down.depth.div_ceil(units),
        if tokens == 0 { 0 } else { layer.down.columns.div_ceil(columns) },
    ];
    in_phases(workers, &phases, Own::default, |phase, item, own| {
        let Shared(context) = context;
        // SAFETY: every item of the first phase writes its own units of `gated`, every item of the second its own
        // columns of the result, which begins when the first has ended.
        unsafe {
            if phase == 0 {
                context.first_product(item, own);
            } else {
                context.second_product(item, own);
            }
        }
    });
}

/// Columns of the gated values that an item of the first phase makes.
fn units_of_item(layer: &Layer, routing: &Routing, workers: usize) -> usize {
    let inner = layer.down.depth;
    if layer.up.is_read_along_columns() {
        let column_bytes = layer.up.format.bytes(layer.up.depth) * (layer.up.columns / inner.max(1)).max(1);
        return (ITEM_BYTES / column_bytes.max(1)).next_multiple_of(LANES).clamp(LANES, 8 * LANES);
    }
    // Rows of the matrix are read: long pieces of them, as far as there is work for everybody.
    let items = (workers * ITEMS_A_WORKER).div_ceil(routing.hits.len().max(1));
    inner.div_ceil(items).next_multiple_of(LANES).clamp(8 * LANES, 64 * LANES)
}

/// Columns of the result that an item of the second phase makes.
fn columns_of_item(layer: &Layer, routing: &Routing, workers: usize) -> usize {
    let most = if layer.down.is_read_along_columns() { 8 * LANES } else { 64 * LANES };
    let even = layer.down.columns.div_ceil(workers * ITEMS_A_WORKER).next_multiple_of(LANES);
    let held = HELD / routing.rows().max(1) / LANES * LANES;
    even.min(held).clamp(LANES, most)
}

impl Context<'_> {
    /// Rows of one expert times some units' columns, through the gate.
    unsafe fn first_product(&self, item: usize, own: &mut Own) {
        let (inner, slots) = (self.layer.down.depth, self.call.shape[1]);
        let blocks = inner.div_ceil(self.units);
        let (expert, rows) = &self.routing.hits[item / blocks];
        let units = part(inner, self.units, item % blocks);
        let matrix = self.layer.up.matrix(&self.call.addresses[0], *expert);
        for chunk in rows.clone().step_by(ROWS_AT_ONCE) {
            let rows = chunk..rows.end.min(chunk + ROWS_AT_ONCE);
            own.rows.clear();
            let pairs = &self.routing.order()[rows.clone()];
            own.rows.extend(pairs.iter().map(|pair| self.x.row(*pair as usize / slots).cast_const()));
            // SAFETY: the contract of `run`; these units of these rows are this item's.
            unsafe { self.gated_units(matrix, rows.start, units.clone(), own) };
        }
    }

    /// The units of the rows in `own`, which are the sorted rows from `first` on.
    unsafe fn gated_units(&self, matrix: Matrix, first: usize, units: Range<usize>, own: &mut Own) {
        let (gate, inner, width) =
            (&self.layer.gate, self.layer.down.depth, units.len().next_multiple_of(LANES));
        let Range { start, end } = units;
        // Where gate and linear columns alternate they are one range; else each is one, the second `width` behind.
        let (ranges, second, step) = match (gate.has_gate, gate.is_concatenated) {
            (false, _) => ([start..end, 0..0], 0, 1),
            (true, true) => ([start..end, inner + start..inner + end], width, 1),
            (true, false) => ([2 * start..2 * end, 0..0], 1, 2),
        };
        let stride = 2 * width;
        own.products.resize(own.rows.len() * stride, 0.0);
        own.values.resize(units.len(), 0.0);
        for (range, shift) in ranges.into_iter().zip([0, width]).filter(|(range, _)| !range.is_empty()) {
            let out = own.products.as_mut_ptr().wrapping_add(shift);
            let product = Product { matrix, columns: range, rows: &own.rows, out, out_stride: stride };
            // SAFETY: the contract of `run`; a row of products holds both ranges rounded up to LANES.
            unsafe { self.level.multiply(self.terms[0], &product) };
        }
        for (place, row) in own.products.chunks_exact(stride).enumerate() {
            let halves = Halves { gate: row, linear: &row[second..], step };
            self.level.gate(gate, halves, &mut own.values);
            // SAFETY: the operand holds `inner` numbers a row, and these are this item's alone.
            unsafe { self.gated.write(first + place, start, &own.values) };
        }
    }

    /// All rows times some columns, weighted and summed over slots.
    unsafe fn second_product(&self, item: usize, own: &mut Own) {
        let columns = part(self.layer.down.columns, self.columns, item);
        let stride = columns.len().next_multiple_of(LANES);
        own.products.resize(self.routing.rows() * stride, 0.0);
        for (expert, rows) in &self.routing.hits {
            let matrix = self.layer.down.matrix(&self.call.addresses[1], *expert);
            for chunk in rows.clone().step_by(ROWS_AT_ONCE) {
                own.rows.clear();
                own.rows.extend(
                    (chunk..rows.end.min(chunk + ROWS_AT_ONCE)).map(|row| self.gated.row(row).cast_const()),
                );
                let out = own.products.as_mut_ptr().wrapping_add(chunk * stride);
                let product =
                    Product { matrix, columns: columns.clone(), rows: &own.rows, out, out_stride: stride };
                // SAFETY: the contract of `run`; the first phase has filled `gated`.
                unsafe { self.level.multiply(self.terms[1], &product) };
            }
        }
        // SAFETY: the contract of `run`; these columns are this item's.
        unsafe { self.weighted_sum(columns, stride, own) };
    }

    /// The sum over slots, in slot order and float32; pairs without an expert add nothing, whatever their weight.
    unsafe fn weighted_sum(&self, columns: Range<usize>, stride: usize, own: &mut Own) {
        let [tokens, slots] = self.call.shape;
        let (grid, size) = (&self.call.weights, self.call.x.dtype.size());
        let inverse = self.routing.inverse();
        own.values.resize(columns.len(), 0.0);
        for token in 0..tokens {
            own.values.fill(0.0);
            for slot in 0..slots {
                let row = inverse[token * slots + slot] as usize;
                if row >= self.routing.rows() {
                    continue;
                }
                // SAFETY: the routing weights are readable over (T, K).
                let weight = unsafe { with_number!(grid.dtype, read::<_>(grid, token, slot)) };
                for (sum, value) in own.values.iter_mut().zip(&own.products[row * stride..]) {
                    *sum += weight * value;
                }
            }
            let to = self.call.out.wrapping_add((token * self.layer.down.columns + columns.start) * size);
            // SAFETY: the result is (T, H), and these columns are this item's.
            unsafe { with_number!(self.call.x.dtype, write::<_>(&own.values, to)) };
        }
    }
}
