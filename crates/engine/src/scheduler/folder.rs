//! The folder of saved conversations: what was left half written is removed, and what was used longest ago when there is
//! too much.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::xxh3_128;

use crate::session_file::{PARTIAL_PREFIX, PARTIAL_SUFFIX};

/// A file that nobody has written to for so long is given up.
const ABANDONED: Duration = Duration::from_secs(60);
const EXTENSION: &str = "session";
/// Hexadecimal digits of a conversation's hash.
const DIGITS: usize = 32;

/// The file of a conversation.
pub(super) fn name(conversation: &str) -> String {
    format!("{:0DIGITS$x}.{EXTENSION}", xxh3_128(conversation.as_bytes()))
}

/// Whether a file is one of a conversation: sessions that people named are theirs.
fn is_name(file: &str) -> bool {
    let hash = file.strip_suffix(EXTENSION).and_then(|rest| rest.strip_suffix('.'));
    hash.is_some_and(|hash| hash.len() == DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// What a folder may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most conversations.
    pub files: usize,
    /// Most bytes of all together; the newest conversation stays even if it has more.
    pub bytes: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { files: 1000, bytes: 16 << 30 }
    }
}

/// Removes what was not completed, and the oldest conversations beyond `limits`.
pub(super) fn prune(folder: &Path, limits: SessionLimits) -> io::Result<()> {
    let mut files: Vec<(SystemTime, u64, PathBuf)> = vec![];
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let partial = name.starts_with(PARTIAL_PREFIX) && name.ends_with(PARTIAL_SUFFIX);
        let whole = is_name(&name);
        if !partial && !whole {
            continue;
        }
        // Another server may have removed it.
        let Ok(metadata) = entry.metadata() else { continue };
        let modified = metadata.modified()?;
        if whole {
            files.push((modified, metadata.len(), entry.path()));
        } else if modified.elapsed().is_ok_and(|age| age > ABANDONED) {
            remove(&entry.path())?;
        }
    }
    files.sort_unstable_by(|a, b| b.cmp(a));
    let mut bytes = 0;
    for (index, (_, len, path)) in files.iter().enumerate() {
        bytes += len;
        if index > 0 && (index >= limits.files || bytes > limits.bytes) {
            remove(path)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes files of these names, ages in seconds and sizes; says which are left.
    fn left(files: &[(&str, u64, usize)], limits: SessionLimits) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, age, size) in files {
            let path = folder.path().join(name);
            fs::write(&path, vec![0; *size]).unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(*age)).unwrap();
        }
        prune(folder.path(), limits).unwrap();
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_oldest_go_and_what_was_left_half_written() {
        let [a, b, c] = ["a", "b", "c"].map(name);
        let [a, b, c] = [&*a, &*b, &*c];
        let files = [
            (a, 500, 10),
            (b, 100, 10),
            (c, 300, 10),
            ("mine.session", 800, 10),
            (".session-x.partial", 400, 10),
            (".session-y.partial", 1, 10),
            ("notes.txt", 900, 10),
        ];
        let rest = [".session-y.partial", "mine.session", "notes.txt"];
        for (count, bytes, kept) in
            [(9, 100, &[a, b, c][..]), (2, 100, &[b, c]), (9, 25, &[b, c]), (9, 5, &[b]), (0, 0, &[b])]
        {
            let mut expected: Vec<&str> = rest.iter().chain(kept).copied().collect();
            expected.sort_unstable();
            assert_eq!(left(&files, SessionLimits { files: count, bytes }), expected, "{count} {bytes}");
        }
    }
}
