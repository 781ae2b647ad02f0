//! The verdict on each candidate: what was found, what is needed, what to do.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::host::Host;
use super::install::{Install, Owner, owner_of};
use super::version::{from_compiler, version_of};
use super::{Source, text};

/// `DeepGEMM` compiles with the file that this variable names, whichever toolkit is found.
pub(super) const COMPILER_VARIABLE: &str = "DG_JIT_NVCC_COMPILER";

const NEED_FOLDER: &str = "the folder of a CUDA toolkit";
const NEED_NVCC: &str = "bin/nvcc in it: a runtime-only install, as torch's wheel brings, has no compiler";
const SET_HOME: &str = "install the CUDA toolkit and set CUDA_HOME to its folder";

/// One place that was looked at, and why it is or is not the toolkit in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Where the candidate comes from: a variable, `nvcc on PATH`, or a fixed folder.
    pub source: String,
    /// What the source names, as written: a folder, or the nvcc on `PATH`.
    pub path: Option<String>,
    /// The toolkit folder behind `path`.
    pub root: Option<String>,
    /// Whether it is in use.
    pub accepted: bool,
    /// What was found.
    pub found: String,
    /// What an accepted candidate would have; none if it is accepted.
    pub needed: Option<String>,
    /// What to do; none if there is nothing to do.
    pub hint: Option<String>,
}

/// Whether the search goes on after a candidate.
pub(super) enum Step {
    Next(Candidate),
    Stop(Candidate, Install),
}

pub(super) fn examine(host: &dyn Host, source: Source) -> Step {
    match source {
        Source::Variable(name) => from_variable(host, name),
        Source::SearchPath => from_search_path(host),
        Source::Folder(path) if host.is_dir(Path::new(path)) => judge(host, path, path),
        Source::Folder(path) => Step::Next(rejected(path, Some(path), format!("no folder {path}"), SET_HOME)),
    }
}

/// A candidate after the one that ended the search; it is reported, not looked at.
pub(super) fn skipped(host: &dyn Host, source: Source, by: Source) -> Candidate {
    let value = match source {
        Source::Variable(name) => host.env(name).filter(|value| !value.is_empty()),
        Source::Folder(path) => Some(path.to_string()),
        Source::SearchPath => None,
    };
    let hint = match by {
        Source::Variable(name) => format!("unset {name} to have it looked at"),
        _ => "set CUDA_HOME to use another toolkit".into(),
    };
    Candidate {
        source: source.name().into(),
        path: value,
        found: format!("not looked at: {} comes first", by.name()),
        needed: Some("no toolkit, and no variable that names one, before it".into()),
        hint: Some(hint),
        ..Candidate::default()
    }
}

fn from_variable(host: &dyn Host, name: &str) -> Step {
    match host.env(name) {
        Some(value) if !value.is_empty() => judge(host, name, &value),
        Some(_) => Step::Next(unset(name, "set to an empty string, which counts as not set")),
        None => Step::Next(unset(name, "not set")),
    }
}

fn unset(name: &str, found: &str) -> Candidate {
    rejected(name, None, found.into(), format!("set {name} to use a toolkit of your choice"))
}

/// A folder that is used whether it is a toolkit or not.
fn judge(host: &dyn Host, source: &str, path: &str) -> Step {
    let install = Install::inspect(host, Path::new(path));
    if install.nvcc.is_some() {
        let candidate = accepted(source, path, &install, "");
        return Step::Stop(candidate, install);
    }
    let (what, needed) = if host.is_dir(Path::new(path)) {
        (format!("no nvcc under {}", shown(path)), NEED_NVCC)
    } else {
        // Quoted and not trimmed: a stray space is the usual reason.
        (format!("no nvcc under {path:?}: {source} is set to it, and it is not a folder"), NEED_FOLDER)
    };
    let hint = if source.starts_with('/') {
        SET_HOME.to_string()
    } else {
        format!("set {source} to the folder of a CUDA toolkit that holds bin/nvcc, or unset it")
    };
    let candidate = Candidate {
        root: Some(path.into()),
        needed: Some(needed.into()),
        ..rejected(source, Some(path), what, hint)
    };
    Step::Stop(candidate, install)
}

