//! `DG_JIT_NVCC_COMPILER`.

use super::{RELEASE, candidate, find_toolkit, host, with_toolkit};

const NAME: &str = "DG_JIT_NVCC_COMPILER";

#[test]
fn replaces_the_compiler_and_its_version_not_the_root() {
    let machine =
        with_toolkit(host(), "/x").set("CUDA_HOME", "/x").file("/other/nvcc", "").set(NAME, "/other/nvcc");
    let toolkit = find_toolkit(&machine.answers("/other/nvcc", "--version", RELEASE));
    assert_eq!((toolkit.root.as_deref(), toolkit.nvcc.as_deref()), (Some("/x"), Some("/other/nvcc")));
    assert_eq!(toolkit.version, Some((12, 1)));
    assert_eq!(toolkit.candidates[0].source, NAME);
    assert!(toolkit.candidates[0].accepted && candidate(&toolkit, "CUDA_HOME").accepted);
}

#[test]
fn version_comes_from_the_files_of_its_own_toolkit() {
    let machine = with_toolkit(host().file("/y/version.txt", "CUDA Version 13.1"), "/y");
    let toolkit = find_toolkit(&with_toolkit(machine, "/x").set("CUDA_HOME", "/x").set(NAME, "/y/bin/nvcc"));
    assert_eq!((toolkit.root.as_deref(), toolkit.version), (Some("/x"), Some((13, 1))));
}

#[test]
fn a_wrong_path_is_used_and_fails() {
    let toolkit = find_toolkit(&with_toolkit(host(), "/x").set("CUDA_HOME", "/x").set(NAME, "/gone/nvcc "));
    assert_eq!((toolkit.root.as_deref(), toolkit.nvcc, toolkit.version), (Some("/x"), None, None));
    let verdict = &toolkit.candidates[0];
    assert_eq!(verdict.found, "DG_JIT_NVCC_COMPILER is \"/gone/nvcc \", which is not a file");
    assert!(!verdict.accepted && verdict.hint.is_some());
}

#[test]
fn an_empty_value_is_not_a_candidate() {
    assert_eq!(find_toolkit(&host().set(NAME, "")).candidates.len(), 4);
}
