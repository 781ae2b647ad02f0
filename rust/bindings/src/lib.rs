//! The Python module `routed_experts._core`: a thin shell over `routed-experts-core`.

use pyo3::prelude::*;

mod dispatch;
mod errors;
mod experts;
mod launch;
mod layout;
mod select;
mod toolkit;

// Classes are frozen and nothing here is kept between calls unguarded, so threads without the GIL are fine.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    dispatch::register(module)?;
    experts::register(module)?;
    launch::register(module)?;
    layout::register(module)?;
    select::register(module)?;
    toolkit::register(module)
}