fn from_search_path(host: &dyn Host) -> Step {
    let source = Source::SearchPath.name();
    let Some(nvcc) = nvcc_on_path(host) else {
        let candidate = rejected(source, None, "no nvcc on PATH".into(), SET_HOME);
        return Step::Next(Candidate { needed: Some("an nvcc that can be executed".into()), ..candidate });
    };
    let owner = owner_of(host, &nvcc);
    let Some(root) = &owner.root else {
        return Step::Next(orphan(source, &nvcc, &owner));
    };
    let install = Install::inspect(host, root);
    let how = provenance(&nvcc, &owner, install.nvcc.as_deref());
    let candidate = accepted(source, &text(&nvcc), &install, &how);
    Step::Stop(candidate, install)
}

/// The first executable nvcc, as a shell would take it; empty entries of `PATH` are passed over.
fn nvcc_on_path(host: &dyn Host) -> Option<PathBuf> {
    let folders = host.env("PATH")?;
    std::env::split_paths(&folders)
        .filter(|folder| !folder.as_os_str().is_empty())
        .map(|folder| folder.join("nvcc"))
        .find(|nvcc| host.is_executable(nvcc))
        .map(|nvcc| if nvcc.is_absolute() { nvcc } else { host.canonicalize(&nvcc).unwrap_or(nvcc) })
}

/// A wrapper that does not say which toolkit it wraps. Its parent is no toolkit, so it is never used as one.
fn orphan(source: &str, nvcc: &Path, owner: &Owner) -> Candidate {
    let found = format!(
        "{}{} has no include/cuda.h two levels above it, and a dry run names no toolkit with bin/nvcc",
        nvcc.display(),
        if owner.real == nvcc { String::new() } else { format!(" (the file {})", owner.real.display()) },
    );
    Candidate {
        needed: Some("an nvcc inside its toolkit, or a wrapper whose `nvcc -dryrun` prints TOP".into()),
        ..rejected(source, Some(&text(nvcc)), found, "set CUDA_HOME to the toolkit that it wraps")
    }
}

fn provenance(path: &Path, owner: &Owner, nvcc: Option<&Path>) -> String {
    if owner.wrapper && nvcc != Some(path) {
        format!(", wrapped by {}", path.display())
    } else if owner.real == path {
        String::new()
    } else {
        format!(", linked from {}", path.display())
    }
}

/// The compiler that the variable names; it is judged even when no toolkit is found.
pub(super) fn compiler_variable(host: &dyn Host) -> Option<(Candidate, Install)> {
    let value = host.env(COMPILER_VARIABLE).filter(|value| !value.is_empty())?;
    let nvcc = PathBuf::from(&value);
    if !host.is_file(&nvcc) {
        let hint = format!("set {COMPILER_VARIABLE} to the full path of an nvcc, or unset it");
        let found = format!("{COMPILER_VARIABLE} is {value:?}, which is not a file");
        let needed = Some("the full path of an nvcc".into());
        let candidate = Candidate { needed, ..rejected(COMPILER_VARIABLE, Some(&value), found, hint) };
        return Some((candidate, Install::default()));
    }
    let root = owner_of(host, &nvcc).root;
    let version = match &root {
        Some(root) => version_of(host, root, &nvcc),
        None => from_compiler(host, &nvcc),
    };
    let install = Install { root, nvcc: Some(nvcc), version, include: None };
    let candidate = accepted(COMPILER_VARIABLE, &value, &install, ", which replaces the toolkit's own");
    Some((candidate, install))
}

fn accepted(source: &str, path: &str, install: &Install, how: &str) -> Candidate {
    let nvcc = install.nvcc.as_deref().map(text).unwrap_or_default();
    let version = install
        .version
        .map_or("of unreadable version".to_string(), |(major, minor)| format!("{major}.{minor}"));
    let headers = install.include.as_deref().map(|folder| format!("; headers in {}", folder.display()));
    let unreadable = "no version in version.json, version.txt or cuda.h, and `nvcc --version` gives none";
    Candidate {
        source: source.into(),
        path: Some(path.into()),
        root: install.root.as_deref().map(text),
        accepted: true,
        found: format!("nvcc {version} at {nvcc}{how}{}", headers.unwrap_or_default()),
        needed: None,
        hint: install.version.is_none().then(|| unreadable.into()),
    }
}

fn rejected(source: &str, path: Option<&str>, found: String, hint: impl Into<String>) -> Candidate {
    Candidate {
        source: source.into(),
        path: path.map(Into::into),
        found,
        needed: Some(NEED_FOLDER.into()),
        hint: Some(hint.into()),
        ..Candidate::default()
    }
}

/// Plain, or quoted where the ends of the path could be misread.
fn shown(path: &str) -> String {
    if path.trim() == path { path.into() } else { format!("{path:?}") }
}
