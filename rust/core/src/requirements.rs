//! The fixed vocabulary of requirements. A backend's row says which sentences must hold; each is checked
//! against facts and a problem handed in, so every rule can be tried without the hardware it speaks of.

mod kernel;
mod machine;
mod module;

use serde::Deserialize;

use crate::error::ErrorKind;
use crate::facts::{Facts, Problem};
use crate::version::Version;

/// Why a requirement is not met: never without what was found, what is needed and what to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejection {
    /// The kind of error this is when the backend was asked for by name.
    pub kind: ErrorKind,
    /// What was found.
    pub found: String,
    /// What is needed.
    pub needed: String,
    /// What to do next.
    pub hint: String,
}

/// Outcome of one check.
pub type Check = Result<(), Rejection>;

/// When a requirement is checked: the cheap questions about the module come first, the machine last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The experts and the inputs.
    Module,
    /// Tracing or capturing.
    State,
    /// Where a kernel of another project would come from.
    Source,
    /// The kind of device.
    Device,
    /// Versions, architectures, packages, toolkit.
    Environment,
}

/// One requirement of a row, `{"kind": "dtype", "any_of": ["bfloat16"]}`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Requirement {
    /// Experts with a gate.
    Gated {},
    /// Weights are (E, out, in).
    NotTransposed {},
    /// Gate and up lie one after the other.
    Concatenated {},
    /// No biases.
    NoBias {},
    /// No norm after the down projection.
    NoPostExpertNorm {},
    /// No callable that replaces the whole gate.
    NoOwnGate {},
    /// The activation is one of these canonical names.
    Activation {
        /// Canonical names.
        any_of: Vec<String>,
    },
    /// Gate and up are not clamped.
    NoSwigluLimit {},
    /// The gate has no alpha.
    NoSwigluAlpha {},
    /// The experts compute in one of these dtypes.
    Dtype {
        /// Names, `bfloat16`.
        any_of: Vec<String>,
    },
    /// Rows of both weights, forward and backward, start at multiples of this many bytes.
    WeightsAligned {
        /// The unit.
        bytes: u64,
    },
    /// Sizes divide by `n`.
    MultipleOf {
        /// The divisor.
        n: u64,
        /// Which sizes.
        dims: Vec<Dim>,
    },
    /// Sizes are at most `n`.
    AtMost {
        /// The largest.
        n: u64,
        /// Which sizes.
        dims: Vec<Dim>,
    },
    /// Weights are not quantized.
    Unquantized {},
    /// The format of the weights is one of these; `none` stands for unquantized.
    Quantization {
        /// Formats.
        any_of: Vec<String>,
    },
    /// Quantized weights share a scale over one of these blocks (rows, columns).
    Block {
        /// Blocks.
        any_of: Vec<(u64, u64)>,
    },
    /// Quantized weights are one of these pairs (format, dtype of the scales).
    Scales {
        /// Pairs.
        any_of: Vec<(String, String)>,
    },
    /// Scales of the activations are not stored in the checkpoint.
    DynamicActivationScales {},
    /// No gradient is wanted.
    NoGradient {},
    /// A process group was handed over.
    ProcessGroup {},
    /// All weights lie on one device.
    SingleDevice {},
    /// Not under a compiler's trace.
    NotCompiling {},
    /// Not under capture of a device graph.
    NotCapturing {},
    /// The experts of each weight lie one after the other.
    ExpertsPacked {},
    /// A kernel of another project can be had: registered, a local copy, installed, or through a package.
    Kernel {
        /// Its name.
        name: String,
        /// The package that can fetch it.
        package: String,
        /// The package that holds it where it is installed.
        installed: String,
    },
    /// A kernel of another project has not failed to load here before.
    KernelLoads {
        /// Its name.
        name: String,
    },
    /// torch is at least this version.
    Torch {
        /// Oldest version.
        min: Version,
    },
    /// One row of the table holds: a window of torch versions with a window of capabilities.
    TorchCapability {
        /// The table.
        rows: Vec<TorchRow>,
    },
    /// Python is at least this version.
    Python {
        /// Oldest version.
        min: Version,
    },
    /// The major number of the capability is one of these.
    CapabilityMajor {
        /// Major numbers.
        any_of: Vec<u32>,
    },
    /// The capability is at least this pair.
    Capability {
        /// (major, minor).
        min: (u32, u32),
    },
    /// A package is installed, and new enough.
    Package {
        /// Name of the distribution.
        name: String,
        /// Oldest version.
        #[serde(default)]
        min: Option<Version>,
    },
    /// One of these packages is installed.
    AnyPackage {
        /// Names of the distributions.
        any_of: Vec<String>,
    },
    /// A C compiler and Python's headers were found: Triton builds its launcher with them.
    CCompiler {},
    /// A CUDA toolkit was found.
    Toolkit {},
    /// The toolkit has its compiler.
    Nvcc {},
    /// The toolkit is at least the version its capability needs.
    ToolkitVersion {
        /// Oldest version for each major number.
        rows: Vec<ToolkitRow>,
    },
    /// `then` must hold where every condition given is met.
    When(When),
}

