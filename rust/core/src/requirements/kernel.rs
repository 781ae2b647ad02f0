//! Questions about kernels of other projects: where one would come from, whether it loaded, what it left behind.

use super::{Check, Rejection, need};
use crate::error::ErrorKind::{BackendUnavailable, SwitchError, UnsupportedExperts};
use crate::facts::{Facts, Problem, Refusal};

pub fn source(name: &str, package: &str, installed: &str, facts: &Facts) -> Check {
    let known = facts.kernels.get(name);
    if known.is_some_and(|kernel| kernel.source.is_some()) {
        return Ok(());
    }
    if let Some(refusal) = known.and_then(|kernel| kernel.source_refusal.as_ref()) {
        return Err(rejection(refusal));
    }
    let has = |package: &str| facts.packages.get(package).is_some_and(Option::is_some);
    let hint = if has(installed) {
        format!("set ROUTED_EXPERTS_PREFER_INSTALLED=1 to run the installed {installed}")
    } else {
        format!("pip install \"{package}\", or hand a module over: register_kernel(\"{name}\", module)")
    };
    let needed = format!("{package}, installed, or another source of the kernel {name}");
    need(has(package), BackendUnavailable, format!("{package} is not installed"), needed, hint)
}

/// Whether a load would have to ask a network for the kernel.
pub fn needs_network(name: &str, facts: &Facts) -> bool {
    facts.kernels.get(name).is_none_or(|kernel| kernel.source.is_none())
}

pub fn loads(name: &str, facts: &Facts) -> Check {
    let failed = facts.kernels.get(name).and_then(|kernel| kernel.load_refusal.as_ref());
    failed.map_or(Ok(()), |refusal| Err(rejection(refusal)))
}

fn rejection(refusal: &Refusal) -> Rejection {
    let Refusal { found, needed, hint } = refusal.clone();
    Rejection { kind: BackendUnavailable, found, needed, hint }
}

pub fn experts_packed(problem: &Problem) -> Check {
    need(
        !problem.experts_scattered,
        UnsupportedExperts,
        "weights whose experts do not lie one after the other: a slice, or a stack that was expanded",
        "weights with stride(0) = product of the other sizes",
        "call .contiguous() on the weights once, or use backend=\"auto\"",
    )
}

/// Weights that a backend has reshaped are run by that backend alone.
///
/// # Errors
/// A `SwitchError` rejection naming both.
pub fn belongs(backend: &str, problem: &Problem) -> Check {
    let Some(owner) = problem.reshaped_by.as_deref().filter(|owner| *owner != backend) else { return Ok(()) };
    need(
        false,
        SwitchError,
        format!("weights that {owner} has reshaped"),
        format!("backend {owner:?}, or weights as they were loaded"),
        "load the experts again to run them on another backend",
    )
}
