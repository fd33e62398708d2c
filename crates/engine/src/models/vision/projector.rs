//! Finding the projector of a GGUF model: the file `mmproj*.gguf` that lies beside it.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Parts of names, those that are taken first: 16-bit weights before smaller and larger ones.
const PREFERRED: [&str; 4] = ["bf16", "f16", "q8_0", "f32"];

/// Whether a file, by its name, is a projector.
pub(crate) fn is_projector(name: &str) -> bool {
    let name = name.to_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}

/// Of the names of projectors, the one to take.
pub(crate) fn preferred<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rank = |name: &str| {
        let name = name.to_lowercase();
        PREFERRED.iter().position(|part| name.contains(part)).unwrap_or(PREFERRED.len())
    };
    names.min_by_key(|name| (rank(name), *name))
}

/// The projector in the folder of the GGUF file `model`, or in the one around it if that is the snapshot of a repository.
///
/// # Errors
/// [`Error::Io`] if a folder cannot be listed.
pub(crate) fn beside(model: &Path) -> Result<Option<PathBuf>> {
    let around = model.parent().unwrap_or(Path::new(""));
    let own = if around.as_os_str().is_empty() { Path::new(".") } else { around };
    if let Some(found) = in_folder(own)? {
        return Ok(Some(found));
    }
    let outer = own.parent().filter(|outer| outer.parent().is_some_and(|all| all.ends_with("snapshots")));
    outer.map_or(Ok(None), in_folder)
}

fn in_folder(folder: &Path) -> Result<Option<PathBuf>> {
    let io = |source| Error::Io { action: "list", path: folder.to_owned(), source };
    let mut names = vec![];
    for item in std::fs::read_dir(folder).map_err(io)? {
        let name = item.map_err(io)?.file_name();
        names.extend(name.into_string().ok().filter(|name| is_projector(name)));
    }
    Ok(preferred(names.iter().map(String::as_str)).map(|name| folder.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_projector_is_found_beside_its_model() {
        let folder = tempfile::tempdir().unwrap();
        let snapshot = folder.path().join("snapshots/0123");
        let inner = snapshot.join("BF16");
        std::fs::create_dir_all(&inner).unwrap();
        let model = inner.join("m-BF16.gguf");
        std::fs::write(&model, b"").unwrap();
        let check = |expected: Option<PathBuf>| assert_eq!(beside(&model).unwrap(), expected);
        check(None);
        for name in ["mmproj-F32.gguf", "m-mmproj-F16.gguf"] {
            std::fs::write(snapshot.join(name), b"").unwrap();
        }
        check(Some(snapshot.join("m-mmproj-F16.gguf")));
        std::fs::write(inner.join("mmproj-Q8_0.gguf"), b"").unwrap();
        check(Some(inner.join("mmproj-Q8_0.gguf")));
        // A folder around others is not looked at.
        let far = folder.path().join("models/m");
        std::fs::create_dir_all(&far).unwrap();
        std::fs::write(folder.path().join("models/mmproj.gguf"), b"").unwrap();
        assert_eq!(beside(&far.join("m.gguf")).unwrap(), None);
    }
}
