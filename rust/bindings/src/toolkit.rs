//! Toolkit discovery for Python.

use pyo3::prelude::*;
use routed_experts_core::toolkit::{self, RealHost};

/// The CUDA toolkit on this machine as plain data, with every candidate's verdict.
///
/// The interpreter is released meanwhile: a wrapper around nvcc may be asked, and may take its time.
#[pyfunction]
fn find_toolkit(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let toolkit = py.detach(|| toolkit::find_toolkit(&RealHost));
    Ok(pythonize::pythonize(py, &toolkit)?)
}

/// Adds the functions of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(find_toolkit, module)?)
}
