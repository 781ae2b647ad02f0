//! The two inputs of every rule: what the machine is, and what is asked of it. Plain data, read elsewhere.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What is known of the machine.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Kind of device the call runs on: `cpu`, `cuda`.
    pub device: String,
    /// Compute capability, (9, 0) for SM90; `None` without a CUDA device.
    pub capability: Option<(u32, u32)>,
    /// Name of the device, as its driver says it.
    pub device_name: Option<String>,
    /// Number of CUDA devices.
    pub device_count: u32,
    /// Version of torch.
    pub torch: String,
    /// Version of Python.
    pub python: String,
    /// Installed version of each optional package; `None` when it is not installed.
    pub packages: BTreeMap<String, Option<String>>,
    /// The C compiler that Triton would build its launcher with.
    #[serde(default)]
    pub c_compiler: Option<String>,
    /// The folder of Python's own headers, `None` where there is no `Python.h`.
    #[serde(default)]
    pub python_headers: Option<String>,
    /// The CUDA toolkit, if one was found.
    pub toolkit: Option<Toolkit>,
    /// What is known of each kernel of another project; nothing is known of one that is not here.
    #[serde(default)]
    pub kernels: BTreeMap<String, Kernel>,
}

/// What is known of one kernel of another project.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// Where it is on this machine; `None` where it would have to be fetched.
    pub source: Option<String>,
    /// Why it can be had from nowhere.
    pub source_refusal: Option<Refusal>,
    /// Why it did not load when it was tried.
    pub load_refusal: Option<Refusal>,
}

/// The words of a refusal that was found out elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// What was found.
    pub found: String,
    /// What is needed.
    pub needed: String,
    /// What to do next.
    pub hint: String,
}

/// The CUDA toolkit that would compile kernels; keys that no rule reads are ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Toolkit {
    /// Root folder; `None` when the search ended without one.
    pub root: Option<String>,
    /// Path of nvcc, if it is a file.
    #[serde(default)]
    pub nvcc: Option<String>,
    /// Version of the toolkit, if it could be read.
    #[serde(default)]
    pub version: Option<ToolkitVersion>,
}

/// A toolkit version as text, or as the pair (major, minor).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum ToolkitVersion {
    /// "12.9"
    Text(String),
    /// (12, 9)
    Pair(u64, u64),
}

impl std::fmt::Display for ToolkitVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => formatter.write_str(text),
            Self::Pair(major, minor) => write!(formatter, "{major}.{minor}"),
        }
    }
}

/// One call of the experts, or the shape of it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools, reason = "each is one independent flag of the experts contract")]
pub struct Problem {
    /// Tokens in the call (T).
    pub num_tokens: u64,
    /// Experts chosen per token (K).
    pub num_top_k: u64,
    /// Experts held here (E).
    pub num_experts: u64,
    /// Width entering and leaving the experts (H).
    pub hidden_size: u64,
    /// Width inside one expert (I).
    pub intermediate_size: u64,
    /// Dtype the experts compute in, `bfloat16`.
    pub dtype: String,
    /// Dtype the weights are stored in.
    pub weight_dtype: String,
    /// Gate and up projection in one, or up alone.
    pub has_gate: bool,
    /// Weights are (E, in, out).
    pub is_transposed: bool,
    /// Gate and up lie one after the other, or interleaved.
    pub is_concatenated: bool,
    /// Both projections have a bias.
    pub has_bias: bool,
    /// Canonical name of the activation; `None` for a callable that is none of the known ones.
    pub activation: Option<String>,
    /// The whole gate is a callable of the module's own.
    pub own_gate: bool,
    /// Clamp of gate and up; 0 is a clamp.
    pub swiglu_limit: Option<f64>,
    /// Slope of the clamped `SwiGLU` with alpha.
    pub swiglu_alpha: Option<f64>,
    /// A norm follows the down projection.
    pub has_post_expert_norm: bool,
    /// How the weights are quantized, if they are.
    pub quantization: Option<Quantization>,
    /// Largest power of two that divides the bytes of every row and start of the weights, forward and backward.
    pub weight_alignment: u64,
    /// The experts of a weight do not lie one after the other.
    #[serde(default)]
    pub experts_scattered: bool,
    /// The backend that has reshaped the weights for itself, if one has.
    #[serde(default)]
    pub reshaped_by: Option<String>,
    /// A gradient is wanted.
    pub training: bool,
    /// The call is being traced by a compiler.
    pub compiling: bool,
    /// The call is being captured in a device graph.
    pub capturing: bool,
    /// Experts are split over ranks.
    pub expert_parallel: bool,
    /// A process group was handed over.
    pub process_group: bool,
    /// Number of devices the weights lie on.
    pub device_span: u32,
    /// Bytes that copies of weights may take.
    pub scratch_limit_bytes: u64,
}

/// How the weights are quantized.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantization {
    /// `fp8_block`, `mxfp8`, `fp8_tensor` or `mxfp4`.
    pub fmt: String,
    /// Rows and columns that share a scale; `None` for one scale a tensor.
    pub block: Option<(u64, u64)>,
    /// `dynamic` or `static`.
    pub activation_scheme: String,
    /// `float32` or `ue8m0`.
    pub scale_dtype: String,
}

impl Problem {
    /// Format of the weights, `none` when they are not quantized.
    pub fn fmt(&self) -> &str {
        self.quantization.as_ref().map_or("none", |quantization| &quantization.fmt)
    }

    /// (token, slot) pairs of the call.
    pub fn pairs(&self) -> u64 {
        self.num_tokens.saturating_mul(self.num_top_k)
    }
}
