//! MODEL arguments: a path, `demo` (the small trained model that the binary carries), or a model of the hub.

use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};

use crate::atomic_file;
use crate::hub::{self, HubId};

/// The demo model, GGUF.
const DEMO: &[u8] = include_bytes!("../../../models/demo/demo.gguf");

/// A MODEL argument as it was given.
#[derive(Debug, Clone)]
pub struct ModelArg(String);

impl FromStr for ModelArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ModelArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ModelArg {
    /// Where the checkpoint is; what is not there yet is unpacked or downloaded first. `demo` is the model in the binary
    /// (`./demo` a file of that name); anything else that exists as a path is that path, whatever it looks like.
    pub fn path(&self) -> Result<PathBuf> {
        if self.0 == "demo" {
            return unpack_demo();
        }
        let path = PathBuf::from(&self.0);
        if path.exists() {
            return Ok(path);
        }
        match HubId::parse(&self.0) {
            Some(id) => hub::pull(&id, &hub::Settings::from_environment()),
            None => Ok(path),
        }
    }
}

/// Unpacks the demo model into the user's cache folder unless it is there.
fn unpack_demo() -> Result<PathBuf> {
    let folder = cache_home().unwrap_or_else(std::env::temp_dir).join("moeflux");
    let path = folder.join(format!("demo-{}.gguf", env!("CARGO_PKG_VERSION")));
    // Compared whole: a copy that was damaged or belongs to another build is replaced.
    if std::fs::read(&path).is_ok_and(|bytes| bytes == DEMO) {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder)
        .and_then(|()| atomic_file::write(&path, DEMO))
        .with_context(|| format!("cannot unpack the demo model to {}", path.display()))?;
    Ok(path)
}

/// `$XDG_CACHE_HOME`, or `~/.cache`.
pub fn cache_home() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    given
        .filter(|dir| dir.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(Path::new(".cache"))))
}
