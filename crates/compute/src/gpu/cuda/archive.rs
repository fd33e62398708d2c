//! The kernels as PTX, the driver's portable assembly, one text a kernel.
//!
//! `tools/cuda/build_kernels.py` compiles the units once for compute capability 8.0; the driver of whatever GPU is
//! there translates a kernel when it is first used and keeps the result in its own cache on disk. So a binary needs no
//! toolkit and start-up pays for the kernels that a model uses only.

use std::collections::HashMap;

use crate::{Error, Result};

/// Deflated: for each kernel a line `//@ name`, then its text.
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
}
