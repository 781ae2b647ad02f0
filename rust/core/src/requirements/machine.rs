//! Questions about the machine: versions, architectures, packages, toolkit.

use super::{Check, ToolkitRow, TorchRow, need};
use crate::error::ErrorKind::BackendUnavailable;
use crate::facts::{Facts, Toolkit};
use crate::version::Version;

fn machine(
    holds: bool,
    found: impl Into<String>,
    needed: impl Into<String>,
    hint: impl Into<String>,
) -> Check {
    need(holds, BackendUnavailable, found, needed, hint)
}

pub fn device(devices: &[String], facts: &Facts) -> Check {
    let hint = format!("move experts and hidden states to a {} device", devices.join(" or "));
    machine(devices.contains(&facts.device), format!("device {}", facts.device), devices.join(" or "), hint)
}

pub fn torch(min: &Version, facts: &Facts) -> Check {
    let holds = Version::parse(&facts.torch).is_some_and(|found| found >= *min);
    machine(
        holds,
        format!("torch {}", known(&facts.torch)),
        format!("torch {min} or newer"),
        format!("pip install \"torch>={min}\""),
    )
}

pub fn python(min: &Version, facts: &Facts) -> Check {
    let holds = Version::parse(&facts.python).is_some_and(|found| found >= *min);
    let found = format!("Python {}", known(&facts.python));
    let needed = format!("Python {min} or newer");
    machine(holds, found, needed, format!("make an environment with Python {min} or newer"))
}

pub fn torch_capability(rows: &[TorchRow], facts: &Facts) -> Check {
    let torch = Version::parse(&facts.torch);
    let covers = |row: &TorchRow| {
        let version = torch.as_ref().is_some_and(|found| {
            *found >= row.torch_min && row.torch_below.as_ref().is_none_or(|below| found < below)
        });
        let capability = facts.capability.is_some_and(|found| {
            found >= row.capability_min && row.capability_below.is_none_or(|below| found < below)
        });
        version && capability
    };
    let table: Vec<_> = rows.iter().map(describe).collect();
    machine(
        rows.iter().any(covers),
        format!("torch {} on {}", known(&facts.torch), here(facts)),
        table.join("; or "),
        "install a newer torch, or use backend=\"auto\"",
    )
}

fn describe(row: &TorchRow) -> String {
    let torch = match &row.torch_below {
        Some(below) => format!("torch {} up to, not with, {below}", row.torch_min),
        None => format!("torch {} or newer", row.torch_min),
    };
    let capability = match row.capability_below {
        Some(below) => format!("{} up to, not with, {}", sm(row.capability_min), sm(below)),
        None => format!("{} or newer", sm(row.capability_min)),
    };
    format!("{torch} on {capability}")
}

pub fn capability_major(any_of: &[u32], facts: &Facts) -> Check {
    let holds = facts.capability.is_some_and(|(major, _)| any_of.contains(&major));
    let names: Vec<_> = any_of.iter().map(|major| format!("SM{major}x")).collect();
    architecture(holds, names.join(" or "), facts)
}

pub fn capability(min: (u32, u32), facts: &Facts) -> Check {
    let holds = facts.capability.is_some_and(|found| found >= min);
    architecture(holds, format!("{} or newer", sm(min)), facts)
}

fn architecture(holds: bool, needed: String, facts: &Facts) -> Check {
    let name = facts.device_name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    let hint = format!("run on a GPU of {needed}, or use backend=\"auto\"");
    machine(holds, format!("{}{name}", here(facts)), needed, hint)
}

pub fn package(name: &str, min: Option<&Version>, facts: &Facts) -> Check {
    let installed = facts.packages.get(name).and_then(Option::as_ref);
    let holds = match (installed, min) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(found), Some(min)) => Version::parse(found).is_some_and(|found| found >= *min),
    };
    let found =
        installed.map_or_else(|| format!("{name} is not installed"), |found| format!("{name} {found}"));
    let (needed, requirement) = match min {
        Some(min) => (format!("{name} {min} or newer"), format!("{name}>={min}")),
        None => (format!("{name}, installed"), name.to_string()),
    };
    machine(holds, found, needed, format!("pip install \"{requirement}\""))
}

pub fn any_package(any_of: &[String], facts: &Facts) -> Check {
    let holds = any_of.iter().any(|name| facts.packages.get(name).is_some_and(Option::is_some));
    let first = any_of.first().map_or("", String::as_str);
    machine(
        holds,
        format!("none of {} is installed", any_of.join(", ")),
        format!("{}, installed", any_of.join(" or ")),
        format!("pip install \"{first}\""),
    )
}

pub fn c_compiler(facts: &Facts) -> Check {
    let found = match (&facts.c_compiler, &facts.python_headers) {
        (None, _) => "no C compiler",
        (_, None) => "no Python.h",
        _ => return Ok(()),
    };
    machine(
        false,
        found,
        "a C compiler and Python's headers, with which Triton builds its launcher",
        "install gcc and the headers of this Python (build-essential, python3-dev), or set CC to a compiler",
    )
}

pub fn toolkit(facts: &Facts) -> Check {
    machine(
        root(facts).is_some(),
        "no CUDA toolkit",
        "a CUDA toolkit with nvcc",
        "install the CUDA toolkit and set CUDA_HOME to its folder",
    )
}

pub fn nvcc(facts: &Facts) -> Check {
    let holds = facts.toolkit.as_ref().is_some_and(|toolkit| toolkit.nvcc.is_some());
    let place = root(facts).unwrap_or("any folder");
    machine(
        holds,
        format!("no nvcc in {place}"),
        "a CUDA toolkit with bin/nvcc",
        "a runtime-only install is not enough: install the compiler, and set CUDA_HOME to its toolkit",
    )
}

pub fn toolkit_version(rows: &[ToolkitRow], facts: &Facts) -> Check {
    // A capability no row speaks of is refused elsewhere, by the requirement on the architecture.
    let major = facts.capability.map(|(major, _)| major);
    let Some(row) = rows.iter().find(|row| Some(row.major) == major) else { return Ok(()) };
    let version =
        facts.toolkit.as_ref().and_then(|toolkit| toolkit.version.as_ref()).map(ToString::to_string);
    let holds = version.as_deref().and_then(Version::parse).is_some_and(|found| found >= row.min);
    let text = version.unwrap_or_else(|| "of unreadable version".into());
    machine(
        holds,
        format!("nvcc {text} in {}", root(facts).unwrap_or("no folder")),
        format!("CUDA toolkit {} or newer on {}", row.min, here(facts)),
        format!("install CUDA toolkit {} or newer and set CUDA_HOME to its folder", row.min),
    )
}

fn root(facts: &Facts) -> Option<&str> {
    facts.toolkit.as_ref().and_then(|toolkit: &Toolkit| toolkit.root.as_deref())
}

fn sm((major, minor): (u32, u32)) -> String {
    format!("SM{major}{minor}")
}

fn here(facts: &Facts) -> String {
    facts.capability.map_or_else(|| format!("device {} without a compute capability", facts.device), sm)
}

fn known(version: &str) -> &str {
    if version.is_empty() { "of unknown version" } else { version }
}
