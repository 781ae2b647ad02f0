//! The real driver: `libcuda`, looked for when it is first needed. The only file that calls it.

#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{CoreError, ErrorKind};

use super::driver::{Driver, Failure, Function, INVALID_VALUE, ParamInfo};
use super::kernel::{Kernel, MAX_PARAMS, MAX_TRAILING};

const LIBRARY: &str = "libcuda.so.1";
const SUCCESS: i32 = 0;
const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;

/// `CUlaunchAttribute` of an int value; the value's union has 64 bytes.
#[repr(C)]
struct Attribute {
    id: u32,
    pad: u32,
    value: i32,
    rest: [i32; 15],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: usize,
    attributes: *const Attribute,
    count: u32,
}

const _: () = assert!(size_of::<Attribute>() == 72 && size_of::<Config>() == 56);

type Params = *mut *mut c_void;
type LaunchKernel =
    unsafe extern "C" fn(usize, u32, u32, u32, u32, u32, u32, u32, usize, Params, Params) -> i32;
type LaunchKernelEx = unsafe extern "C" fn(*const Config, usize, Params, Params) -> i32;
type GetParamInfo = unsafe extern "C" fn(usize, usize, *mut usize, *mut usize) -> i32;
type DescribeError = unsafe extern "C" fn(i32, *mut *const c_char) -> i32;
type GetContext = unsafe extern "C" fn(*mut usize) -> i32;
type SetContext = unsafe extern "C" fn(usize) -> i32;

/// The functions of the CUDA driver that plans call; optional ones are newer than the oldest driver we run on.
#[derive(Debug)]
pub struct LibCuda {
    launch: LaunchKernel,
    launch_ex: Option<LaunchKernelEx>,
    param_info: Option<GetParamInfo>,
    error_name: DescribeError,
    error_text: DescribeError,
    get_context: GetContext,
    set_context: SetContext,
}

impl LibCuda {
    /// The driver of this machine. The first call loads it, and its outcome stays for the process.
    ///
    /// # Errors
    /// `BackendUnavailable` where there is no NVIDIA driver, or one without a function that is needed.
    pub fn get() -> Result<&'static Self, CoreError> {
        static DRIVER: OnceLock<Result<LibCuda, CoreError>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::load().map_err(|error| no_driver(&error))).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: the driver's library; its initialisers ask nothing of who loads it.
        let library = unsafe { Library::new(LIBRARY) }?;
        // SAFETY: each field has the type that cuda.h gives the function of this name.
        let driver = unsafe {
            Self {
                launch: symbol(&library, "cuLaunchKernel")?,
                launch_ex: symbol(&library, "cuLaunchKernelEx").ok(),
                param_info: symbol(&library, "cuFuncGetParamInfo").ok(),
                error_name: symbol(&library, "cuGetErrorName")?,
                error_text: symbol(&library, "cuGetErrorString")?,
                get_context: symbol(&library, "cuCtxGetCurrent")?,
                set_context: symbol(&library, "cuCtxSetCurrent")?,
            }
        };
        // Never unloaded, so that the functions stay where they are.
        std::mem::forget(library);
        Ok(driver)
    }

    fn outcome(&self, code: i32) -> Result<(), Failure> {
        if code == SUCCESS { Ok(()) } else { Err(self.failure(code)) }
    }

    #[cold]
    fn failure(&self, code: i32) -> Failure {
        let name = describe(self.error_name, code);
        Failure { code, name, text: describe(self.error_text, code) }
    }
}

impl Driver for LibCuda {
    fn param_info(&self, function: Function, index: usize) -> Result<ParamInfo, Failure> {
        let Some(param_info) = self.param_info else { return Ok(ParamInfo::Unknown) };
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded by the contract of `Function`; both addresses are of live locals.
        match unsafe { param_info(function.0, index, &raw mut offset, &raw mut size) } {
            INVALID_VALUE => Ok(ParamInfo::Absent),
            code => self.outcome(code).map(|()| ParamInfo::Bytes(size)),
        }
    }

