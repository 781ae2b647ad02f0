//! What a plan asks of the CUDA driver, and how the driver's own errors read.

use crate::error::{CoreError, ErrorKind};

use super::kernel::Kernel;

pub(super) const INVALID_VALUE: i32 = 1;
const INVALID_CONTEXT: i32 = 201;
const INVALID_HANDLE: i32 = 400;

/// A kernel that the driver has loaded (`CUfunction`), or null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub(super) usize);

impl Function {
    /// The function with the driver's `handle`.
    ///
    /// # Safety
    /// `handle` is null or a `CUfunction` whose module stays loaded for as long as the result, or a plan made of
    /// it, is used; and each launch passes addresses that the kernel may read and write.
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle)
    }

    /// Whether this is no function.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// What the driver knows of one parameter of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamInfo {
    /// This driver cannot tell (older than CUDA 12.4).
    Unknown,
    /// The function has fewer parameters.
    Absent,
    /// Size in bytes.
    Bytes(usize),
}

/// An error of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The `CUresult`.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_INVALID_HANDLE`.
    pub name: String,
    /// The driver's words for it.
    pub text: String,
}

/// The CUDA driver, as far as a plan needs it.
pub trait Driver {
    /// The parameter of `function` at `index`.
    ///
    /// # Errors
    /// Whatever the driver refuses with, other than that there is no such parameter.
    fn param_info(&self, function: Function, index: usize) -> Result<ParamInfo, Failure>;

    /// Put one launch of `kernel` on `stream`, with eight bytes for each parameter.
    ///
    /// # Errors
    /// Whatever the driver refuses with.
    fn launch(&self, kernel: &Kernel, stream: usize, values: &[u64]) -> Result<(), Failure>;

    /// The CUDA context of this thread; 0 for none.
    fn current_context(&self) -> usize;

    /// Make `context` the one of this thread if it has none; whether that happened.
    fn enter(&self, context: usize) -> bool;
}

impl Failure {
    /// Whether the thread has no CUDA context, or one that is gone.
    pub(super) fn is_no_context(&self) -> bool {
        self.code == INVALID_CONTEXT
    }

    pub(super) fn at_launch(self, index: usize) -> CoreError {
        CoreError {
            kind: ErrorKind::DeviceError,
            message: format!("the CUDA driver refused kernel {index} of a launch plan"),
            found: Some(self.found()),
            needed: Some("a working context whose device owns function, stream and pointers".to_owned()),
            hint: Some(self.hint().to_owned()),
        }
    }

    pub(super) fn at_check(&self, index: usize) -> CoreError {
        CoreError {
            kind: ErrorKind::BackendUnavailable,
            message: format!("the CUDA driver cannot describe kernel {index} of a launch plan"),
            found: Some(self.found()),
            needed: Some("a function loaded in this process".to_owned()),
            hint: Some("load the compiled kernel before the plan is made".to_owned()),
        }
    }

    fn found(&self) -> String {
        format!("{} ({}): {}", self.name, self.code, self.text)
    }

    fn hint(&self) -> &'static str {
        match self.code {
            INVALID_VALUE => "grid, threads or shared memory may be more than this device has",
            INVALID_CONTEXT | INVALID_HANDLE => {
                "make the device of the tensors current (torch.cuda.device) and pass one of its streams"
            }
            _ => "an earlier kernel may be the cause: CUDA_LAUNCH_BLOCKING=1 shows which",
        }
    }
}
