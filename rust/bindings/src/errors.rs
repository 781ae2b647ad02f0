//! The one match from core errors to the exception classes of `routed_experts.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use routed_experts_core::error::{CoreError, ErrorKind};

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The Python exception for `error`, with its `found`, `needed` and `hint`.
pub fn to_python(py: Python<'_>, error: CoreError) -> PyErr {
    exception(py, error).unwrap_or_else(|broken| broken)
}

fn exception(py: Python<'_>, error: CoreError) -> PyResult<PyErr> {
    let errors = ERRORS.get_or_try_init(py, || py.import("routed_experts.errors").map(Bound::unbind))?;
    let details = PyDict::new(py);
    details.set_item("found", error.found)?;
    details.set_item("needed", error.needed)?;
    details.set_item("hint", error.hint)?;
    let class = errors.bind(py).getattr(class_name(error.kind))?;
    Ok(PyErr::from_value(class.call((error.message,), Some(&details))?))
}

fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::BackendUnavailable => "BackendUnavailable",
        ErrorKind::UnsupportedExperts => "UnsupportedExperts",
        ErrorKind::UnsupportedScheme => "UnsupportedScheme",
        ErrorKind::UnsupportedScales => "UnsupportedScales",
        ErrorKind::GradientUnsupported => "GradientUnsupported",
        ErrorKind::UnknownBackend => "UnknownBackend",
        ErrorKind::LayoutError => "LayoutError",
        ErrorKind::DtypeError => "DtypeError",
        ErrorKind::ExpertIndexError => "ExpertIndexError",
        ErrorKind::CheckpointError => "CheckpointError",
        ErrorKind::SwitchError => "SwitchError",
        ErrorKind::DeviceError => "DeviceError",
    }
}
