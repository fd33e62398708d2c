//! The kernels: machine code for compute capability 9.x, and PTX, the driver's portable assembly, for all others.
//!
//! `tools/cuda/build_kernels.py` compiles every unit for both. PTX is for compute capability 8.0, one text a kernel; the
//! driver of whatever GPU is there translates a kernel when it is first used and keeps the result in its own cache on
//! disk. Machine code, one image a unit, needs no translation, and may use what only its GPUs have. So a binary needs no
//! toolkit, and start-up pays for the kernels that a model uses only: a unit is inflated when one of its kernels is asked
//! for.

use std::collections::HashMap;

use crate::{Error, Result};

/// A unit of kernels: its row of the index, and its files.
struct Unit {
    name: &'static str,
    /// Of the sources: see the test.
    #[cfg(test)]
    fingerprint: &'static str,
    kernels: &'static [&'static str],
    /// Deflated: for each kernel a line `//@ name` and its text.
    texts: &'static [u8],
    /// Deflated machine code.
    code: &'static [u8],
}

macro_rules! unit {
    ($name:literal, $fingerprint:literal, [$($kernel:literal),* $(,)?]) => {
        Unit {
            name: $name,
            #[cfg(test)]
            fingerprint: $fingerprint,
            kernels: &[$($kernel),*],
            texts: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu/cuda/archives/ptx/", $name, ".z")),
            code: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu/cuda/archives/sm_90/", $name, ".z")),
        }
    };
}

const UNITS: &[Unit] = include!("archives/index.rs");
/// The major compute capability that machine code is for.
const CODE_MAJOR: i32 = 9;
const MARK: &str = "//@ ";

/// What a module is made of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ImageId {
    /// Machine code of a unit, by its name.
    Code(&'static str),
    /// Text of a kernel.
    Text(String),
}

/// Images of kernels by name.
pub(super) struct Archive {
    /// Whether there is machine code for the GPU.
    has_code: bool,
    units: HashMap<&'static str, &'static Unit>,
    /// Units by kernel.
    owners: HashMap<&'static str, &'static Unit>,
    /// Inflated texts of the units that were asked for.
    texts: HashMap<&'static str, String>,
}

fn damaged(unit: &Unit) -> Error {
    Error::Device { reason: format!("the compiled kernels of {} are damaged", unit.name) }
}

fn inflate(unit: &Unit, bytes: &[u8]) -> Result<Vec<u8>> {
    miniz_oxide::inflate::decompress_to_vec_zlib(bytes).map_err(|_| damaged(unit))
}

/// The text of a kernel among those of its unit.
fn text_of<'a>(texts: &'a str, kernel: &str) -> Option<&'a str> {
    let named = texts.split(MARK).find_map(|part| part.strip_prefix(kernel)?.strip_prefix('\n'))?;
    Some(named)
}

impl Archive {
    /// The kernels that were compiled into the binary, for a GPU of a major compute capability.
    pub(super) fn open(major: i32) -> Self {
        Self {
            has_code: major == CODE_MAJOR,
            units: UNITS.iter().map(|unit| (unit.name, unit)).collect(),
            owners: UNITS
                .iter()
                .flat_map(|unit| unit.kernels.iter().map(move |kernel| (*kernel, unit)))
                .collect(),
            texts: HashMap::new(),
        }
    }

    /// Whether there is machine code for the GPU.
    pub(super) fn has_code(&self) -> bool {
        self.has_code
    }

    fn texts(&mut self, unit: &'static Unit) -> Result<&str> {
        if !self.texts.contains_key(unit.name) {
            let all = String::from_utf8(inflate(unit, unit.texts)?).map_err(|_| damaged(unit))?;
            self.texts.insert(unit.name, all);
        }
        Ok(&self.texts[unit.name])
    }

    /// Number of kernels, and the targets that they were compiled for, as in `sm_80`.
    pub(super) fn summary(&mut self) -> Result<(usize, Vec<String>)> {
        let mut targets = vec![];
        for unit in UNITS {
            let lines = self.texts(unit)?.lines().filter_map(|line| line.strip_prefix(".target "));
            targets.extend(lines.map(|line| line.trim().to_owned()));
        }
        targets.sort();
        targets.dedup();
        Ok((self.owners.len(), targets))
    }

    /// The machine code and the text of a kernel, as far as they are there.
    pub(super) fn find(&self, kernel: &str) -> [Option<ImageId>; 2] {
        let unit = self.owners.get(kernel);
        let code = unit.filter(|_| self.has_code).map(|unit| ImageId::Code(unit.name));
        [code, unit.map(|_| ImageId::Text(kernel.to_owned()))]
    }

