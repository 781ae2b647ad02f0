//! Questions about the experts, the inputs and the state of the call.

use super::{Check, Dim, need};
use crate::error::ErrorKind::{
    BackendUnavailable, DeviceError, GradientUnsupported, UnsupportedExperts, UnsupportedScales,
    UnsupportedScheme,
};
use crate::facts::Problem;

const ANOTHER: &str = "use backend=\"auto\", which picks a backend that runs these experts";

fn shape(holds: bool, found: impl Into<String>, needed: impl Into<String>) -> Check {
    need(holds, UnsupportedExperts, found, needed, ANOTHER)
}

pub fn gated(problem: &Problem) -> Check {
    shape(problem.has_gate, "experts without a gate", "gated experts (gate_up_proj)")
}

pub fn not_transposed(problem: &Problem) -> Check {
    shape(!problem.is_transposed, "transposed weights, (E, in, out)", "weights laid out (E, out, in)")
}

pub fn concatenated(problem: &Problem) -> Check {
    shape(problem.is_concatenated, "gate and up interleaved", "gate and up one after the other")
}

pub fn no_bias(problem: &Problem) -> Check {
    shape(!problem.has_bias, "experts with biases", "experts without biases")
}

pub fn no_post_expert_norm(problem: &Problem) -> Check {
    shape(
        !problem.has_post_expert_norm,
        "a norm after the down projection",
        "experts without a post-expert norm",
    )
}

pub fn no_own_gate(problem: &Problem) -> Check {
    shape(!problem.own_gate, "a gate function of the module's own", "a gate the kernel has itself")
}

pub fn activation(any_of: &[String], problem: &Problem) -> Check {
    let found = problem.activation.as_deref();
    let known = found.is_some_and(|name| any_of.iter().any(|other| other == name));
    let found =
        found.map_or("an activation function of unknown formula".into(), |name| format!("activation {name}"));
    shape(known, found, format!("activation {}", either(any_of)))
}

pub fn no_swiglu_limit(problem: &Problem) -> Check {
    let limit = problem.swiglu_limit;
    let found = format!("swiglu_limit={}", limit.unwrap_or_default());
    shape(limit.is_none(), found, "a gate without a clamp (swiglu_limit=None)")
}

pub fn no_swiglu_alpha(problem: &Problem) -> Check {
    let alpha = problem.swiglu_alpha;
    let found = format!("swiglu_alpha={}", alpha.unwrap_or_default());
    shape(alpha.is_none(), found, "a gate without a slope of its own (swiglu_alpha=None)")
}

pub fn dtype(any_of: &[String], problem: &Problem) -> Check {
    let holds = any_of.contains(&problem.dtype);
    let hint = format!("cast hidden states and experts to {}, or use backend=\"auto\"", either(any_of));
    need(holds, UnsupportedExperts, problem.dtype.as_str(), either(any_of), hint)
}

pub fn weights_aligned(bytes: u64, problem: &Problem) -> Check {
    let (hidden, inner, found) = (problem.hidden_size, problem.intermediate_size, problem.weight_alignment);
    shape(
        found % bytes.max(1) == 0,
        format!("weights aligned to {found} bytes (hidden_size {hidden}, intermediate_size {inner})"),
        format!("rows of both weights that start at multiples of {bytes} bytes"),
    )
}

pub fn multiple_of(n: u64, dims: &[Dim], problem: &Problem) -> Check {
    sizes(dims, problem, |size| size % n.max(1) == 0, &format!("divisible by {n}"))
}

pub fn at_most(n: u64, dims: &[Dim], problem: &Problem) -> Check {
    sizes(dims, problem, |size| size <= n, &format!("at most {n}"))
}

