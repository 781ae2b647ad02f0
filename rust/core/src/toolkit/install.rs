//! One folder that may be a toolkit, and the folder that a given nvcc belongs to.

use std::path::{Path, PathBuf};

use super::host::Host;
use super::version::{PATIENCE, Version, version_of};

/// What stands in a folder that a candidate names.
#[derive(Clone, Debug, Default)]
pub(super) struct Install {
    pub root: Option<PathBuf>,
    pub nvcc: Option<PathBuf>,
    pub version: Option<Version>,
    pub include: Option<PathBuf>,
}

impl Install {
    /// The version is the compiler's: without nvcc, what the headers say is about the runtime.
    pub fn inspect(host: &dyn Host, root: &Path) -> Self {
        let nvcc = file_in(host, &root.join("bin"), "nvcc");
        Self {
            root: Some(root.to_path_buf()),
            version: nvcc.as_ref().and_then(|nvcc| version_of(host, root, nvcc)),
            include: include_of(host, root),
            nvcc,
        }
    }
}

/// The file `name` in `folder`, if there.
pub(super) fn file_in(host: &dyn Host, folder: &Path, name: &str) -> Option<PathBuf> {
    Some(folder.join(name)).filter(|path| host.is_file(path))
}

/// Folders where a toolkit may keep its headers: `include`, then `targets/*/include` (conda, cross compilers),
/// those of this machine's architecture first.
pub(super) fn header_folders(host: &dyn Host, root: &Path) -> Vec<PathBuf> {
    let native = |target: &Path| {
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(std::env::consts::ARCH)
            || (cfg!(target_arch = "aarch64") && name.starts_with("sbsa"))
    };
    let mut targets = host.list_dir(&root.join("targets"));
    targets.sort_by_key(|target| !native(target));
    let folders = std::iter::once(root.to_path_buf()).chain(targets);
    folders.map(|folder| folder.join("include")).collect()
}

/// A folder named `include` may hold other headers only, as the one of a conda environment does.
fn include_of(host: &dyn Host, root: &Path) -> Option<PathBuf> {
    let marked = |folder: &PathBuf| {
        ["cuda.h", "cuda_runtime.h"].iter().any(|header| host.is_file(&folder.join(header)))
    };
    header_folders(host, root).into_iter().find(marked)
}

/// The toolkit that an nvcc belongs to, and how that was learnt.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    /// The file behind all links.
    pub real: PathBuf,
    pub root: Option<PathBuf>,
    /// True if the file is no compiler in its toolkit, and had to be asked.
    pub wrapper: bool,
}

/// Two levels above the real file if headers stand there; else the file is a wrapper and is asked.
pub(super) fn owner_of(host: &dyn Host, nvcc: &Path) -> Owner {
    let real = host.canonicalize(nvcc).unwrap_or_else(|| nvcc.to_path_buf());
    let above = real.parent().and_then(Path::parent).filter(|root| {
        let complete = header_folders(host, root).iter().any(|folder| host.is_file(&folder.join("cuda.h")));
        complete && has_compiler(host, root)
    });
    if let Some(root) = above {
        return Owner { root: Some(root.to_path_buf()), wrapper: false, real };
    }
    let root = ask_for_top(host, nvcc).filter(|root| has_compiler(host, root));
    Owner { root, wrapper: true, real }
}

fn has_compiler(host: &dyn Host, root: &Path) -> bool {
    host.is_file(&root.join("bin/nvcc"))
}

/// A dry run prints `#$ TOP=<root>/bin/..`, but only if it is given an input; the file need not exist.
fn ask_for_top(host: &dyn Host, nvcc: &Path) -> Option<PathBuf> {
    let output = host.run(nvcc, &["-dryrun", "toolkit_probe.cu"], PATIENCE)?;
    let top = output.lines().find_map(|line| line.trim().trim_start_matches("#$ ").strip_prefix("TOP="))?;
    let root = PathBuf::from(top.trim());
    // A relative answer would be relative to the working folder, which is not the toolkit's.
    host.canonicalize(&root).filter(|_| root.is_absolute())
}
