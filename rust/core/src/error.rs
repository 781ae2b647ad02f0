//! The one error type of the core; the binding maps each kind to the Python class of the same name.

use serde::{Deserialize, Serialize};

/// What went wrong, named as the Python exception that it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The machine lacks what a backend needs.
    BackendUnavailable,
    /// A backend cannot run experts of this shape.
    UnsupportedExperts,
    /// A quantization scheme that is not run.
    UnsupportedScheme,
    /// Quantization scales of a format that cannot be used.
    UnsupportedScales,
    /// A gradient was asked where there is none.
    GradientUnsupported,
    /// A backend name that is not registered.
    UnknownBackend,
    /// Shapes or layout flags that contradict each other.
    LayoutError,
    /// A dtype where another one is needed.
    DtypeError,
    /// An expert id outside 0..E-1.
    ExpertIndexError,
    /// A checkpoint that is missing, corrupt or incomplete.
    CheckpointError,
    /// A backend switch that is not possible.
    SwitchError,
    /// Tensors on devices that do not go together, or a launch that the CUDA driver refuses.
    DeviceError,
}

/// An error with what was found, what is needed and what to do next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct CoreError {
    /// The kind, which decides the Python class.
    pub kind: ErrorKind,
    /// One sentence.
    pub message: String,
    /// What was found.
    pub found: Option<String>,
    /// What is needed instead.
    pub needed: Option<String>,
    /// What the user can do.
    pub hint: Option<String>,
}
