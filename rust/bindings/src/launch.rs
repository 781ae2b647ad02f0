//! Launch plans for Python.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use routed_experts_core::error::CoreError;
use routed_experts_core::launch::{Function, KernelSpec, LibCuda, MAX_POINTERS, Param, Plan};

use crate::errors::to_python;

/// (function, grid, threads, `shared_bytes`, dependent, (kind, value) of each parameter).
type KernelTuple = (usize, (i64, i64, i64), i64, i64, bool, Vec<(String, i64)>);

/// The compiled kernels of one experts layer, launched in one call.
///
/// `kernels` has one tuple for each: (function, grid, threads, shared bytes, dependent, parameters), where a parameter
/// is ("pointer", slot), ("int32", value), ("int64", value) or ("float32", bits). A dependent kernel may start before
/// the one ahead of it has ended (programmatic dependent launch), and waits inside for what it reads. The caller keeps
/// the functions loaded for as long as the plan, and makes it while their device is the current one.
///
/// Raises `LayoutError` for tuples that no kernel could have, `BackendUnavailable` without a CUDA driver or where a
/// function declares other parameters: then Triton's own launcher has to do.
#[pyclass(frozen, module = "routed_experts._core")]
pub struct LaunchPlan {
    plan: Plan<'static, LibCuda>,
}

#[pymethods]
impl LaunchPlan {
    #[new]
    fn new(py: Python<'_>, kernels: Vec<KernelTuple>) -> PyResult<Self> {
        let plan = kernels
            .into_iter()
            .map(spec)
            .collect::<Result<Vec<_>, _>>()
            .and_then(|specs| Plan::new(&specs, LibCuda::get))
            .map_err(|error| to_python(py, error))?;
        Ok(Self { plan })
    }

    /// Launch all kernels in order on `stream`, a `cudaStream_t`; "pointer" parameters take `pointers[slot]`.
    ///
    /// The interpreter is kept: giving it back would take longer than the launch, and the kernels of one call stay
    /// side by side on the stream. Without a GIL the kernels of two threads may interleave on a stream that both use;
    /// each call has its own parameters, so neither sees the other's.
    ///
    /// Raises `LayoutError` for too few pointers, `DeviceError` naming the first kernel that the driver refuses; those
    /// after it are not launched.
    fn launch(&self, py: Python<'_>, stream: usize, pointers: &Bound<'_, PyTuple>) -> PyResult<()> {
        let mut addresses = [0; MAX_POINTERS];
        let count = pointers.len().min(self.plan.pointers());
        for (address, pointer) in addresses[..count].iter_mut().zip(pointers.iter_borrowed()) {
            *address = pointer.extract()?;
        }
        self.plan.launch(stream, &addresses[..count]).map_err(|error| to_python(py, error))
    }
}

fn spec(
    (handle, grid, threads, shared_bytes, dependent, params): KernelTuple,
) -> Result<KernelSpec, CoreError> {
    // SAFETY: the Python caller passes the handle of a compiled kernel that it keeps for as long as the plan, and
    // at each launch the addresses of tensors that it holds.
    let function = unsafe { Function::from_handle(handle) };
    let params = params.iter().map(|(kind, value)| Param::new(kind, *value)).collect::<Result<_, _>>()?;
    Ok(KernelSpec { function, grid: grid.into(), threads, shared_bytes, dependent, params })
}

/// Adds the class of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<LaunchPlan>()
}
