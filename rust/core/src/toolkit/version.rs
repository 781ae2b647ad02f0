//! Version of a toolkit, from its files before its compiler: starting a process is slow, and may be forbidden.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::host::Host;
use super::install::header_folders;

/// Major and minor number; pairs compare as numbers, so 12.10 is newer than 12.9.
pub type Version = (u32, u32);

/// How long a compiler may take to say who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Version of the toolkit in `root`; a file that is missing or broken gives way to the next source.
pub(super) fn version_of(host: &dyn Host, root: &Path, nvcc: &Path) -> Option<Version> {
    from_json(host, &root.join("version.json"))
        .or_else(|| from_text(host, &root.join("version.txt")))
        .or_else(|| {
            header_folders(host, root).iter().find_map(|folder| from_header(host, &folder.join("cuda.h")))
        })
        .or_else(|| from_compiler(host, nvcc))
}

/// The compiler's own number first: the release number of the whole can differ from it.
fn from_json(host: &dyn Host, path: &Path) -> Option<Version> {
    let components: Value = serde_json::from_slice(&host.read(path)?).ok()?;
    ["cuda_nvcc", "cuda"].iter().find_map(|name| parse(components.get(name)?.get("version")?.as_str()?))
}

fn from_text(host: &dyn Host, path: &Path) -> Option<Version> {
    parse(read_text(host, path)?.split_once("CUDA Version ")?.1)
}

fn from_header(host: &dyn Host, path: &Path) -> Option<Version> {
    let text = read_text(host, path)?;
    let number = text.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("define")?;
        let mut words = rest.split_whitespace();
        (words.next()? == "CUDA_VERSION").then(|| words.next()?.parse::<u32>().ok())?
    })?;
    (number >= 1000).then_some((number / 1000, number % 1000 / 10))
}

pub(super) fn from_compiler(host: &dyn Host, nvcc: &Path) -> Option<Version> {
    parse(host.run(nvcc, &["--version"], PATIENCE)?.split_once("release ")?.1)
}

fn read_text(host: &dyn Host, path: &Path) -> Option<String> {
    String::from_utf8(host.read(path)?).ok()
}

/// The first two numbers of a dotted version, whatever follows them.
fn parse(text: &str) -> Option<Version> {
    let (major, rest) = text.trim_start().split_once('.')?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    Some((major.parse().ok()?, rest[..end].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn takes_the_first_two_numbers() {
        assert_eq!(parse("12.9.41"), Some((12, 9)));
        assert_eq!(parse(" 12.10\n"), Some((12, 10)));
        assert_eq!(parse("12.1, V12.1.66"), Some((12, 1)));
        assert!(parse("12.10") > parse("12.9") && parse("13.0") > parse("12.9"));
    }

    #[test]
    fn refuses_what_is_no_version() {
        for text in ["", "12", "12.", ".9", "twelve.nine", "-1.2", "99999999999.1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
