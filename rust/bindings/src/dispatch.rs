//! Plans of an exchange over the memory of torch tensors; only `routed_experts/parallel/plan.py` calls these.

use pyo3::prelude::*;
use routed_experts_core::dispatch::{self, Ranks, Shape};
use routed_experts_core::error::CoreError;
use routed_experts_core::layout::ExpertId;

use crate::errors;
use crate::layout::{ids_at, not_an_output, with_id_type};

/// Fills the (chunks, ranks) int64 at address `out` with the rows of each run of tokens for each rank; returns the
/// most pairs that a row holds.
#[pyfunction]
#[pyo3(signature = (ids, dtype, tokens, slots, num_experts, ranks, chunks, out, /))]
#[allow(clippy::too_many_arguments, reason = "one flat call, as for layouts")]
fn dispatch_count(
    py: Python<'_>,
    ids: usize,
    dtype: u8,
    tokens: usize,
    slots: usize,
    num_experts: usize,
    ranks: usize,
    chunks: usize,
    out: usize,
) -> PyResult<usize> {
    let run = || {
        let shape = Shape::new(tokens, slots, Ranks::new(num_experts, ranks)?)?;
        if out == 0 || !(out as *const i64).is_aligned() {
            return Err(not_an_output(out));
        }
        with_id_type!(dtype, count(ids, &shape, out, chunks * ranks))
    };
    py.detach(run).map_err(|error| errors::to_python(py, error))
}

/// Fills the `out_len` int32 at address `out` with the plan of the (tokens, slots) ids at address `ids`.
#[pyfunction]
#[pyo3(signature = (ids, dtype, tokens, slots, num_experts, ranks, out, out_len, /))]
#[allow(clippy::too_many_arguments, reason = "one flat call, as for layouts")]
fn dispatch_plan(
    py: Python<'_>,
    ids: usize,
    dtype: u8,
    tokens: usize,
    slots: usize,
    num_experts: usize,
    ranks: usize,
    out: usize,
    out_len: usize,
) -> PyResult<()> {
    let run = || {
        let shape = Shape::new(tokens, slots, Ranks::new(num_experts, ranks)?)?;
        if out == 0 || !(out as *const i32).is_aligned() {
            return Err(not_an_output(out));
        }
        with_id_type!(dtype, plan(ids, &shape, out, out_len))
    };
    py.detach(run).map_err(|error| errors::to_python(py, error))
}

/// Adds the functions of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dispatch_count, module)?)?;
    module.add_function(wrap_pyfunction!(dispatch_plan, module)?)
}

fn count<I: ExpertId>(ids: usize, shape: &Shape, out: usize, out_len: usize) -> Result<usize, CoreError> {
    // SAFETY: plan.py passes pointer, dtype and sizes of one contiguous tensor that it holds during the call.
    let ids = unsafe { ids_at::<I>(ids, shape.pairs()) };
    // SAFETY: plan.py passes pointer and numel of an int64 tensor it has just made for this call: valid for writes,
    // disjoint from the ids, unknown to any other thread. Null and alignment are checked.
    let out = unsafe { std::slice::from_raw_parts_mut(out as *mut i64, out_len) };
    dispatch::count_rows(&ids, shape, out)
}

fn plan<I: ExpertId>(ids: usize, shape: &Shape, out: usize, out_len: usize) -> Result<(), CoreError> {
    // SAFETY: as in `count`.
    let ids = unsafe { ids_at::<I>(ids, shape.pairs()) };
    // SAFETY: as in `count`, of int32.
    let out = unsafe { std::slice::from_raw_parts_mut(out as *mut i32, out_len) };
    dispatch::plan_into(&ids, shape, out)
}