    /// An image as the driver takes it: a text ends with a zero byte.
    pub(super) fn image(&mut self, id: &ImageId) -> Result<Vec<u8>> {
        let absent = |what: &str| Error::Device { reason: format!("there is no kernel {what}") };
        match id {
            ImageId::Code(name) => {
                let unit = self.units.get(name).ok_or_else(|| absent(name))?;
                inflate(unit, unit.code)
            }
            ImageId::Text(kernel) => {
                let unit = *self.owners.get(kernel.as_str()).ok_or_else(|| absent(kernel))?;
                let text = text_of(self.texts(unit)?, kernel).ok_or_else(|| damaged(unit))?;
                let mut text = text.as_bytes().to_vec();
                text.push(0);
                Ok(text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::gpu::encodings::{self, FastPath};

    fn kernels() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/kernels")
    }

    /// A file of kernels and what it includes for CUDA, each once.
    fn included(file: &str, seen: &mut Vec<String>) {
        if seen.iter().any(|known| known == file) {
            return;
        }
        seen.push(file.to_owned());
        for line in fs::read_to_string(kernels().join(file)).unwrap().lines() {
            let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            let Some(name) = name else { continue };
            let beside = Path::new(file).with_file_name(name);
            let beside = beside.to_str().unwrap();
            let name = if kernels().join(beside).exists() { beside } else { name };
            if !name.contains("emulator/") && !name.contains("metal/") {
                included(name, seen);
            }
        }
    }

    /// A text without comments, and without space that means nothing, as `tools/cuda/build_kernels.py` makes it.
    fn essence(text: &str) -> String {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_operator = |c: char| "+-*/%&|^<>=!:.#".contains(c);
        let mut lines = vec![String::new()];
        for line in text.replace("\\\n", " ").lines() {
            let line = line.split("//").next().unwrap_or("");
            let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
            if line.starts_with('#') {
                lines.extend([line, String::new()]);
            } else if !line.is_empty() {
                let code = lines.last_mut().unwrap();
                *code += if code.is_empty() { "" } else { " " };
                *code += &line;
            }
        }
        let tight = |line: String| {
            if line.starts_with('#') {
                return line;
            }
            let mut out = String::new();
            let mut chars = line.chars().peekable();
            while let Some(c) = chars.next() {
                let (last, next) = (out.chars().last().unwrap_or(' '), *chars.peek().unwrap_or(&' '));
                let needed = is_word(last) && is_word(next) || is_operator(last) && is_operator(next);
                if c != ' ' || needed {
                    out.push(c);
                }
            }
            out
        };
        let lines: Vec<String> = lines.into_iter().filter(|line| !line.is_empty()).map(tight).collect();
        lines.join("\n")
    }

    /// As `compiled_from` of `tools/cuda/build_kernels.py` gives it.
    fn compiled_from(file: &str, encoding: Option<&str>) -> String {
        let mut text = fs::read_to_string(kernels().join(file)).unwrap();
        if let Some(own) = encoding {
            let mut blocks = text.split("template <>\nstruct Encoding<");
            let mut kept = blocks.next().unwrap().to_owned();
            for block in blocks {
                let (of, rest) = block.split_once('>').unwrap();
                if of == own.to_uppercase() {
                    kept += "template <>\nstruct Encoding<";
                    kept += block;
                } else {
                    kept += rest.split_once("\n};\n").unwrap().1;
                }
            }
            text = kept;
        }
        let text = essence(&text);
        if !file.ends_with("encodings.h") {
            return text;
        }
        let mut rows = text.split("X(");
        let mut out = rows.next().unwrap().to_owned();
        for row in rows {
            let (columns, rest) = row.split_once(')').unwrap();
            let columns: Vec<&str> = columns.split(", ").collect();
            let kept = if columns.len() == 7 { &columns[..5] } else { &columns[..] };
            out += &format!("X({}){rest}", kept.join(", "));
        }
        out
    }

    /// As `tools/cuda/build_kernels.py` computes it: 64-bit FNV-1a of a unit's name and its files.
    fn fingerprint(unit: &str) -> String {
        let common = format!("{unit}.h");
        let of_encodings = ["gemm", "wide", "products", "panels", "expert_panels", "batched"].into_iter();
        let found = of_encodings
            .filter_map(|file| Some((file, unit.strip_prefix(file)?.strip_prefix('_')?)))
            .find(|(_, encoding)| encodings::names_of_all().contains(encoding));
        let (file, encoding) = match found {
            Some((file, encoding)) => {
                let ending = if file == "batched" { "h" } else { "cu" };
                (format!("cuda/{file}.{ending}"), Some(encoding))
            }
            None if kernels().join(&common).exists() => (common, None),
            None => (format!("cuda/{unit}.cu"), None),
        };
        let (mut files, mut all) = (vec![], format!("{unit}\n"));
        included(&file, &mut files);
        for file in files {
            all += &format!("{file}\n{}\n", compiled_from(&file, encoding));
        }
        let hash = |value: u64, byte| (value ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        format!("{:016x}", all.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
    }

    #[test]
    fn archives_are_of_the_sources() {
        let stale = UNITS.iter().filter(|unit| fingerprint(unit.name) != unit.fingerprint);
        let stale: Vec<&str> = stale.map(|unit| unit.name).collect();
        assert!(stale.is_empty(), "run tools/cuda/build_kernels.py for {stale:?}");
        for unit in crate::gpu::kernels::units().filter(|unit| !unit.starts_with("metal/")) {
            assert!(UNITS.iter().any(|own| own.name == unit), "run tools/cuda/build_kernels.py for {unit}");
        }
    }

    #[test]
    fn encodings_have_the_kernels_that_their_table_says() {
        let kernels = [
            (FastPath::Bytes, &["products", "gate_up8", "down8", "batch_products_8", "batch_down_16"][..]),
            (FastPath::Bytes, &["joint_products"]),
            (FastPath::Plain, &["products"]),
            (FastPath::Small, &["product", "batch_plain"]),
            (FastPath::Early, &["early_products", "early_down8"]),
            (FastPath::Copied, &["copied_gate_up8", "copied_gate_up8_wide"]),
            (FastPath::Copied, &["joint_down8", "joint_down8_turns", "joint_down8_eight"]),
            (FastPath::Tensor, &["tensor_linear", "tensor_gate_up", "tensor_down"]),
            (FastPath::Tensor, &["wide_linear", "wide_gate_up", "wide_down"]),
            (FastPath::Tensor, &["panel_products_16", "panel_products_32", "panel_products_64"]),
            (FastPath::Tensor, &["panel_gate_up", "panel_down"]),
        ];
        let archive = Archive::open(CODE_MAJOR);
        for (path, operations) in kernels {
            for operation in operations {
                for name in encodings::with(path) {
                    let kernel = format!("{operation}_{name}");
                    assert!(archive.owners.contains_key(kernel.as_str()), "{kernel}");
                }
            }
        }
    }

    #[test]
    fn experts_that_pass_through_shared_memory_have_kernels() {
        let archive = Archive::open(CODE_MAJOR);
        let gate_up = [
            "stream_gate_up_8",
            "stream_gate_up_16",
            "stream_gate_up_8_wide",
            "stream_gate_up_16_wide",
            "stream_gate_up_8_eights",
            "stream_gate_up_16_eights",
        ];
        let down = [
            "stream_down_8",
            "stream_down_16",
            "stream_down_16_few",
            "stream_down_8_wide",
            "stream_down_16_wide",
        ];
        for kernel in gate_up.into_iter().chain(down) {
            let of_planes = ["mxfp4_planes", "nvfp4", "affine4", "affine8", "fp8"];
            let low_bit = ["q2_k", "q3_k", "q4_0", "iq4_nl", "iq4_xs"];
            let of_books = ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"];
            let others = ["q4_k", "q5_k", "q6_k", "q8_0", "mxfp4"];
            for encoding in others.into_iter().chain(of_planes).chain(low_bit).chain(of_books) {
                let kernel = format!("{kernel}_{encoding}");
                assert!(archive.owners.contains_key(kernel.as_str()), "{kernel}");
            }
        }
    }

    #[test]
    fn formatting_and_comments_leave_the_essence() {
        let text = "#define F(x) \\\n    (x)  // twice\nint a = 1;\n// none\nint b=a  - -a;\n";
        assert_eq!(essence(text), "#define F(x) (x)\nint a=1;int b=a- -a;");
        assert_ne!(essence("int a = b - -c;"), essence("int a = b-- c;"));
        assert_ne!(essence("#define F (x)"), essence("#define F(x)"));
    }

    #[test]
    fn every_kernel_has_its_images() {
        let mut archive = Archive::open(CODE_MAJOR);
        let names: Vec<&str> = UNITS.iter().flat_map(|unit| unit.kernels).copied().collect();
        assert!(names.len() > 50, "{} kernels", names.len());
        assert_eq!(names.len(), archive.owners.len(), "names are unique");
        for unit in UNITS {
            assert!(inflate(unit, unit.code).unwrap().starts_with(b"\x7fELF"), "{}", unit.name);
            assert_eq!(
                archive.texts(unit).unwrap().matches(MARK).count(),
                unit.kernels.len(),
                "{}",
                unit.name
            );
        }
        for name in names {
            let [code, text] = archive.find(name);
            assert_eq!(code.expect("machine code"), ImageId::Code(archive.owners[name].name));
            let text = String::from_utf8(archive.image(&text.expect("text")).unwrap()).unwrap();
            assert!(text.contains(&format!(".entry {name}(")), "{name}");
            assert!(text.starts_with(".version 8.0\n.target sm_80\n"), "{name}: {text:.60}");
            assert!(text.ends_with('\0'), "{name}");
        }
        assert_eq!(archive.find("absent"), [None, None]);
        assert_eq!(Archive::open(8).find("add")[0], None);
    }
}
