//! The demo: a small trained model that comes with the library.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::io::atomic_file;
use crate::{Error, Result};

/// The demo model, GGUF.
const DEMO: &[u8] = include_bytes!("../../../models/demo/demo.gguf");
/// Its XXH3, 128 bits: a copy is told by it without bringing 15 MiB of the program into memory.
const DIGEST: u128 = 0xe97b_97c7_7ef6_2a4c_b1bb_f779_9242_404f;

/// Unpacks the demo model into the user's cache folder unless it is there; returns its path.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn unpack() -> Result<PathBuf> {
    let folder = cache_home().unwrap_or_else(std::env::temp_dir).join("moeflux");
    let path = folder.join(format!("demo-{}.gguf", env!("CARGO_PKG_VERSION")));
    // Read whole: a copy that was damaged or belongs to another build is replaced.
    if digest(&path).is_ok_and(|found| found == DIGEST) {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder)
        .and_then(|()| atomic_file::write(&path, DEMO))
        .map_err(|source| Error::Io { action: "unpack the demo model to", path: path.clone(), source })?;
    Ok(path)
}

/// What a file holds, a piece at a time.
fn digest(path: &Path) -> io::Result<u128> {
    let (mut file, mut digest, mut piece) = (File::open(path)?, Xxh3::new(), vec![0; 1 << 18]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(digest.digest128()),
            length => digest.update(&piece[..length]),
        }
    }
}

/// `$XDG_CACHE_HOME`, or `~/.cache`.
pub fn cache_home() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    given
        .filter(|dir| dir.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(Path::new(".cache"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_model() {
        assert_eq!(xxhash_rust::xxh3::xxh3_128(DEMO), DIGEST, "what to write here is on the left");
    }

    #[test]
    fn a_copy_is_told_by_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo.gguf");
        std::fs::write(&path, DEMO).unwrap();
        assert_eq!(digest(&path).unwrap(), DIGEST);
        let mut damaged = DEMO.to_vec();
        damaged[DEMO.len() / 2] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        assert_ne!(digest(&path).unwrap(), DIGEST);
        assert!(digest(&folder.path().join("nothing")).is_err());
    }
}
