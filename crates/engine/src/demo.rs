//! The demo: a small trained model that comes with the library.

use std::path::{Path, PathBuf};

use crate::io::atomic_file;
use crate::{Error, Result};

/// The demo model, GGUF.
const DEMO: &[u8] = include_bytes!("../../../models/demo/demo.gguf");

/// Unpacks the demo model into the user's cache folder unless it is there; returns its path.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn unpack() -> Result<PathBuf> {
    let folder = cache_home().unwrap_or_else(std::env::temp_dir).join("moeflux");
    let path = folder.join(format!("demo-{}.gguf", env!("CARGO_PKG_VERSION")));
    // Compared whole: a copy that was damaged or belongs to another build is replaced.
    if std::fs::read(&path).is_ok_and(|bytes| bytes == DEMO) {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder)
        .and_then(|()| atomic_file::write(&path, DEMO))
        .map_err(|source| Error::Io { action: "unpack the demo model to", path: path.clone(), source })?;
    Ok(path)
}

/// `$XDG_CACHE_HOME`, or `~/.cache`.
pub fn cache_home() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    given
        .filter(|dir| dir.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(Path::new(".cache"))))
}