/// A size of the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dim {
    /// H.
    HiddenSize,
    /// I.
    IntermediateSize,
    /// E.
    NumExperts,
}

/// Versions of torch, and the capabilities they run on; both ends given as [min, below).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TorchRow {
    /// Oldest torch.
    pub torch_min: Version,
    /// First torch for which the row no longer speaks.
    #[serde(default)]
    pub torch_below: Option<Version>,
    /// Lowest capability.
    pub capability_min: (u32, u32),
    /// First capability that is not covered.
    #[serde(default)]
    pub capability_below: Option<(u32, u32)>,
}

/// Oldest toolkit for one major number of the capability.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolkitRow {
    /// Major number of the capability.
    pub major: u32,
    /// Oldest toolkit.
    pub min: Version,
}

/// Conditions, all optional, and the requirement that must hold where they are met.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct When {
    /// The kind of device.
    #[serde(default)]
    pub device: Option<String>,
    /// The major number of the capability.
    #[serde(default)]
    pub major: Option<u32>,
    /// The format of the weights is one of these; `none` stands for unquantized.
    #[serde(default)]
    pub formats: Option<Vec<String>>,
    /// Under a compiler's trace, or not.
    #[serde(default)]
    pub compiling: Option<bool>,
    /// A gradient is wanted, or not.
    #[serde(default)]
    pub training: Option<bool>,
    /// What must hold.
    pub then: Box<Requirement>,
}

impl Requirement {
    /// When this is checked.
    pub fn class(&self) -> Class {
        match self {
            Self::NotCompiling {} | Self::NotCapturing {} => Class::State,
            Self::Kernel { .. } => Class::Source,
            Self::Torch { .. }
            | Self::TorchCapability { .. }
            | Self::Python { .. }
            | Self::CapabilityMajor { .. }
            | Self::Capability { .. }
            | Self::Package { .. }
            | Self::AnyPackage { .. }
            | Self::KernelLoads { .. }
            | Self::CCompiler {}
            | Self::Toolkit {}
            | Self::Nvcc {}
            | Self::ToolkitVersion { .. } => Class::Environment,
            Self::When(when) => when.then.class(),
            _ => Class::Module,
        }
    }