fn sizes(dims: &[Dim], problem: &Problem, fits: impl Fn(u64) -> bool, needed: &str) -> Check {
    let sizes = dims.iter().map(|dim| match dim {
        Dim::HiddenSize => ("hidden_size", problem.hidden_size),
        Dim::IntermediateSize => ("intermediate_size", problem.intermediate_size),
        Dim::NumExperts => ("num_experts", problem.num_experts),
    });
    let odd: Vec<_> = sizes.filter(|&(_, size)| !fits(size)).collect();
    let found: Vec<_> = odd.iter().map(|(name, size)| format!("{name} {size}")).collect();
    let names: Vec<_> = odd.iter().map(|(name, _)| *name).collect();
    shape(odd.is_empty(), found.join(", "), format!("{} {needed}", names.join(" and ")))
}

pub fn quantization(any_of: &[String], problem: &Problem) -> Check {
    let name = |fmt: &str| if fmt == "none" { "unquantized".to_string() } else { fmt.to_string() };
    let holds = any_of.iter().any(|fmt| fmt == problem.fmt());
    let names: Vec<_> = any_of.iter().map(|fmt| name(fmt)).collect();
    need(
        holds,
        UnsupportedScheme,
        format!("{} weights", name(problem.fmt())),
        format!("{} weights", either(&names)),
        "use backend=\"auto\", or quantize or dequantize the experts",
    )
}

pub fn block(any_of: &[(u64, u64)], problem: &Problem) -> Check {
    let Some(quantization) = &problem.quantization else { return Ok(()) };
    let text = |block: &(u64, u64)| format!("({}, {})", block.0, block.1);
    let names: Vec<_> = any_of.iter().map(text).collect();
    let found =
        quantization.block.as_ref().map_or("no block size".into(), |block| format!("block {}", text(block)));
    let holds = quantization.block.is_some_and(|block| any_of.contains(&block));
    shape(holds, found, format!("block {}", either(&names)))
}

pub fn scales(any_of: &[(String, String)], problem: &Problem) -> Check {
    let Some(quantization) = &problem.quantization else { return Ok(()) };
    let (fmt, scale) = (&quantization.fmt, &quantization.scale_dtype);
    let names: Vec<_> = any_of.iter().map(|(fmt, scale)| format!("{fmt} with {scale} scales")).collect();
    need(
        any_of.iter().any(|pair| (&pair.0, &pair.1) == (fmt, scale)),
        UnsupportedScales,
        format!("{fmt} with {scale} scales"),
        either(&names),
        "use a checkpoint with such scales, or backend=\"auto\"; scales are never rounded in silence",
    )
}

pub fn dynamic_activation_scales(problem: &Problem) -> Check {
    let scheme =
        problem.quantization.as_ref().map_or("dynamic", |quantization| &quantization.activation_scheme);
    need(
        scheme == "dynamic",
        UnsupportedScheme,
        format!("activation_scheme {scheme:?}"),
        "activation_scheme \"dynamic\"",
        "use backend=\"auto\", or requantize with activation_scheme=\"dynamic\"",
    )
}

pub fn no_gradient(problem: &Problem) -> Check {
    need(
        !problem.training,
        GradientUnsupported,
        "a gradient is wanted",
        "a call without gradients: this backend has no backward",
        "call under torch.no_grad(), or use backend=\"auto\" to train",
    )
}

pub fn process_group(problem: &Problem) -> Check {
    need(
        problem.process_group,
        UnsupportedExperts,
        "no process group",
        "a process group over the ranks that hold the experts",
        "pass process_group=, or use backend=\"auto\" on one rank",
    )
}

pub fn single_device(problem: &Problem) -> Check {
    need(
        problem.device_span <= 1,
        DeviceError,
        format!("weights on {} devices in one process", problem.device_span),
        "all weights on one device",
        "run one process for each device, or use backend=\"auto\"",
    )
}

pub fn not_compiling(problem: &Problem) -> Check {
    state(!problem.compiling, "a call traced by torch.compile", "a call outside torch.compile")
}

pub fn not_capturing(problem: &Problem) -> Check {
    state(!problem.capturing, "a call captured in a CUDA graph", "a call outside graph capture")
}

fn state(holds: bool, found: &str, needed: &str) -> Check {
    need(holds, BackendUnavailable, found, needed, "use backend=\"auto\", which picks one that can")
}

fn either(names: &[String]) -> String {
    names.join(" or ")
}
