//! One kernel of a plan: checked once, then ready to have the addresses of a call filled in.

use crate::error::{CoreError, ErrorKind};

use super::driver::{Driver, Function, ParamInfo};

/// Most parameters of one kernel.
pub const MAX_PARAMS: usize = 64;
/// Most addresses of one launch.
pub const MAX_POINTERS: usize = 64;

/// Parameters that Triton appends for scratch memory: one or two by its version, unused where they are null.
pub(super) const MAX_TRAILING: usize = 2;
const GRID_LIMITS: [(&str, i64); 3] = [("x", i32::MAX as i64), ("y", 65_535), ("z", 65_535)];
const MAX_THREADS: i64 = 1024;

/// One run-time parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Param {
    /// The address that the call brings at this position.
    Pointer(u8),
    /// A fixed int32.
    Int32(i32),
    /// A fixed int64.
    Int64(i64),
    /// The bits of a fixed float32.
    Float32(u32),
}

impl Param {
    /// The parameter that a kind and its number stand for.
    ///
    /// # Errors
    /// `LayoutError` for an unknown kind and for a number that does not fit it.
    pub fn new(kind: &str, value: i64) -> Result<Self, CoreError> {
        let fitting = match kind {
            "pointer" => {
                u8::try_from(value).ok().filter(|&s| usize::from(s) < MAX_POINTERS).map(Self::Pointer)
            }
            "int32" => i32::try_from(value).ok().map(Self::Int32),
            "int64" => Some(Self::Int64(value)),
            "float32" => u32::try_from(value).ok().map(Self::Float32),
            _ => return Err(unknown_kind(kind)),
        };
        fitting.ok_or_else(|| unfit_value(kind, value))
    }

    /// Size in bytes that a function declares for it.
    pub fn bytes(self) -> usize {
        match self {
            Self::Pointer(_) | Self::Int64(_) => 8,
            Self::Int32(_) | Self::Float32(_) => 4,
        }
    }

    /// The fixed value in the low bytes; 0 for a pointer.
    fn word(self) -> u64 {
        match self {
            Self::Pointer(_) => 0,
            Self::Int32(value) => u64::from(value as u32),
            Self::Int64(value) => value as u64,
            Self::Float32(bits) => u64::from(bits),
        }
    }
}

/// A kernel as the caller states it; [`Kernel::new`] checks it.
#[derive(Clone, Debug)]
pub struct KernelSpec {
    /// The loaded function.
    pub function: Function,
    /// Blocks along x, y, z.
    pub grid: [i64; 3],
    /// Threads of a block.
    pub threads: i64,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: i64,
    /// Whether it may start before the kernel ahead of it on the stream has ended (programmatic dependent launch).
    pub dependent: bool,
    /// Its parameters in order, without the scratch pointers that Triton appends.
    pub params: Vec<Param>,
}

/// A checked kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub(super) function: Function,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    pub(super) dependent: bool,
    words: Box<[u64]>,
    /// (position among the parameters, slot) of each pointer.
    slots: Box<[(u8, u8)]>,
}

impl Kernel {
    /// Check the kernel at `index` of a plan by what is true on every device.
    ///
    /// # Errors
    /// `LayoutError` for a null function, more than [`MAX_PARAMS`] parameters, and numbers out of their range.
    pub fn new(index: usize, spec: &KernelSpec) -> Result<Self, CoreError> {
        if spec.function.is_null() {
            let needed = "the handle of a loaded function";
            return Err(refuse(index, "null function", "0", needed, "load the compiled kernel first"));
        }
        if spec.params.len() > MAX_PARAMS {
            let found = spec.params.len().to_string();
            let needed = format!("at most {MAX_PARAMS}");
            return Err(refuse(index, "too many parameters", &found, &needed, TRITON_LAUNCHES));
        }
        let [x, y, z] = [0, 1, 2].map(|axis| {
            let (name, limit) = GRID_LIMITS[axis];
            in_range(index, &format!("grid {name}"), spec.grid[axis], 1, limit)
        });
        let pointer = |(position, param): (usize, &Param)| match *param {
            Param::Pointer(slot) => Some((position as u8, slot)),
            _ => None,
        };
        Ok(Self {
            function: spec.function,
            grid: [x?, y?, z?],
            threads: in_range(index, "threads", spec.threads, 1, MAX_THREADS)?,
            shared_bytes: in_range(index, "shared bytes", spec.shared_bytes, 0, i64::from(i32::MAX))?,
            dependent: spec.dependent,
            words: spec.params.iter().map(|param| param.word()).collect(),
            slots: spec.params.iter().enumerate().filter_map(pointer).collect(),
        })
    }

