//! The Python module `routed_experts._core`: a thin shell over `routed-experts-core`.

mod toolkit;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(toolkit::find_toolkit, module)?)?;
    Ok(())
}
