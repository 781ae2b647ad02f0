//! The experts of a layer on a CPU, over the memory of torch tensors.
//!
//! Only `routed_experts/fused_cpu.py` calls these: it holds the tensors for the length of the call, and made the result
//! itself, so that nobody else has seen it yet.

use pyo3::prelude::*;
use routed_experts_core::error::{CoreError, ErrorKind};
use routed_experts_core::experts::format::{Code, Format, ScaleDtype, Scales};
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
/// (format code, dtype code of the bias, scales of codes)
type FormatTuple = (u8, u8, Option<ScalesTuple>);
/// (dtype code, step of an expert, of a row, of a block, columns and depths of a block, whether two rows alternate)
type ScalesTuple = (u8, isize, isize, isize, usize, usize, bool);
/// (address, of the biases or 0, of the scales or 0)
type AddressTuple = (usize, usize, usize);
/// (activation, gate, concatenated, limit, alpha)
type GateTuple = (String, bool, bool, Option<f32>, Option<f32>);

/// The declared layout of a layer's experts, without their addresses.
///
/// `weights` are the first and the second product's (columns, depth, strides of expert, column and depth, strides of the
/// bias), in numbers, those of codes in bytes; `formats` are theirs: (code, of the bias, scales), with scales as (dtype
/// code, strides of expert, row and block, columns and depths of a block, whether two rows alternate); `gate` is (name of the activation, has a gate, halves are concatenated, limit, alpha).
///
/// Raises `DtypeError` for codes of no dtype or format, `LayoutError` for an unknown activation or an empty block.
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
        weights: (WeightsTuple, WeightsTuple),
        formats: (FormatTuple, FormatTuple),
        gate: GateTuple,
    ) -> PyResult<Self> {
        let layer = declared(weights, formats, gate).map_err(|error| to_python(py, error))?;
        Ok(Self { layer, experts })
    }

    /// Run a layer: tokens `x` (T, H), `ids` and `routing` weights (T, K), each (address, dtype code, strides); addresses
    /// of the first and second weights, each with those of biases and scales (0 for none); `out` is the address of a contiguous (T, H) in the
    /// dtype of `x`.
    #[allow(clippy::too_many_arguments, reason = "one flat call: an object would cost more than it explains")]
    fn run(
        &self,
        py: Python<'_>,
        shape: (usize, usize),
        x: GridTuple,
        ids: GridTuple,
        routing: GridTuple,
        weights: (AddressTuple, AddressTuple),
        out: usize,
        threads: usize,
    ) -> PyResult<()> {
        let run = || {
            check_sizes(shape.0, self.layer.up.columns, self.layer.up.depth)?;
            let call = Call {
                shape: shape.into(),
                x: grid(x)?,
                weights: grid(routing)?,
                addresses: [address(weights.0), address(weights.1)],
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
        weights: AddressTuple,
        out: usize,
        threads: usize,
    ) -> PyResult<()> {
        let run = || {
            let product = if is_second { &self.layer.down } else { &self.layer.up };
            check_sizes(shape.0.saturating_mul(shape.1), product.columns, product.depth)?;
            let address = address(weights);
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

fn declared(
    weights: (WeightsTuple, WeightsTuple),
    formats: (FormatTuple, FormatTuple),
    gate: GateTuple,
) -> Result<Layer, CoreError> {
    let (name, has_gate, is_concatenated, limit, alpha) = gate;
    let activation = Activation::from_name(&name).ok_or_else(|| unknown("activation", name))?;
    let (up, down) = (matrix(weights.0, formats.0)?, matrix(weights.1, formats.1)?);
    Ok(Layer { up, down, gate: Gate { has_gate, is_concatenated, activation, limit, alpha } })
}

fn matrix(weights: WeightsTuple, format: FormatTuple) -> Result<Weights, CoreError> {
    let (columns, depth, expert, column, step, of_bias, bias_step) = weights;
    Ok(Weights {
        columns,
        depth,
        strides: [expert, column, step],
        bias_strides: [of_bias, bias_step],
        bias: dtype(format.1)?,
        format: self::format(format)?,
    })
}

fn format((code, _, scales): FormatTuple) -> Result<Format, CoreError> {
    match (code, scales) {
        (3, Some(of)) => Ok(Format::Codes(Code::E4m3, self::scales(of)?)),
        (4, Some(of)) => Ok(Format::Codes(Code::E2m1, self::scales(of)?)),
        (code, None) => Ok(Format::Plain(dtype(code)?)),
        (code, Some(_)) => Err(unknown_code(code)),
    }
}

fn scales(of: ScalesTuple) -> Result<Scales, CoreError> {
    let (code, expert, row, step, columns, depths, alternate) = of;
    let dtype = match code {
        0 => ScaleDtype::F32,
        1 => ScaleDtype::E8m0,
        code => return Err(unknown_code(code)),
    };
    if columns == 0 || depths == 0 {
        return Err(unknown("block of scales", std::format!("{columns} columns, {depths} depths")));
    }
    Ok(Scales { strides: [expert, row, step], dtype, block: [columns, depths], alternate })
}

fn grid((address, code, row, column): GridTuple) -> Result<Grid, CoreError> {
    Ok(Grid { data: address as *const u8, dtype: dtype(code)?, strides: [row, column] })
}

fn address((matrix, bias, scales): AddressTuple) -> Address {
    Address { matrix: matrix as *const u8, bias: bias as *const u8, scales: scales as *const u8 }
}

fn dtype(code: u8) -> Result<Dtype, CoreError> {
    match code {
        0 => Ok(Dtype::F32),
        1 => Ok(Dtype::Bf16),
        2 => Ok(Dtype::F16),
        code => Err(unknown_code(code)),
    }
}

fn unknown_code(code: u8) -> CoreError {
    CoreError { kind: ErrorKind::DtypeError, ..unknown("dtype", std::format!("code {code}")) }
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
