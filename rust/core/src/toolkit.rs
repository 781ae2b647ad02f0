//! Which CUDA toolkit a just-in-time compiled kernel would use, and why: every candidate with its verdict.
//!
//! The order is the one of the kernels themselves: `CUDA_HOME`, `CUDA_PATH`, `nvcc` on `PATH`, `/usr/local/cuda`.
//! A variable that is set ends the search even when it is wrong, because the kernel's own search ends there too.
//! Nothing here asks torch or the CUDA runtime: neither knows which compiler is installed, and asking may start a
//! CUDA context.

mod candidate;
#[cfg(test)]
mod fake;
mod host;
mod install;
#[cfg(test)]
mod tests;
mod version;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use candidate::Candidate;
use candidate::{Step, compiler_variable, examine, skipped};
pub use host::{Host, RealHost};
use install::{Install, file_in};
pub use version::Version;

/// Tools that builds may call beside nvcc; some distributions split them off.
const HELPERS: [&str; 3] = ["cuobjdump", "nvdisasm", "ptxas"];

/// Where toolkits are looked for, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Variable(&'static str),
    SearchPath,
    Folder(&'static str),
}

const SOURCES: [Source; 4] = [
    Source::Variable("CUDA_HOME"),
    Source::Variable("CUDA_PATH"),
    Source::SearchPath,
    Source::Folder("/usr/local/cuda"),
];

impl Source {
    fn name(self) -> &'static str {
        match self {
            Self::Variable(name) | Self::Folder(name) => name,
            Self::SearchPath => "nvcc on PATH",
        }
    }
}

/// The toolkit in use, or the reasons why there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Toolkit {
    /// Folder in use; it is set, with `nvcc` none, when a variable names a folder that is no toolkit.
    pub root: Option<String>,
    /// Compiler in use: `DG_JIT_NVCC_COMPILER`, else the one in `root`.
    pub nvcc: Option<String>,
    /// Major and minor version of `nvcc`; none if unreadable.
    pub version: Option<Version>,
    /// Path of each helper tool; none if missing.
    pub helpers: BTreeMap<String, Option<String>>,
    /// Folder of the CUDA headers.
    pub include: Option<String>,
    /// Every candidate in order of search, each with its verdict.
    pub candidates: Vec<Candidate>,
}

/// Search for the CUDA toolkit on `host`.
pub fn find_toolkit(host: &dyn Host) -> Toolkit {
    let mut candidates = Vec::new();
    let mut settled: Option<(Source, Install)> = None;
    for source in SOURCES {
        if let Some((by, _)) = &settled {
            candidates.push(skipped(host, source, *by));
            continue;
        }
        match examine(host, source) {
            Step::Next(candidate) => candidates.push(candidate),
            Step::Stop(candidate, install) => {
                candidates.push(candidate);
                settled = Some((source, install));
            }
        }
    }
    let mut toolkit = describe(host, &settled.map(|(_, install)| install).unwrap_or_default());
    if let Some((candidate, install)) = compiler_variable(host) {
        toolkit.nvcc = install.nvcc.as_deref().map(text);
        toolkit.version = install.version;
        candidates.insert(0, candidate);
    }
    toolkit.candidates = candidates;
    toolkit
}

fn describe(host: &dyn Host, install: &Install) -> Toolkit {
    let mut folders: Vec<PathBuf> = install.root.iter().map(|root| root.join("bin")).collect();
    // The tools of a linked nvcc may stand beside the real file only.
    let real = install.nvcc.as_ref().and_then(|nvcc| host.canonicalize(nvcc));
    folders.extend(real.as_deref().and_then(Path::parent).map(Path::to_path_buf));
    let helper = |name: &str| folders.iter().find_map(|folder| file_in(host, folder, name));
    Toolkit {
        helpers: HELPERS.iter().map(|name| ((*name).into(), helper(name).as_deref().map(text))).collect(),
        root: install.root.as_deref().map(text),
        nvcc: install.nvcc.as_deref().map(text),
        version: install.version,
        include: install.include.as_deref().map(text),
        candidates: Vec::new(),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
