//! `nvcc` on `PATH`: links, wrappers, and what a shell passes over.

use super::{candidate, find_toolkit, host, with_toolkit};

#[test]
fn links_are_followed_to_the_real_toolkit() {
    let machine = with_toolkit(host(), "/opt/cuda-12.9")
        .link("/usr/bin/nvcc", "/etc/alternatives/nvcc")
        .link("/etc/alternatives/nvcc", "../../opt/cuda-12.9/bin/nvcc")
        .set("PATH", "/bin:/usr/bin");
    let toolkit = find_toolkit(&machine);
    assert_eq!(toolkit.root.as_deref(), Some("/opt/cuda-12.9"));
    let verdict = candidate(&toolkit, "nvcc on PATH");
    assert_eq!(verdict.path.as_deref(), Some("/usr/bin/nvcc"));
    assert!(verdict.found.contains("/opt/cuda-12.9/bin/nvcc, linked from /usr/bin/nvcc"));
    assert!(machine.started.borrow().is_empty());
}

#[test]
fn headers_under_targets_make_a_root() {
    let machine = host()
        .file("/conda/bin/nvcc", "")
        .file("/conda/targets/x86_64-linux/include/cuda.h", "#define CUDA_VERSION 12080")
        .set("PATH", "/conda/bin");
    let toolkit = find_toolkit(&machine);
    assert_eq!((toolkit.root.as_deref(), toolkit.version), (Some("/conda"), Some((12, 8))));
}

#[test]
fn a_wrapper_is_asked_for_its_toolkit() {
    let output = "#$ _HERE_=/hpc/cuda/12.9/bin\n#$ TOP=/hpc/cuda/12.9/bin/..\nnvcc fatal\n";
    let machine = with_toolkit(host(), "/hpc/cuda/12.9")
        .file("/hpc/compilers/bin/nvcc", "#!/bin/sh")
        .answers("/hpc/compilers/bin/nvcc", "-dryrun", output)
        .set("PATH", "/hpc/compilers/bin");
    let toolkit = find_toolkit(&machine);
    assert_eq!(toolkit.root.as_deref(), Some("/hpc/cuda/12.9"));
    let verdict = candidate(&toolkit, "nvcc on PATH");
    assert_eq!(verdict.path.as_deref(), Some("/hpc/compilers/bin/nvcc"));
    assert!(verdict.found.contains("/hpc/cuda/12.9/bin/nvcc, wrapped by /hpc/compilers/bin/nvcc"));
}

#[test]
fn a_link_to_a_compiler_cache_is_asked_under_its_own_name() {
    let machine = with_toolkit(host(), "/opt/cuda")
        .file("/usr/bin/ccache", "")
        .file("/usr/include/cuda.h", "#define CUDA_VERSION 11050")
        .link("/usr/lib/ccache/nvcc", "../../bin/ccache")
        .answers("/usr/lib/ccache/nvcc", "-dryrun", "#$ TOP=/opt/cuda")
        .set("PATH", "/usr/lib/ccache");
    assert_eq!(find_toolkit(&machine).root.as_deref(), Some("/opt/cuda"));
}

#[test]
fn a_silent_wrapper_gives_way_to_the_next_candidate_never_to_its_parent() {
    // The path without a leading slash is in the working folder.
    let empty = with_toolkit(host().folder("/empty/bin").file("here/bin/nvcc", ""), "/usr/local/cuda");
    let mut machine = empty.file("/wrap/bin/nvcc", "#!/bin/sh").set("PATH", "/wrap/bin");
    for output in
        [None, Some("no answer"), Some("#$ TOP="), Some("#$ TOP=here/bin/.."), Some("#$ TOP=/empty/bin/..")]
    {
        if let Some(output) = output {
            machine = machine.answers("/wrap/bin/nvcc", "-dryrun", output);
        }
        let toolkit = find_toolkit(&machine);
        assert_eq!(toolkit.root.as_deref(), Some("/usr/local/cuda"), "{output:?}");
        let verdict = candidate(&toolkit, "nvcc on PATH");
        assert!(!verdict.accepted && verdict.root.is_none());
        assert!(
            verdict.found.contains("/wrap/bin/nvcc")
                && verdict.hint.as_deref().unwrap().contains("CUDA_HOME")
        );
    }
}

#[test]
fn both_paths_of_a_linked_silent_wrapper_are_reported() {
    let machine = host().file("/opt/tool", "").link("/bin/nvcc", "/opt/tool").set("PATH", "/bin");
    let found = candidate(&find_toolkit(&machine), "nvcc on PATH").found.clone();
    assert!(found.starts_with("/bin/nvcc (the file /opt/tool)"), "{found}");
}

#[test]
fn what_a_shell_would_pass_over_is_passed_over() {
    let machine = with_toolkit(host(), "/good")
        .plain("/plain/nvcc")
        .folder("/folder/nvcc")
        .link("/dangling/nvcc", "/gone")
        .file("nvcc", "in the working folder")
        .set("PATH", ":/plain:/folder:/dangling:/good/bin");
    assert_eq!(find_toolkit(&machine).root.as_deref(), Some("/good"));
}

#[test]
fn helpers_beside_the_real_file_count() {
    let machine = host()
        .file("/store/nvcc/bin/nvcc", "")
        .file("/store/nvcc/bin/ptxas", "")
        .link("/x/bin/nvcc", "/store/nvcc/bin/nvcc")
        .set("CUDA_HOME", "/x");
    assert_eq!(find_toolkit(&machine).helpers["ptxas"].as_deref(), Some("/store/nvcc/bin/ptxas"));
}
