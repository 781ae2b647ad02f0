//! A machine in memory: files, links, variables and programs as a test states them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::host::Host;

const MAX_LINKS: usize = 40;

#[derive(Default)]
pub(super) struct FakeHost {
    env: BTreeMap<String, String>,
    files: BTreeMap<PathBuf, Vec<u8>>,
    plain: BTreeSet<PathBuf>,
    folders: BTreeSet<PathBuf>,
    links: BTreeMap<PathBuf, PathBuf>,
    outputs: BTreeMap<(PathBuf, String), String>,
    /// Every program that was started, with its first argument.
    pub started: RefCell<Vec<(PathBuf, String)>>,
}

impl FakeHost {
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    pub fn folder(mut self, path: &str) -> Self {
        self.folders.extend(Path::new(path).ancestors().map(Path::to_path_buf));
        self
    }

    pub fn bytes(mut self, path: &str, content: &[u8]) -> Self {
        self.files.insert(path.into(), content.into());
        let parent = Path::new(path).parent().unwrap().to_string_lossy().into_owned();
        self.folder(&parent)
    }

    pub fn file(self, path: &str, content: &str) -> Self {
        self.bytes(path, content.as_bytes())
    }

    /// A file that may not be executed.
    pub fn plain(mut self, path: &str) -> Self {
        self.plain.insert(path.into());
        self.file(path, "")
    }

    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.links.insert(path.into(), target.into());
        let parent = Path::new(path).parent().unwrap().to_string_lossy().into_owned();
        self.folder(&parent)
    }

    /// What `program` prints when `argument` is its first; without this, it does not answer in time.
    pub fn answers(mut self, program: &str, argument: &str, output: &str) -> Self {
        self.outputs.insert((program.into(), argument.into()), output.into());
        self
    }

    /// Resolves one component at a time, as the system does.
    fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let mut left: Vec<PathBuf> =
            path.components().rev().map(|part| PathBuf::from(part.as_os_str())).collect();
        let mut done = PathBuf::new();
        let mut followed = 0;
        while let Some(part) = left.pop() {
            if part.components().next() == Some(Component::ParentDir) {
                done.pop();
                continue;
            }
            let next = done.join(&part);
            if let Some(target) = self.links.get(&next) {
                followed += 1;
                if followed > MAX_LINKS {
                    return None;
                }
                left.extend(target.components().rev().map(|part| PathBuf::from(part.as_os_str())));
            } else {
                done = next;
            }
        }
        (self.files.contains_key(&done) || self.folders.contains(&done)).then_some(done)
    }
}

impl Host for FakeHost {
    fn env(&self, name: &str) -> Option<String> {
        self.env.get(name).cloned()
    }

    fn is_file(&self, path: &Path) -> bool {
        self.resolve(path).is_some_and(|real| self.files.contains_key(&real))
    }

    fn is_executable(&self, path: &Path) -> bool {
        self.resolve(path).is_some_and(|real| self.files.contains_key(&real) && !self.plain.contains(&real))
    }

    fn is_dir(&self, path: &Path) -> bool {
        self.resolve(path).is_some_and(|real| self.folders.contains(&real))
    }

    fn read(&self, path: &Path) -> Option<Vec<u8>> {
        self.files.get(&self.resolve(path)?).cloned()
    }

    fn canonicalize(&self, path: &Path) -> Option<PathBuf> {
        self.resolve(path)
    }

    fn list_dir(&self, path: &Path) -> Vec<PathBuf> {
        let Some(real) = self.resolve(path) else { return Vec::new() };
        let entries = self.files.keys().chain(&self.folders).chain(self.links.keys());
        let names: BTreeSet<_> = entries.filter(|entry| entry.parent() == Some(&real)).cloned().collect();
        names.into_iter().collect()
    }

    fn run(&self, program: &Path, args: &[&str], _timeout: Duration) -> Option<String> {
        let key = (program.to_path_buf(), args[0].to_string());
        self.started.borrow_mut().push(key.clone());
        self.outputs.get(&key).cloned()
    }
}
