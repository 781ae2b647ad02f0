//! Layouts over the memory of torch tensors, which Python hands over as data pointers and lengths.
//!
//! Only `routed_experts/layout.py` calls these: it owns the tensors, holds them for the length of the call, and
//! made the output itself, so that nobody else has seen it yet.

use std::borrow::Cow;

use pyo3::prelude::*;
use routed_experts_core::error::{CoreError, ErrorKind};
use routed_experts_core::layout::{self, ExpertId, Shape};

use crate::errors;

/// From this many pairs on (about 10 us) the interpreter is released. Below, other threads wait no longer than
/// for any small op, and this one need not queue for the interpreter again.
const DETACH_FROM: usize = 4096;

/// Calls a function generic over the id type, with the type that a dtype code of layout.py stands for.
macro_rules! with_id_type {
    ($code:expr, $function:ident($($argument:expr),*)) => {
        match $code {
            0 => $function::<u8>($($argument),*),
            1 => $function::<i8>($($argument),*),
            2 => $function::<i16>($($argument),*),
            3 => $function::<i32>($($argument),*),
            4 => $function::<i64>($($argument),*),
            5 => $function::<u16>($($argument),*),
            6 => $function::<u32>($($argument),*),
            7 => $function::<u64>($($argument),*),
            code => Err($crate::layout::unknown_dtype(code)),
        }
    };
}
pub(crate) use with_id_type;

/// Fills the `out_len` int32 at address `out` with the layout of the `pairs` ids at address `ids`.
#[pyfunction]
#[pyo3(signature = (ids, dtype, pairs, num_experts, alignment, threads, out, out_len, /))]
#[allow(clippy::too_many_arguments, reason = "one flat call: an object would cost more than a small sort")]
fn layout_build(
    py: Python<'_>,
    ids: usize,
    dtype: u8,
    pairs: usize,
    num_experts: usize,
    alignment: usize,
    threads: usize,
    out: usize,
    out_len: usize,
) -> PyResult<()> {
    let run = || {
        let shape = Shape::new(pairs, num_experts, alignment)?;
        if out == 0 || !(out as *const i32).is_aligned() {
            return Err(not_an_output(out));
        }
        with_id_type!(dtype, build(ids, &shape, threads, out, out_len))
    };
    let result = if pairs < DETACH_FROM { run() } else { py.detach(run) };
    result.map_err(|error| errors::to_python(py, error))
}

/// Position of the first of the `pairs` ids at address `ids` outside `0..num_experts`, or None.
#[pyfunction]
#[pyo3(signature = (ids, dtype, pairs, num_experts, /))]
fn layout_first_out_of_range(
    py: Python<'_>,
    ids: usize,
    dtype: u8,
    pairs: usize,
    num_experts: usize,
) -> PyResult<Option<usize>> {
    let run = || with_id_type!(dtype, find(ids, pairs, num_experts));
    py.detach(run).map_err(|error| errors::to_python(py, error))
}

/// Adds the functions of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(layout_build, module)?)?;
    module.add_function(wrap_pyfunction!(layout_first_out_of_range, module)?)
}

fn build<I: ExpertId>(
    ids: usize,
    shape: &Shape,
    threads: usize,
    out: usize,
    out_len: usize,
) -> Result<(), CoreError> {
    // SAFETY: layout.py passes pointer, dtype and numel of one contiguous tensor that it holds during the call.
    let ids = unsafe { ids_at::<I>(ids, shape.pairs()) };
    // SAFETY: layout.py passes pointer and numel of an int32 tensor it has just made for this call: valid for
    // writes, disjoint from the ids, unknown to any other thread. Null and alignment are checked.
    let out = unsafe { std::slice::from_raw_parts_mut(out as *mut i32, out_len) };
    layout::layout_into(&ids, shape, out, shape.workers(threads))
}

fn find<I: ExpertId>(ids: usize, pairs: usize, num_experts: usize) -> Result<Option<usize>, CoreError> {
    Shape::new(pairs, num_experts, 1)?;
    // SAFETY: layout.py passes pointer, dtype and numel of one contiguous tensor that it holds during the call.
    let ids = unsafe { ids_at::<I>(ids, pairs) };
    Ok(layout::first_out_of_range(&ids, num_experts as u32).map(|(position, _)| position))
}

/// The ids at an address: in place, or as a copy where the memory is not aligned (a tensor over mapped bytes).
///
/// # Safety
/// `len` values of `I` must be readable at `address` for as long as the result lives.
pub(crate) unsafe fn ids_at<'a, I: ExpertId>(address: usize, len: usize) -> Cow<'a, [I]> {
    let start = address as *const I;
    if len == 0 {
        return Cow::Borrowed(&[]); // torch gives empty tensors a null pointer
    }
    if start.is_aligned() {
        // SAFETY: readable by this function's contract, aligned by the check, not null because not empty.
        return Cow::Borrowed(unsafe { std::slice::from_raw_parts(start, len) });
    }
    // SAFETY: each address lies inside the values that the contract makes readable.
    Cow::Owned((0..len).map(|index| unsafe { start.add(index).read_unaligned() }).collect())
}

pub(crate) fn not_an_output(address: usize) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: "the output is no CPU tensor of int32".to_owned(),
        found: Some(format!("address {address:#x}")),
        needed: Some("an address in memory, a multiple of 4".to_owned()),
        hint: Some("call routed_experts.build_layout, which allocates it".to_owned()),
    }
}

pub(crate) fn unknown_dtype(code: u8) -> CoreError {
    CoreError {
        kind: ErrorKind::DtypeError,
        message: "expert ids of an unknown dtype".to_owned(),
        found: Some(format!("code {code}")),
        needed: Some("a code of layout.py, 0 to 7".to_owned()),
        hint: Some("Python files and extension differ in version: install the package again".to_owned()),
    }
}
