//! Launches the compiled kernels of one experts layer in one call, through the CUDA driver.
//!
//! A [`Plan`] holds everything that stays the same from call to call: functions, grids and fixed parameters. A call
//! brings a stream and the addresses of its tensors. Its parameters live on the stack of the call, so threads may
//! launch one plan at the same time. Every check that can be made beforehand is made when the plan is.

mod driver;
mod kernel;
mod libcuda;
#[cfg(test)]
mod tests;

use crate::error::{CoreError, ErrorKind};

pub use driver::{Driver, Failure, Function, ParamInfo};
pub use kernel::{Kernel, KernelSpec, MAX_PARAMS, MAX_POINTERS, Param};
pub use libcuda::LibCuda;

/// Kernels that are launched one after the other on one stream.
#[derive(Debug)]
pub struct Plan<'d, D: Driver> {
    driver: &'d D,
    kernels: Box<[Kernel]>,
    pointers: usize,
    context: usize,
}

impl<'d, D: Driver> Plan<'d, D> {
    /// Check `specs` by themselves, then against what the functions declare to the driver that `load` gives.
    ///
    /// The plan remembers the CUDA context that is current now, for threads that have none.
    ///
    /// # Errors
    /// `LayoutError` for what no kernel could have, and whatever `load` refuses with; `BackendUnavailable` where
    /// the functions declare other parameters.
    pub fn new(
        specs: &[KernelSpec],
        load: impl FnOnce() -> Result<&'d D, CoreError>,
    ) -> Result<Self, CoreError> {
        if specs.is_empty() {
            return Err(no_kernels());
        }
        let kernels: Box<[Kernel]> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| Kernel::new(index, spec))
            .collect::<Result<_, _>>()?;
        let driver = load()?;
        for (index, spec) in specs.iter().enumerate() {
            kernel::check_declared(driver, index, spec)?;
        }
        let pointers = kernels.iter().map(Kernel::pointers).max().unwrap_or(0);
        Ok(Self { driver, kernels, pointers, context: driver.current_context() })
    }

    /// How many addresses a launch needs: one more than the highest slot.
    pub fn pointers(&self) -> usize {
        self.pointers
    }

    /// Launch all kernels, in order, on `stream`; further `pointers` than needed are not looked at.
    ///
    /// # Errors
    /// `LayoutError` for too few pointers, before anything is launched; `DeviceError` naming the first kernel that
    /// the driver refuses, which ends the sequence.
    #[inline]
    pub fn launch(&self, stream: usize, pointers: &[u64]) -> Result<(), CoreError> {
        if pointers.len() < self.pointers {
            return Err(too_few_pointers(pointers.len(), self.pointers));
        }
        for (index, kernel) in self.kernels.iter().enumerate() {
            let mut block = [0; MAX_PARAMS];
            let values = kernel.fill(pointers, &mut block);
            self.launch_one(kernel, stream, values).map_err(|failure| failure.at_launch(index))?;
        }
        Ok(())
    }

    /// A thread that has not used the device yet has no CUDA context: it gets the plan's, and a second try.
    fn launch_one(&self, kernel: &Kernel, stream: usize, values: &[u64]) -> Result<(), Failure> {
        match self.driver.launch(kernel, stream, values) {
            Err(failure) if failure.is_no_context() && self.driver.enter(self.context) => {
                self.driver.launch(kernel, stream, values)
            }
            outcome => outcome,
        }
    }
}

fn no_kernels() -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: "a launch plan of no kernels".to_owned(),
        found: Some("an empty sequence".to_owned()),
        needed: Some("one kernel or more".to_owned()),
        hint: Some("a call that has nothing to launch needs no plan".to_owned()),
    }
}

fn too_few_pointers(found: usize, needed: usize) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: "a launch with too few pointers".to_owned(),
        found: Some(format!("{found} pointers")),
        needed: Some(format!("{needed}, one more than the highest slot of the plan")),
        hint: Some("pass an address for every slot; 0 stands for no tensor".to_owned()),
    }
}
