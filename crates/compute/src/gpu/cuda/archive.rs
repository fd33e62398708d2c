//! The kernels as PTX, the driver's portable assembly, one text a kernel.
//!
//! `tools/cuda/build_kernels.py` compiles the units once for compute capability 8.0; the driver of whatever GPU is
//! there translates a kernel when it is first used and keeps the result in its own cache on disk. So a binary needs no
//! toolkit and start-up pays for the kernels that a model uses only.

use std::collections::HashMap;

use crate::{Error, Result};

/// Deflated: a line `//# fingerprint of the sources`, then for each kernel a line `//@ name` and its text.
const ARCHIVE: &[u8] = include_bytes!("kernels.ptx.z");
const MARK: &str = "//@ ";

/// Texts of kernels by name.
pub(super) struct Archive {
    text: String,
    /// Where each kernel's text is.
    places: HashMap<String, std::ops::Range<usize>>,
}

impl Archive {
    /// The kernels that were compiled into the binary.
    pub(super) fn open() -> Result<Self> {
        let text = miniz_oxide::inflate::decompress_to_vec_zlib(ARCHIVE).ok();
        let text = text.and_then(|bytes| String::from_utf8(bytes).ok());
        let text = text.ok_or_else(|| Error::Device { reason: "the compiled kernels are damaged".into() })?;
        let mut places = HashMap::new();
        let starts: Vec<usize> = text.match_indices(MARK).map(|(start, _)| start).collect();
        let ends = starts.iter().skip(1).copied().chain([text.len()]);
        for (start, end) in starts.iter().zip(ends) {
            let name = start + MARK.len();
            let line = name + text[name..end].find('\n').unwrap_or(end - name);
            places.insert(text[name..line].to_owned(), line..end);
        }
        Ok(Self { text, places })
    }

    /// The PTX of a kernel.
    pub(super) fn get(&self, kernel: &str) -> Option<&str> {
        self.places.get(kernel).map(|range| &self.text[range.clone()])
    }

    /// Number of kernels, and the targets that they were compiled for, as in `sm_80`.
    pub(super) fn summary(&self) -> (usize, Vec<String>) {
        let lines = self.text.lines().filter_map(|line| line.strip_prefix(".target "));
        let mut targets: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
        targets.sort();
        targets.dedup();
        (self.places.len(), targets)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// As `tools/cuda/build_kernels.py` computes it: 64-bit FNV-1a of names and texts.
    fn fingerprint(kernels: &Path) -> String {
        let mut files = vec![];
        for folder in ["", "cuda/"] {
            for entry in fs::read_dir(kernels.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                if folder == "cuda/" || name.ends_with(".h") {
                    files.push(format!("{folder}{name}"));
                }
            }
        }
        files.sort();
        let mut value = 0xcbf2_9ce4_8422_2325u64;
        for name in files {
            let text = fs::read(kernels.join(&name)).unwrap();
            for byte in name.bytes().chain(*b"\n").chain(text) {
                value = (value ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        format!("{value:016x}")
    }

    #[test]
    fn is_that_of_the_sources() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/kernels");
        let archive = Archive::open().unwrap();
        let head = archive.text.lines().next().unwrap();
        assert_eq!(head, format!("//# {}", fingerprint(&kernels)), "run tools/cuda/build_kernels.py");
    }

    #[test]
    fn every_kernel_has_its_text() {
        let archive = Archive::open().unwrap();
        assert!(archive.places.len() > 50, "{} kernels", archive.places.len());
        for name in archive.places.keys() {
            let text = archive.get(name).unwrap();
            assert!(text.contains(&format!(".entry {name}(")), "{name}");
            assert!(text.starts_with("\n.version 8.0\n.target sm_80\n"), "{name}: {:.60}", text);
        }
        assert!(archive.get("absent").is_none());
    }
}