    fn launch(&self, kernel: &Kernel, stream: usize, values: &[u64]) -> Result<(), Failure> {
        // What follows the values are Triton's scratch pointers: null, and unread where a function declares none.
        let null = 0_u64;
        let mut params = [address(&null); MAX_PARAMS + MAX_TRAILING];
        for (param, value) in params.iter_mut().zip(values) {
            *param = address(value);
        }
        // SAFETY: the function is loaded by the contract of `Function`. `params` has an address of eight readable
        // bytes for each of its parameters, which `check_declared` counted where the driver tells and the caller
        // stated where not; the driver copies them before it returns.
        let code = unsafe {
            match self.launch_ex {
                Some(launch_ex) if kernel.dependent => {
                    launch_dependent(launch_ex, kernel, stream, params.as_mut_ptr())
                }
                // Without the attribute a dependent kernel waits for the one ahead, which is never wrong.
                _ => launch_plain(self.launch, kernel, stream, params.as_mut_ptr()),
            }
        };
        self.outcome(code)
    }

    fn current_context(&self) -> usize {
        let mut context = 0;
        // SAFETY: the address is of a live local.
        let code = unsafe { (self.get_context)(&raw mut context) };
        if code == SUCCESS { context } else { 0 }
    }

    fn enter(&self, context: usize) -> bool {
        // SAFETY: the context is one that the driver gave; it tells a destroyed one by itself.
        context != 0 && self.current_context() == 0 && unsafe { (self.set_context)(context) } == SUCCESS
    }
}

/// # Safety
/// `params` holds the address of each parameter that the loaded function of `kernel` declares.
unsafe fn launch_plain(launch: LaunchKernel, kernel: &Kernel, stream: usize, params: Params) -> i32 {
    let ([x, y, z], threads, shared) = (kernel.grid, kernel.threads, kernel.shared_bytes);
    // SAFETY: by this function's contract.
    unsafe { launch(kernel.function.0, x, y, z, threads, 1, 1, shared, stream, params, ptr::null_mut()) }
}

/// # Safety
/// `params` holds the address of each parameter that the loaded function of `kernel` declares.
unsafe fn launch_dependent(launch: LaunchKernelEx, kernel: &Kernel, stream: usize, params: Params) -> i32 {
    let attribute = Attribute { id: PROGRAMMATIC_STREAM_SERIALIZATION, pad: 0, value: 1, rest: [0; 15] };
    let config = Config {
        grid: kernel.grid,
        block: [kernel.threads, 1, 1],
        shared_bytes: kernel.shared_bytes,
        stream,
        attributes: &raw const attribute,
        count: 1,
    };
    // SAFETY: by this function's contract; configuration and attribute live until the driver has read them.
    unsafe { launch(&raw const config, kernel.function.0, params, ptr::null_mut()) }
}

/// The function that `library` exports as `name`.
///
/// # Safety
/// `T` is the type of that function, and it is not called after `library` is closed.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, libloading::Error> {
    // SAFETY: by this function's contract.
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol)
}

fn address(value: &u64) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

fn describe(function: DescribeError, code: i32) -> String {
    let mut text = ptr::null();
    // SAFETY: the address is of a live local.
    let known = unsafe { function(code, &raw mut text) } == SUCCESS && !text.is_null();
    if !known {
        return "unknown to this driver".to_owned();
    }
    // SAFETY: on success the driver gives the address of one of its own constant strings.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn no_driver(error: &libloading::Error) -> CoreError {
    CoreError {
        kind: ErrorKind::BackendUnavailable,
        message: "the CUDA driver cannot be loaded".to_owned(),
        found: Some(error.to_string()),
        needed: Some(format!("{LIBRARY} of an NVIDIA driver")),
        hint: Some(
            "install or update the driver; in a container, pass the GPUs through; then start Python anew"
                .to_owned(),
        ),
    }
}
