//! The ladder of version sources.

use super::{RELEASE, find_toolkit, host};

/// Version of a toolkit whose files are `files` and whose compiler says 12.1.
fn of(files: &[(&str, &[u8])]) -> Option<(u32, u32)> {
    let mut machine =
        host().file("/x/bin/nvcc", "").set("CUDA_HOME", "/x").answers("/x/bin/nvcc", "--version", RELEASE);
    for (name, content) in files {
        machine = machine.bytes(&format!("/x/{name}"), content);
    }
    find_toolkit(&machine).version
}

const JSON: &[u8] = br#"{"cuda": {"version": "12.9.0"}, "cuda_nvcc": {"version": "12.8.61"}}"#;
const TEXT: &[u8] = b"CUDA Version 10.2.89\n";
const HEADER: &[u8] = b"/* */\n#  define CUDA_VERSION 13000\n";
const TARGET: &[u8] = b"#define CUDA_VERSION 12100\n";

#[test]
fn sources_in_order() {
    let all: [(&str, &[u8]); 4] = [
        ("version.json", JSON),
        ("version.txt", TEXT),
        ("include/cuda.h", HEADER),
        ("targets/x86_64-linux/include/cuda.h", TARGET),
    ];
    let expected = [(12, 8), (10, 2), (13, 0), (12, 10), (12, 1)];
    for (first, version) in expected.into_iter().enumerate() {
        assert_eq!(of(&all[first..]), Some(version), "from source {first}");
    }
}

#[test]
fn the_release_stands_in_for_a_missing_compiler_entry() {
    assert_eq!(of(&[("version.json", br#"{"cuda": {"version": "12.10.1"}}"#)]), Some((12, 10)));
    let odd = br#"{"cuda": {"version": "12.9.0"}, "cuda_nvcc": {"version": 12.8}}"#;
    assert_eq!(of(&[("version.json", odd)]), Some((12, 9)));
}

#[test]
fn a_broken_file_gives_way_to_the_next() {
    let broken: [&[u8]; 8] = [
        b"",
        b"{",
        b"[1, 2]",
        b"\"12.9\"",
        b"{\"cuda\": 12}",
        b"{\"cuda\": {\"version\": \"new\"}}",
        b"\xff\xfe",
        b"{}",
    ];
    for content in broken {
        assert_eq!(of(&[("version.json", content), ("version.txt", TEXT)]), Some((10, 2)), "{content:?}");
    }
    for content in [b"".as_slice(), b"CUDA Version x", b"\xff CUDA Version 9.0"] {
        assert_eq!(of(&[("version.txt", content), ("include/cuda.h", HEADER)]), Some((13, 0)));
    }
    for content in [
        b"".as_slice(),
        b"#define CUDA_VERSION x",
        b"#define CUDA_VERSION",
        b"#define CUDA_VERSION 0",
        b"\xff",
    ] {
        assert_eq!(of(&[("include/cuda.h", content)]), Some((12, 1)), "{content:?}");
    }
}

#[test]
fn an_unreadable_version_is_none_and_says_so() {
    for output in [None, Some("illegal instruction"), Some("release soon")] {
        let mut machine = host().file("/x/bin/nvcc", "").set("CUDA_HOME", "/x");
        if let Some(output) = output {
            machine = machine.answers("/x/bin/nvcc", "--version", output);
        }
        let toolkit = find_toolkit(&machine);
        assert_eq!((toolkit.version, toolkit.nvcc.as_deref()), (None, Some("/x/bin/nvcc")));
        assert!(toolkit.candidates[0].accepted && toolkit.candidates[0].hint.is_some());
    }
}

#[test]
fn no_process_is_started_when_a_file_answers() {
    let machine = host().file("/x/bin/nvcc", "").bytes("/x/version.txt", TEXT).set("CUDA_HOME", "/x");
    assert_eq!(find_toolkit(&machine).version, Some((10, 2)));
    assert!(machine.started.borrow().is_empty());
}