    /// How many addresses a call must bring for this kernel.
    pub(super) fn pointers(&self) -> usize {
        self.slots.iter().map(|&(_, slot)| usize::from(slot) + 1).max().unwrap_or(0)
    }

    /// The parameters of one call, written to the front of `block`.
    pub(super) fn fill<'b>(&self, pointers: &[u64], block: &'b mut [u64; MAX_PARAMS]) -> &'b [u64] {
        let values = &mut block[..self.words.len()];
        values.copy_from_slice(&self.words);
        for &(position, slot) in &self.slots {
            values[usize::from(position)] = pointers[usize::from(slot)];
        }
        values
    }
}

const TRITON_LAUNCHES: &str = "launch this kernel with Triton's own launcher";

/// Compare the parameters of `spec` with those that its function declares, where the driver can tell.
pub(super) fn check_declared(driver: &impl Driver, index: usize, spec: &KernelSpec) -> Result<(), CoreError> {
    let mut declared = Vec::new();
    // One look past the end: a function may have more parameters than we can pass.
    for position in 0..=spec.params.len() + MAX_TRAILING {
        match driver.param_info(spec.function, position).map_err(|failure| failure.at_check(index))? {
            ParamInfo::Unknown => return Ok(()),
            ParamInfo::Absent => break,
            ParamInfo::Bytes(bytes) => declared.push(bytes),
        }
    }
    let stated: Vec<usize> = spec.params.iter().map(|param| param.bytes()).collect();
    let fits = match declared.strip_prefix(stated.as_slice()) {
        Some(trailing) => trailing.len() <= MAX_TRAILING && trailing.iter().all(|&bytes| bytes == 8),
        None => false,
    };
    if fits { Ok(()) } else { Err(other_params(index, &declared, &stated)) }
}

fn in_range(index: usize, what: &str, found: i64, low: i64, high: i64) -> Result<u32, CoreError> {
    if (low..=high).contains(&found) {
        return Ok(found as u32);
    }
    let needed = format!("{low} to {high}");
    let what = format!("{what} out of range");
    Err(refuse(
        index,
        &what,
        &found.to_string(),
        &needed,
        "split the work among more kernels, or launch none",
    ))
}

fn refuse(index: usize, what: &str, found: &str, needed: &str, hint: &str) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: format!("kernel {index} of a launch plan: {what}"),
        found: Some(found.to_owned()),
        needed: Some(needed.to_owned()),
        hint: Some(hint.to_owned()),
    }
}

fn unknown_kind(kind: &str) -> CoreError {
    CoreError {
        kind: ErrorKind::LayoutError,
        message: "a kernel parameter of an unknown kind".to_owned(),
        found: Some(format!("{kind:?}")),
        needed: Some("pointer, int32, int64 or float32".to_owned()),
        hint: Some(TRITON_LAUNCHES.to_owned()),
    }
}

fn unfit_value(kind: &str, value: i64) -> CoreError {
    let needed = match kind {
        "pointer" => format!("a slot, 0 to {}", MAX_POINTERS - 1),
        "float32" => "the bits of a float32 as an integer, 0 to 4294967295".to_owned(),
        _ => format!("{} to {}", i32::MIN, i32::MAX),
    };
    CoreError {
        kind: ErrorKind::LayoutError,
        message: format!("a kernel parameter does not fit its kind, {kind}"),
        found: Some(value.to_string()),
        needed: Some(needed),
        hint: Some("a number past int32 is an int64 parameter; an address comes with the call".to_owned()),
    }
}

fn other_params(index: usize, declared: &[usize], stated: &[usize]) -> CoreError {
    CoreError {
        kind: ErrorKind::BackendUnavailable,
        message: format!("kernel {index} of a launch plan declares other parameters than the plan passes"),
        found: Some(format!("parameters of {declared:?} bytes in the compiled kernel")),
        needed: Some(format!("{stated:?} bytes, then at most {MAX_TRAILING} scratch pointers of 8")),
        hint: Some(format!("this version of Triton passes parameters in another way: {TRITON_LAUNCHES}")),
    }
}
