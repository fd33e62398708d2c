//! The kernels: machine code for compute capability 9.x, and PTX, the driver's portable assembly, for all others.
//!
//! `tools/cuda/build_kernels.py` compiles the units for both. PTX is for compute capability 8.0, one text a kernel; the
//! driver of whatever GPU is there translates a kernel when it is first used and keeps the result in its own cache on
//! disk. Machine code, one image a unit, needs no translation, and may use what only its GPUs have. So a binary needs no
//! toolkit, and start-up pays for the kernels that a model uses only.

use std::collections::HashMap;
use std::ops::Range;

use crate::{Error, Result};

/// Deflated: a line `//# fingerprint of the sources`, then for each kernel a line `//@ name` and its text.
const TEXTS: &[u8] = include_bytes!("kernels.ptx.z");
/// Deflated: a line `//# fingerprint of the sources`, then for each unit a line `//@ length names of its kernels` and so
/// many bytes.
const IMAGES: &[u8] = include_bytes!("kernels.sm_90.z");
/// The major compute capability that machine code is for.
const IMAGES_MAJOR: i32 = 9;
const MARK: &str = "//@ ";

/// What a module is made of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ImageId {
    /// Machine code: where it lies.
    Code(Range<usize>),
    /// Text of a kernel.
    Text(String),
}

/// Images of kernels by name.
pub(super) struct Archive {
    code: Vec<u8>,
    /// Where the machine code of each kernel's unit is.
    units: HashMap<String, Range<usize>>,
    /// Inflated when first needed.
    texts: Option<Texts>,
}

struct Texts {
    all: String,
    places: HashMap<String, Range<usize>>,
}

fn damaged() -> Error {
    Error::Device { reason: "the compiled kernels are damaged".into() }
}

fn inflate(bytes: &[u8]) -> Result<Vec<u8>> {
    miniz_oxide::inflate::decompress_to_vec_zlib(bytes).map_err(|_| damaged())
}

impl Archive {
    /// The kernels that were compiled into the binary, for a GPU of a major compute capability.
    pub(super) fn open(major: i32) -> Result<Self> {
        let (mut code, mut units) = (vec![], HashMap::new());
        if major == IMAGES_MAJOR {
            code = inflate(IMAGES)?;
            units = units_of(&code).ok_or_else(damaged)?;
        }
        Ok(Self { code, units, texts: None })
    }

    /// Whether there is machine code for the GPU.
    pub(super) fn has_code(&self) -> bool {
        !self.units.is_empty()
    }

    fn texts(&mut self) -> Result<&Texts> {
        if self.texts.is_none() {
            let all = String::from_utf8(inflate(TEXTS)?).map_err(|_| damaged())?;
            let mut places = HashMap::new();
            let starts: Vec<usize> = all.match_indices(MARK).map(|(start, _)| start).collect();
            let ends = starts.iter().skip(1).copied().chain([all.len()]);
            for (start, end) in starts.iter().zip(ends) {
                let name = start + MARK.len();
                let line = name + all[name..end].find('\n').unwrap_or(end - name);
                places.insert(all[name..line].to_owned(), line..end);
            }
            self.texts = Some(Texts { all, places });
        }
        self.texts.as_ref().ok_or_else(damaged)
    }

    /// Number of kernels, and the targets that they were compiled for, as in `sm_80`.
    pub(super) fn summary(&mut self) -> Result<(usize, Vec<String>)> {
        let texts = self.texts()?;
        let lines = texts.all.lines().filter_map(|line| line.strip_prefix(".target "));
        let mut targets: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
        targets.sort();
        targets.dedup();
        Ok((texts.places.len(), targets))
    }

    /// The machine code and the text of a kernel, as far as they are there. Texts are looked for only where there is no
    /// machine code, or where it cannot be loaded.
    pub(super) fn find(&mut self, kernel: &str) -> Result<[Option<ImageId>; 2]> {
        let code = self.units.get(kernel).map(|range| ImageId::Code(range.clone()));
        let text = Some(ImageId::Text(kernel.to_owned()));
        let text = if code.is_some() || self.texts()?.places.contains_key(kernel) { text } else { None };
        Ok([code, text])
    }

    /// An image as the driver takes it: a text ends with a zero byte.
    pub(super) fn image(&mut self, id: ImageId) -> Result<Vec<u8>> {
        match id {
            ImageId::Code(range) => Ok(self.code[range].to_vec()),
            ImageId::Text(kernel) => {
                let texts = self.texts()?;
                let place = texts.places.get(&kernel);
                let place =
                    place.ok_or_else(|| Error::Device { reason: format!("there is no kernel {kernel}") })?;
                let mut text = texts.all.as_bytes()[place.clone()].to_vec();
                text.push(0);
                Ok(text)
            }
        }
    }
}

/// Where each kernel's unit is in the archive of machine code.
fn units_of(code: &[u8]) -> Option<HashMap<String, Range<usize>>> {
    let line = |from: usize| {
        let end = from + code[from..].iter().position(|byte| *byte == b'\n')?;
        Some((std::str::from_utf8(&code[from..end]).ok()?, end + 1))
    };
    let mut units = HashMap::new();
    let (_, mut at) = line(0)?;
    while at < code.len() {
        let (head, start) = line(at)?;
        let mut words = head.strip_prefix(MARK)?.split(' ');
        let end = start.checked_add(words.next()?.parse().ok()?).filter(|end| *end <= code.len())?;
        units.extend(words.map(|kernel| (kernel.to_owned(), start..end)));
        at = end;
    }
    Some(units)
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
        let expected = format!("//# {}", fingerprint(&kernels));
        let mut archive = Archive::open(IMAGES_MAJOR).unwrap();
        assert!(archive.code.starts_with(expected.as_bytes()), "run tools/cuda/build_kernels.py");
        let head = archive.texts().unwrap().all.lines().next().unwrap();
        assert_eq!(head, expected, "run tools/cuda/build_kernels.py");
    }

    #[test]
    fn every_kernel_has_its_images() {
        let mut archive = Archive::open(IMAGES_MAJOR).unwrap();
        let names: Vec<String> = archive.texts().unwrap().places.keys().cloned().collect();
        assert!(names.len() > 50, "{} kernels", names.len());
        assert_eq!(names.len(), archive.units.len());
        for name in names {
            let [code, text] = archive.find(&name).unwrap();
            let code = archive.image(code.expect("machine code")).unwrap();
            assert!(code.starts_with(b"\x7fELF"), "{name}");
            let text = String::from_utf8(archive.image(text.expect("text")).unwrap()).unwrap();
            assert!(text.contains(&format!(".entry {name}(")), "{name}");
            assert!(text.starts_with("\n.version 8.0\n.target sm_80\n"), "{name}: {text:.60}");
            assert!(text.ends_with('\0'), "{name}");
        }
        assert_eq!(archive.find("absent").unwrap(), [None, None]);
        assert_eq!(Archive::open(8).unwrap().find("add").unwrap()[0], None);
    }
}
