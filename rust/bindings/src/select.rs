//! Backend selection for Python: plain dicts in, plain dicts out.

use pyo3::prelude::*;
use pythonize::{depythonize, pythonize};
use routed_experts_core::error::{CoreError, ErrorKind};
use routed_experts_core::facts::{Facts, Problem};
use routed_experts_core::profile::Curve;
use routed_experts_core::select::{Spec, check_name, machine_decisions, select_measured};
use serde::de::DeserializeOwned;

use crate::errors::to_python;

/// The table of backends, parsed once; made anew when the Python registry changes.
#[pyclass(frozen, module = "routed_experts._core")]
pub struct Registry {
    specs: Vec<Spec>,
}

#[pymethods]
impl Registry {
    #[new]
    fn new(specs: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { specs: read("specs", specs)? })
    }

    #[pyo3(signature = (facts, problem, backend, measured = None))]
    fn select<'py>(
        &self,
        py: Python<'py>,
        facts: &Bound<'py, PyAny>,
        problem: &Bound<'py, PyAny>,
        backend: &str,
        measured: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (facts, problem): (Facts, Problem) = (read("facts", facts)?, read("problem", problem)?);
        let curves: Vec<Curve> =
            measured.map_or_else(|| Ok(Vec::new()), |curves| read("measured", curves))?;
        let selection = py.detach(|| select_measured(&self.specs, &facts, &problem, backend, &curves));
        Ok(pythonize(py, &selection.map_err(|error| to_python(py, error))?)?)
    }

    fn check_name(&self, py: Python<'_>, backend: &str) -> PyResult<()> {
        check_name(&self.specs, backend).map_err(|error| to_python(py, error))
    }

    fn decisions<'py>(&self, py: Python<'py>, facts: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let facts: Facts = read("facts", facts)?;
        Ok(pythonize(py, &py.detach(|| machine_decisions(&self.specs, &facts)))?)
    }
}

/// Reads plain data; what does not fit is the caller's mistake and says which of the inputs it was.
fn read<T: DeserializeOwned>(what: &str, data: &Bound<'_, PyAny>) -> PyResult<T> {
    depythonize(data).map_err(|error| {
        let mistake = CoreError {
            kind: ErrorKind::LayoutError,
            message: format!("{what} for backend selection cannot be read"),
            found: Some(error.to_string()),
            needed: Some("plain data of the documented form and vocabulary".into()),
            hint: Some("rust/core/src/requirements.rs lists every requirement and its arguments".into()),
        };
        to_python(data.py(), mistake)
    })
}

/// Adds what this file gives to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Registry>()
}
