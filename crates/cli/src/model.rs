//! MODEL arguments: a path, or `demo`, the small trained model that the binary carries.

use std::path::{Path, PathBuf};

use crate::atomic_file;

/// The demo model, GGUF.
const DEMO: &[u8] = include_bytes!("../../../models/demo/demo.gguf");

/// The path that a MODEL argument stands for; the demo is unpacked into the user's cache folder the first time.
pub fn parse(text: &str) -> Result<PathBuf, String> {
    if text != "demo" || Path::new(text).exists() {
        return Ok(text.into());
    }
    let home = || std::env::home_dir().map(|home| home.join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let folder = cache.or_else(home).unwrap_or_else(std::env::temp_dir).join("moeflux");
    let path = folder.join(format!("demo-{}.gguf", env!("CARGO_PKG_VERSION")));
    // Compared whole: a copy that was damaged or belongs to another build is replaced.
    if std::fs::read(&path).is_ok_and(|bytes| bytes == DEMO) {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder)
        .and_then(|()| atomic_file::write(&path, DEMO))
        .map_err(|error| format!("cannot unpack the demo model to {}: {error}", path.display()))?;
    Ok(path)
}
