//! Where the editor keeps what was typed: a file in the user's state folder that nobody else may read.

use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result};

/// The history file, made if it is not there; `None` without a home folder.
pub fn file() -> Result<Option<PathBuf>> {
    let Some(folder) = super::state_folder() else { return Ok(None) };
    super::make_private(&folder)?;
    let path = folder.join("history");
    let mut options = std::fs::OpenOptions::new();
    let opened = options.append(true).create(true).mode(0o600).open(&path);
    opened
        .and_then(|file| file.set_permissions(std::fs::Permissions::from_mode(0o600)))
        .with_context(|| format!("cannot save the history in {}", path.display()))?;
    Ok(Some(path))
}
