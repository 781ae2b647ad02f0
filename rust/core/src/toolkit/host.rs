//! The only door to the machine: environment, files and processes go through [`Host`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What the search asks of a machine; each answer is "no" or none where the machine gives an error.
pub trait Host {
    /// Value of an environment variable, empty strings included.
    fn env(&self, name: &str) -> Option<String>;
    /// Whether `path`, links followed, is a file.
    fn is_file(&self, path: &Path) -> bool;
    /// Whether `path`, links followed, is a file that may be executed.
    fn is_executable(&self, path: &Path) -> bool;
    /// Whether `path`, links followed, is a folder.
    fn is_dir(&self, path: &Path) -> bool;
    /// Bytes of a file.
    fn read(&self, path: &Path) -> Option<Vec<u8>>;
    /// The absolute path without links; none if nothing is there.
    fn canonicalize(&self, path: &Path) -> Option<PathBuf>;
    /// Entries of a folder, sorted.
    fn list_dir(&self, path: &Path) -> Vec<PathBuf>;
    /// What a program printed on both streams, whatever its exit status; none if it did not start or end in time.
    fn run(&self, program: &Path, args: &[&str], timeout: Duration) -> Option<String>;
}

/// The machine this process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealHost;

#[allow(clippy::disallowed_methods, reason = "this is the door that the other code goes through")]
impl Host for RealHost {
    fn env(&self, name: &str) -> Option<String> {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    }

    fn is_file(&self, path: &Path) -> bool {
        path.is_file()
    }

    #[cfg(unix)]
    fn is_executable(&self, path: &Path) -> bool {
        use std::os::unix::fs::PermissionsExt;
        path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    }

    #[cfg(not(unix))]
    fn is_executable(&self, path: &Path) -> bool {
        path.is_file()
    }

    fn is_dir(&self, path: &Path) -> bool {
        path.is_dir()
    }

    fn read(&self, path: &Path) -> Option<Vec<u8>> {
        std::fs::read(path).ok()
    }

    fn canonicalize(&self, path: &Path) -> Option<PathBuf> {
        path.canonicalize().ok()
    }

    fn list_dir(&self, path: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    }

    fn run(&self, program: &Path, args: &[&str], timeout: Duration) -> Option<String> {
        let deadline = Instant::now() + timeout;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .ok()?;
        let output = collect(&mut child, deadline);
        // Also the way out of a time limit: ending a process that has ended is harmless.
        let _ = child.kill();
        let _ = child.wait();
        output
    }
}

/// Both streams up to their end, or none at the deadline.
///
/// The readers are threads that report through a channel: a grandchild which outlives the time limit keeps the
/// pipes open, and joining the readers would wait for it.
fn collect(child: &mut Child, deadline: Instant) -> Option<String> {
    let (sender, receiver) = mpsc::channel();
    let streams: [Box<dyn Read + Send>; 2] = [Box::new(child.stdout.take()?), Box::new(child.stderr.take()?)];
    for (index, mut stream) in streams.into_iter().enumerate() {
        let sender = sender.clone();
        let read = move || {
            let mut bytes = Vec::new();
            let complete = stream.read_to_end(&mut bytes).is_ok();
            let _ = sender.send((index, complete.then_some(bytes)));
        };
        thread::Builder::new().spawn(read).ok()?;
    }
    let mut texts = [String::new(), String::new()];
    for _ in 0..2 {
        let left = deadline.saturating_duration_since(Instant::now());
        let (index, bytes) = receiver.recv_timeout(left).ok()?;
        texts[index] = String::from_utf8_lossy(&bytes?).into_owned();
    }
    Some(texts.join("\n"))
}
