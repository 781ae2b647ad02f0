//! The experts of a layer on a CPU, over the memory of torch tensors.
//!
//! Only `routed_experts/fused_cpu.py` calls these: it holds the tensors for the length of the call, and made the result
//! itself, so that nobody else has seen it yet.

use pyo3::prelude::*;
use routed_experts_core::error::{CoreError, ErrorKind};
use routed_experts_core::experts::gate::{Activation, Gate};
use routed_experts_core::experts::number::Dtype;
use routed_experts_core::experts::operand::Grid;
use routed_experts_core::experts::{Address, Call, Layer, Routing, RowsCall, Weights, check_sizes};
use routed_experts_core::layout::ExpertId;

use crate::errors::to_python;
use crate::layout::with_id_type;

/// (address, dtype code, step of a row, step of a column)
type GridTuple = (usize, u8, isize, isize);
/// (columns, depth, step of an expert, of a column, of a depth, of an expert's bias, of a bias)
type WeightsTuple = (usize, usize, isize, isize, isize, isize, isize);
/// (activation, gate, concatenated, limit, alpha)
type GateTuple = (String, bool, bool, Option<f32>, Option<f32>);

/// The declared layout of a layer's experts, without their addresses.
///
/// `weights` are the first and the second product's (columns, depth, strides of expert, column and depth, strides of the
/// bias), in numbers; `gate` is (name of the activation, has a gate, halves are concatenated, limit, alpha).
///
/// Raises `DtypeError` for codes of no dtype, `LayoutError` for an unknown activation.
#[pyclass(frozen, module = "routed_experts._core")]
pub struct CpuExperts {
    layer: Layer,
    experts: usize,
}

#[pymethods]
impl CpuExperts {
    #[new]
    fn new(
        py: Python<'_>,
        experts: usize,
        dtype: u8,
        weights: (WeightsTuple, WeightsTuple),
        gate: GateTuple,
    ) -> PyResult<Self> {
        let layer = declared(dtype, weights, gate).map_err(|error| to_python(py, error))?;
        Ok(Self { layer, experts })
    }

    /// Run a layer: tokens `x` (T, H), `ids` and `routing` weights (T, K), each (address, dtype code, strides); addresses
    /// of the first and second weights and biases (0 for none); `out` is the address of a contiguous (T, H) in the
    /// dtype of `x`.
    #[allow(clippy::too_many_arguments, reason = "one flat call: an object would cost more than it explains")]
    fn run(
        &self,
        py: Python<'_>,
        shape: (usize, usize),
        x: GridTuple,
        ids: GridTuple,
        routing: GridTuple,
        weights: (usize, usize, usize, usize),
        out: usize,
        threads: usize,
    ) -> PyResult<()> {
        let run = || {
            check_sizes(shape.0, self.layer.up.columns, self.layer.up.depth)?;
            let (up, up_bias, down, down_bias) = weights;
            let call = Call {
                shape: shape.into(),
                x: grid(x)?,
                weights: grid(routing)?,
                addresses: [address(up, up_bias), address(down, down_bias)],
                out: out as *mut u8,
                threads,
            };
            let routing = self.sort(ids, shape)?;
            // SAFETY: fused_cpu.py passes addresses, strides and sizes of tensors that it holds during the call, all
            // checked against the declared layout, and a result that it has just made.
            unsafe { self.layer.run(&routing, &call, None) };
            Ok(())
        };
        py.detach(run).map_err(|error| to_python(py, error))
    }

    /// Run the first product alone (the second where `is_second`): rows `x` (S / repeats, depth) to the contiguous (S,
    /// columns) at `out`, in the dtype of `x` and the order of the pairs; rows of ids that are no expert read 0.
    #[allow(clippy::too_many_arguments, reason = "one flat call: an object would cost more than it explains")]
    fn rows(
        &self,
        py: Python<'_>,
        is_second: bool,
        shape: (usize, usize),
        x: GridTuple,
        repeats: usize,
        ids: GridTuple,
        weights: (usize, usize),
        out: usize,
        threads: usize,
    ) -> PyResult<()> {
        let run = || {
            let product = if is_second { &self.layer.down } else { &self.layer.up };
            check_sizes(shape.0.saturating_mul(shape.1), product.columns, product.depth)?;
            let address = address(weights.0, weights.1);
            let call = RowsCall { x: grid(x)?, repeats, address, out: out as *mut u8, threads };
            let routing = self.sort(ids, shape)?;
            // SAFETY: as in `run`.
            unsafe { product.run(&routing, &call, None) };
            Ok(())
        };
        py.detach(run).map_err(|error| to_python(py, error))
    }
}

impl CpuExperts {
    fn sort(&self, ids: GridTuple, shape: (usize, usize)) -> Result<Routing, CoreError> {
        with_id_type!(ids.1, sort(ids, shape, self.experts))
    }
}

fn sort<I: ExpertId>(ids: GridTuple, shape: (usize, usize), experts: usize) -> Result<Routing, CoreError> {
    // SAFETY: fused_cpu.py passes address, dtype, strides and shape of one tensor that it holds during the call.
    unsafe { Routing::new(ids.0 as *const I, [ids.2, ids.3], shape.into(), experts) }
}

fn declared(code: u8, weights: (WeightsTuple, WeightsTuple), gate: GateTuple) -> Result<Layer, CoreError> {
    let (name, has_gate, is_concatenated, limit, alpha) = gate;
    let activation = Activation::from_name(&name).ok_or_else(|| unknown("activation", name))?;
    let dtype = dtype(code)?;
    let matrix = |(columns, depth, expert, column, step, of_bias, bias_step): WeightsTuple| Weights {
        columns,
        depth,
        strides: [expert, column, step],
        bias_strides: [of_bias, bias_step],
        dtype,
    };
    let (up, down) = (matrix(weights.0), matrix(weights.1));
    Ok(Layer { up, down, gate: Gate { has_gate, is_concatenated, activation, limit, alpha } })
}

fn grid((address, code, row, column): GridTuple) -> Result<Grid, CoreError> {
    Ok(Grid { data: address as *const u8, dtype: dtype(code)?, strides: [row, column] })
}

fn address(matrix: usize, bias: usize) -> Address {
    Address { matrix: matrix as *const u8, bias: bias as *const u8 }
}

fn dtype(code: u8) -> Result<Dtype, CoreError> {
    match code {
        0 => Ok(Dtype::F32),
        1 => Ok(Dtype::Bf16),
        2 => Ok(Dtype::F16),
        code => Err(CoreError { kind: ErrorKind::DtypeError, ..unknown("dtype", format!("code {code}")) }),
    }
}

fn unknown(what: &str, found: String) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: format!("experts of an unknown {what}"),
        found: Some(found),
        needed: Some(format!("a known {what}")),
        hint: Some("Python files and extension differ in version: install the package again".to_owned()),
    }
}

/// Adds the class of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CpuExperts>()
}