    /// Checks this against `facts` and `problem`.
    ///
    /// # Errors
    /// A [`Rejection`] with the actual values.
    pub fn check(&self, facts: &Facts, problem: &Problem) -> Check {
        match self {
            Self::Gated {} => module::gated(problem),
            Self::NotTransposed {} => module::not_transposed(problem),
            Self::Concatenated {} => module::concatenated(problem),
            Self::NoBias {} => module::no_bias(problem),
            Self::NoPostExpertNorm {} => module::no_post_expert_norm(problem),
            Self::NoOwnGate {} => module::no_own_gate(problem),
            Self::Activation { any_of } => module::activation(any_of, problem),
            Self::NoSwigluLimit {} => module::no_swiglu_limit(problem),
            Self::NoSwigluAlpha {} => module::no_swiglu_alpha(problem),
            Self::Dtype { any_of } => module::dtype(any_of, problem),
            Self::WeightsAligned { bytes } => module::weights_aligned(*bytes, problem),
            Self::MultipleOf { n, dims } => module::multiple_of(*n, dims, problem),
            Self::AtMost { n, dims } => module::at_most(*n, dims, problem),
            Self::Unquantized {} => module::quantization(&["none".into()], problem),
            Self::Quantization { any_of } => module::quantization(any_of, problem),
            Self::Block { any_of } => module::block(any_of, problem),
            Self::Scales { any_of } => module::scales(any_of, problem),
            Self::DynamicActivationScales {} => module::dynamic_activation_scales(problem),
            Self::NoGradient {} => module::no_gradient(problem),
            Self::ProcessGroup {} => module::process_group(problem),
            Self::SingleDevice {} => module::single_device(problem),
            Self::NotCompiling {} => module::not_compiling(problem),
            Self::NotCapturing {} => module::not_capturing(problem),
            Self::ExpertsPacked {} => kernel::experts_packed(problem),
            Self::Kernel { name, package, installed } => kernel::source(name, package, installed, facts),
            Self::KernelLoads { name } => kernel::loads(name, facts),
            Self::Torch { min } => machine::torch(min, facts),
            Self::TorchCapability { rows } => machine::torch_capability(rows, facts),
            Self::Python { min } => machine::python(min, facts),
            Self::CapabilityMajor { any_of } => machine::capability_major(any_of, facts),
            Self::Capability { min } => machine::capability(*min, facts),
            Self::Package { name, min } => machine::package(name, min.as_ref(), facts),
            Self::AnyPackage { any_of } => machine::any_package(any_of, facts),
            Self::CCompiler {} => machine::c_compiler(facts),
            Self::Toolkit {} => machine::toolkit(facts),
            Self::Nvcc {} => machine::nvcc(facts),
            Self::ToolkitVersion { rows } => machine::toolkit_version(rows, facts),
            Self::When(when) => when.check(facts, problem),
        }
    }
}

impl Requirement {
    /// The kernel that would have to be fetched over a network, if there is one.
    pub fn fetches(&self, facts: &Facts) -> Option<&str> {
        match self {
            Self::Kernel { name, .. } if kernel::needs_network(name, facts) => Some(name),
            _ => None,
        }
    }
}

impl When {
    fn check(&self, facts: &Facts, problem: &Problem) -> Check {
        let met = is(self.device.as_ref(), &facts.device)
            && self.major.is_none_or(|major| facts.capability.is_some_and(|found| found.0 == major))
            && self.formats.as_ref().is_none_or(|formats| formats.iter().any(|fmt| fmt == problem.fmt()))
            && is(self.compiling.as_ref(), &problem.compiling)
            && is(self.training.as_ref(), &problem.training);
        if !met {
            return Ok(());
        }
        self.then.check(facts, problem).map_err(|mut rejection| {
            rejection.needed = format!("{} ({})", rejection.needed, self.conditions());
            rejection
        })
    }

    fn conditions(&self) -> String {
        let parts = [
            self.device.as_ref().map(|device| format!("on {device}")),
            self.major.map(|major| format!("on SM{major}x")),
            self.formats.as_ref().map(|formats| format!("for {} weights", formats.join(", "))),
            self.compiling.map(|yes| format!("{} torch.compile", if yes { "under" } else { "outside" })),
            self.training.map(|yes| format!("{} gradients", if yes { "with" } else { "without" })),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

fn is<T: PartialEq>(condition: Option<&T>, found: &T) -> bool {
    condition.is_none_or(|wanted| wanted == found)
}

/// The sentence holds, or it is refused with these words.
fn need(
    holds: bool,
    kind: ErrorKind,
    found: impl Into<String>,
    needed: impl Into<String>,
    hint: impl Into<String>,
) -> Check {
    if holds {
        return Ok(());
    }
    Err(Rejection { kind, found: found.into(), needed: needed.into(), hint: hint.into() })
}

/// The kind of device a row runs on, part of every row.
///
/// # Errors
/// A [`Rejection`] naming the device found and those the row runs on.
pub fn device(devices: &[String], facts: &Facts) -> Check {
    machine::device(devices, facts)
}

/// Whether weights that a backend reshaped belong to the row's own backend.
///
/// # Errors
/// A [`Rejection`] naming the backend that the weights belong to.
pub fn belongs(backend: &str, problem: &Problem) -> Check {
    kernel::belongs(backend, problem)
}
