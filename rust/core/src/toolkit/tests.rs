//! Every branch of the search on made-up machines.

mod compiler_variable;
mod search_path;
mod version;

use super::fake::FakeHost;
use super::{Candidate, Toolkit, find_toolkit};

const RELEASE: &str =
    "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.1, V12.1.66\n";

fn host() -> FakeHost {
    FakeHost::default()
}

/// A complete toolkit of version 12.9 in `root`.
fn with_toolkit(host: FakeHost, root: &str) -> FakeHost {
    host.file(&format!("{root}/bin/nvcc"), "")
        .file(&format!("{root}/bin/ptxas"), "")
        .file(&format!("{root}/bin/cuobjdump"), "")
        .file(&format!("{root}/include/cuda.h"), "#define CUDA_VERSION 12090\n")
}

fn candidate<'a>(toolkit: &'a Toolkit, source: &str) -> &'a Candidate {
    toolkit.candidates.iter().find(|candidate| candidate.source == source).unwrap()
}

fn sources(toolkit: &Toolkit) -> Vec<&str> {
    toolkit.candidates.iter().map(|candidate| candidate.source.as_str()).collect()
}

#[test]
fn nothing_anywhere_is_four_rejected_candidates() {
    let toolkit = find_toolkit(&host());
    assert_eq!(sources(&toolkit), ["CUDA_HOME", "CUDA_PATH", "nvcc on PATH", "/usr/local/cuda"]);
    assert_eq!((toolkit.root.clone(), toolkit.nvcc.clone(), toolkit.version), (None, None, None));
    let whole = |one: &Candidate| !one.found.is_empty() && one.needed.is_some() && one.hint.is_some();
    assert!(toolkit.candidates.iter().all(|one| !one.accepted && whole(one)));
    assert_eq!(toolkit.helpers.keys().collect::<Vec<_>>(), ["cuobjdump", "nvdisasm", "ptxas"]);
    assert!(toolkit.helpers.values().all(Option::is_none));
}

#[test]
fn cuda_home_comes_before_all_others() {
    let mut machine = host().set("CUDA_HOME", "/a").set("CUDA_PATH", "/b").set("PATH", "/c/bin");
    for root in ["/a", "/b", "/c", "/usr/local/cuda"] {
        machine = with_toolkit(machine, root);
    }
    let toolkit = find_toolkit(&machine);
    assert_eq!(toolkit.root.as_deref(), Some("/a"));
    assert_eq!(toolkit.nvcc.as_deref(), Some("/a/bin/nvcc"));
    assert_eq!(toolkit.version, Some((12, 9)));
    assert_eq!(toolkit.include.as_deref(), Some("/a/include"));
    assert_eq!(candidate(&toolkit, "CUDA_HOME").found, "nvcc 12.9 at /a/bin/nvcc; headers in /a/include");
    assert_eq!(toolkit.candidates.iter().filter(|one| one.accepted).count(), 1);
    assert_eq!(candidate(&toolkit, "CUDA_PATH").path.as_deref(), Some("/b"));
    assert_eq!(candidate(&toolkit, "CUDA_PATH").found, "not looked at: CUDA_HOME comes first");
}

#[test]
fn cuda_path_then_search_path_then_the_usual_folder() {
    let machine = || with_toolkit(with_toolkit(host(), "/usr/local/cuda"), "/c").set("PATH", "/bin::/c/bin");
    assert_eq!(
        find_toolkit(&with_toolkit(machine(), "/b").set("CUDA_PATH", "/b")).root.as_deref(),
        Some("/b")
    );
    assert_eq!(find_toolkit(&machine()).root.as_deref(), Some("/c"));
    assert_eq!(find_toolkit(&machine().set("PATH", "/bin")).root.as_deref(), Some("/usr/local/cuda"));
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let machine =
        with_toolkit(host(), "/usr/local/cuda").set("CUDA_HOME", "").set("CUDA_PATH", "").set("PATH", "");
    let toolkit = find_toolkit(&machine);
    assert_eq!(toolkit.root.as_deref(), Some("/usr/local/cuda"));
    assert_eq!(candidate(&toolkit, "CUDA_HOME").found, "set to an empty string, which counts as not set");
}

