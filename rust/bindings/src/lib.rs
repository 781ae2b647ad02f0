//! The Python module `routed_experts._core`: a thin shell over `routed-experts-core`.

use pyo3::prelude::*;

mod errors;
mod layout;
mod select;
mod toolkit;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    layout::register(module)?;
    select::register(module)?;
    toolkit::register(module)
}