#[test]
fn a_wrong_variable_is_used_and_fails() {
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        let machine = with_toolkit(host(), "/usr/local/cuda").set(name, "/nowhere");
        let toolkit = find_toolkit(&machine);
        assert_eq!((toolkit.root.as_deref(), toolkit.nvcc.clone()), (Some("/nowhere"), None));
        let verdict = candidate(&toolkit, name);
        assert!(!verdict.accepted && verdict.found.contains(name) && verdict.hint.is_some());
        let next = candidate(&toolkit, "/usr/local/cuda");
        assert_eq!(next.hint.as_deref(), Some(format!("unset {name} to have it looked at").as_str()));
    }
}

#[test]
fn a_stray_space_is_shown_and_not_trimmed() {
    let toolkit = find_toolkit(&with_toolkit(host(), "/x").set("CUDA_HOME", " /x"));
    assert_eq!(toolkit.nvcc, None);
    let found = &candidate(&toolkit, "CUDA_HOME").found;
    assert_eq!(found, "no nvcc under \" /x\": CUDA_HOME is set to it, and it is not a folder");
}

#[test]
fn a_runtime_only_folder_has_no_compiler_and_no_version() {
    let root = "/venv/site-packages/nvidia/cu13";
    let machine = host()
        .file(&format!("{root}/include/cuda.h"), "#define CUDA_VERSION 13000\n")
        .file(&format!("{root}/lib/libcudart.so.13"), "")
        .set("CUDA_HOME", root);
    let toolkit = find_toolkit(&machine);
    let verdict = candidate(&toolkit, "CUDA_HOME");
    assert_eq!(verdict.found, format!("no nvcc under {root}"));
    assert!(!verdict.accepted && verdict.needed.as_deref().unwrap().contains("runtime-only"));
    assert_eq!((toolkit.version, toolkit.root.as_deref()), (None, Some(root)));
}

#[test]
fn the_usual_folder_without_a_compiler_is_rejected() {
    let toolkit = find_toolkit(&host().folder("/usr/local/cuda/include"));
    assert_eq!(candidate(&toolkit, "/usr/local/cuda").found, "no nvcc under /usr/local/cuda");
}

#[test]
fn a_dangling_link_is_no_folder() {
    let toolkit = find_toolkit(&host().link("/usr/local/cuda", "/usr/local/cuda-12.8"));
    assert_eq!(toolkit.root, None);
    assert_eq!(candidate(&toolkit, "/usr/local/cuda").found, "no folder /usr/local/cuda");
}

#[test]
fn the_usual_folder_may_be_a_link() {
    let machine = with_toolkit(host(), "/usr/local/cuda-12.9").link("/usr/local/cuda", "cuda-12.9");
    assert_eq!(find_toolkit(&machine).root.as_deref(), Some("/usr/local/cuda"));
}

#[test]
fn an_old_compiler_is_reported_by_its_own_version() {
    let machine = host().file("/old/bin/nvcc", "").set("CUDA_HOME", "/old").answers(
        "/old/bin/nvcc",
        "--version",
        RELEASE,
    );
    assert_eq!(find_toolkit(&machine).version, Some((12, 1)));
}

#[test]
fn headers_under_targets_are_found() {
    let header = "/conda/targets/x86_64-linux/include/cuda_runtime.h";
    let machine = host().file("/conda/bin/nvcc", "").file(header, "").file("/conda/include/zlib.h", "");
    let toolkit = find_toolkit(&machine.set("CUDA_HOME", "/conda"));
    assert!(candidate(&toolkit, "CUDA_HOME").accepted);
    assert_eq!(toolkit.include.as_deref(), Some("/conda/targets/x86_64-linux/include"));
}

#[test]
fn helper_tools_are_found_or_missing_one_by_one() {
    let machine = host().file("/x/bin/nvcc", "").file("/x/bin/ptxas", "").set("CUDA_HOME", "/x");
    let helpers = find_toolkit(&machine).helpers;
    assert_eq!(helpers["ptxas"].as_deref(), Some("/x/bin/ptxas"));
    assert_eq!(helpers["cuobjdump"], None);
}
