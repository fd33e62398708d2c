//! [`Pack`]: a copy of a checkpoint in which every expert is one contiguous range and, on request, has fewer bits.
//!
//! Published files hold all gate projections of a layer, then all up, then all down: an expert is three reads at places
//! far apart, nine where scales and biases are separate. The copy has a tensor for each projection of each expert, one
//! after the other (`checkpoint/elements.rs`), and opens like any other checkpoint: a GGUF file whose
//! experts begin at pages, or a folder with one safetensors file. Unless fewer bits are asked for, no byte of a weight
//! changes. The price is a copy on disk and a longer directory.
//!
//! With [`PackOptions::experts_bits`], experts that have more bits are re-encoded, which is lossy: the loss is measured
//! before the copy gets its name, and recorded in its metadata (`moeflux.pack.*`; in folders `moeflux_pack` of
//! `config.json`).
//!
//! The copy is written in segments; a journal beside the unfinished copy holds the checksum of each that has reached the
//! disk. To resume, everything is produced again and compared with the journal's checksums, and writing starts at the
//! first segment that differs or is missing. At the end the file is read back, verified and renamed.

mod layout;
mod requantise;
mod segments;

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use moeflux_compute::DType;
use moeflux_compute::graph::ExpertSetId;
use serde_json::{Value as Json, json};

use crate::checkpoint::gguf::{self, Metadata, Value};
use crate::checkpoint::{ByteRange, Checkpoint, Format, safetensors};
use crate::io::buffer::PAGE_BYTES;
use crate::models::Model;
use crate::{Error, Result};
use layout::{Item, PackLayout, Source, Tensor, element_type, refused};
use segments::{SEGMENT, Segments};

/// Bytes copied at once.
const PIECE: u64 = 4 << 20;
/// The weights of a folder, and what describes them there.
const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Files of a folder that are copied as they are: tokenizers, templates, licences.
const BESIDE_WEIGHTS: [&str; 6] = ["json", "jinja", "txt", "md", "model", "tiktoken"];

/// What a copy is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackOptions {
    /// Bits of a weight of experts that have more. GGUF: 4 (Q4_K), 6 (Q6_K) or 8 (Q8_0); MLX: 2 to 6 or 8.
    pub experts_bits: Option<u8>,
    /// Threads that encode.
    pub threads: usize,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { experts_bits: None, threads: 1 }
    }
}

/// What fewer bits have changed: how far the copy's predictions of a text are from the original's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Mean Kullback-Leibler divergence of a token's prediction, in nats.
    pub kl_divergence: f64,
    /// Its standard error.
    pub standard_error: f64,
    /// Share of tokens where both expect the same one most, 0..=1.
    pub same_top: f64,
    /// Tokens that were compared.
    pub tokens: u64,
}

impl Loss {
    /// What `checkpoint` says that its experts have lost, and to how many bits; `None` if it says nothing.
    pub fn of(checkpoint: &Checkpoint) -> Option<(u64, Self)> {
        let config = &checkpoint.config()["moeflux_pack"];
        let number = |name: &str| match checkpoint.metadata().get(&format!("moeflux.pack.{name}")) {
            Some(Value::F64(value)) => Some(*value),
            Some(Value::U32(value)) => Some(f64::from(*value)),
            Some(Value::U64(value)) => Some(*value as f64),
            _ => config[name].as_f64(),
        };
        let loss = Self {
            kl_divergence: number("kl_divergence").filter(|kl| kl.is_finite())?,
            standard_error: number("standard_error")?,
            same_top: number("same_top")?,
            tokens: number("tokens")? as u64,
        };
        Some((number("experts_bits")? as u64, loss))
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kl_divergence, standard_error, same_top, tokens } = self;
        write!(
            f,
            "mean KL divergence {kl_divergence:.3e} ± {standard_error:.1e} nats over {tokens} tokens, "
        )?;
        write!(f, "same top token {:.1} %", 100.0 * same_top)
    }
}

/// How writing ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// The copy is complete and verified; what it has lost, if its experts have fewer bits.
    Complete(Option<Loss>),
    /// `progress` said to stop; the same call resumes from there.
    Stopped,
}

/// A packed copy, ready to be written.
#[derive(Debug)]
pub struct Pack {
    checkpoint: Arc<Checkpoint>,
    layout: PackLayout,
    options: PackOptions,
    segment: usize,
}

/// A file of either format.
enum Writer<W> {
    Gguf(gguf::Writer<W>),
    Safetensors(safetensors::Writer<W>),
}

impl<W: Write> Writer<W> {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Gguf(writer) => writer.append(bytes),
            Self::Safetensors(writer) => writer.append(bytes),
        }
    }

    fn finish(self) -> Result<W> {
        match self {
            Self::Gguf(writer) => writer.finish(),
            Self::Safetensors(writer) => writer.finish(),
        }
    }
}

/// Where a copy is made.
struct Places {
    /// What gets the copy's name in the end: the file, or a folder.
    unfinished: PathBuf,
    /// The weights.
    file: PathBuf,
    journal: PathBuf,
}

impl Pack {
    /// Plans a packed copy of the checkpoint of `model`.
    ///
    /// # Errors
    /// [`Error::Malformed`] if nothing would change, or for experts with gate and up interleaved; [`Error::Option`] for
    /// bits that experts cannot have.
    pub fn new(model: &Model, options: PackOptions) -> Result<Self> {
        let checkpoint = Arc::clone(model.checkpoint());
        let format = checkpoint.format();
        if let Some(bits) = options.experts_bits
            && !requantise::widths(format).contains(&bits)
        {
            let expected = match requantise::widths(format) {
                [] => "a GGUF or MLX checkpoint".to_owned(),
                widths => format!("one of {widths:?}"),
            };
            let got = if format == Format::HuggingFace { "another".into() } else { bits.to_string() };
            return Err(Error::Option { option: "experts_bits", expected, got });
        }
        let store = &model.experts;
        let layout = PackLayout::new(&checkpoint, store, options.experts_bits)?;
        if let Some(bits) = options.experts_bits
            && !layout.is_lossy()
        {
            let expected = "fewer bits than the experts have".to_owned();
            return Err(Error::Option { option: "experts_bits", expected, got: bits.to_string() });
        }
        let one_read = |set| (0..store.set(set).experts as u32).all(|e| store.reads(set, e).len() == 1);
        // Elements in a GGUF file begin at pages, so that small ones may be apart all the same.
        let in_place = format == Format::Gguf && !layout.stacked;
        if !layout.is_lossy() && (in_place || (0..store.sets()).map(ExpertSetId).all(one_read)) {
            return Err(refused(
                &checkpoint,
                "experts in several places",
                "each in one; it is packed already",
            ));
        }
        let pack = Self { checkpoint, layout, options, segment: SEGMENT };
        // So that what cannot be written is known at once.
        pack.writer(std::io::sink(), pack.checkpoint.path(), None)?;
        Ok(pack)
    }

    /// Bytes of all tensors, in GGUF files each filled up to whole pages; headers come on top.
    pub fn bytes(&self) -> u64 {
        let page = if self.checkpoint.format() == Format::Gguf { PAGE_BYTES as u64 } else { 1 };
        self.layout.items.iter().map(|item| item.bytes.next_multiple_of(page)).sum()
    }

    /// Whether experts lose bits.
    pub fn is_lossy(&self) -> bool {
        self.layout.is_lossy()
    }

    /// Writes the copy to `out`, through `out` with `.partial` appended. `progress` gets the bytes written and says
    /// whether to continue. If experts lose bits, `measure` gets the path of the complete copy before it is called `out`.
    ///
    /// # Errors
    /// [`Error::Io`] if writing fails, [`Error::Read`] if the source cannot be read, [`Error::Tensor`] for values that
    /// fewer bits cannot hold, [`Error::Malformed`] if what was written is read back otherwise, and those of `measure`.
    pub fn write<E: From<Error>>(
        &self,
        out: &Path,
        progress: &mut dyn FnMut(u64) -> bool,
        measure: impl FnOnce(&Path) -> Result<Loss, E>,
    ) -> Result<Outcome, E> {
        let places = self.places(out);
        if !self.write_weights(&places, progress)? {
            return Ok(Outcome::Stopped);
        }
        self.describe(&places, None)?;
        let loss = if self.is_lossy() { Some(measure(&places.unfinished)?) } else { None };
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action, path, source }
        };
        // From here on the journal does not say what is in the file.
        std::fs::remove_file(&places.journal).map_err(io("remove", &places.journal))?;
        if let Some(loss) = &loss {
            self.describe(&places, Some(loss))?;
        }
        std::fs::rename(&places.unfinished, out).map_err(io("rename", &places.unfinished))?;
        Ok(Outcome::Complete(loss))
    }

    fn places(&self, out: &Path) -> Places {
        let unfinished = beside(out, ".partial");
        let file = match self.checkpoint.format() {
            Format::Gguf => unfinished.clone(),
            Format::HuggingFace | Format::Mlx => unfinished.join(WEIGHTS),
        };
        Places { unfinished, file, journal: beside(out, ".journal") }
    }

    /// Writes and verifies the file of weights; false if `progress` said to stop.
    fn write_weights(&self, places: &Places, progress: &mut dyn FnMut(u64) -> bool) -> Result<bool> {
        let io = |action| move |source| Error::Io { action, path: places.file.clone(), source };
        if places.file != places.unfinished {
            std::fs::create_dir_all(&places.unfinished).map_err(io("write"))?;
        }
        let sink = Segments::open(&places.file, &places.journal, self.segment).map_err(io("write"))?;
        let mut writer = self.writer(sink, &places.file, None)?;
        let mut written = 0;
        let mut items = &self.layout.items[..];
        while let [first, rest @ ..] = items {
            if let Source::Stored(ranges) = &first.source {
                for range in ranges {
                    if !self.copy(range, &mut writer, &mut written, progress)? {
                        return Ok(false);
                    }
                }
                items = rest;
                continue;
            }
            let (made, count) = self.encode(items)?;
            for plane in made {
                writer.append(&plane)?;
                written += plane.len() as u64;
            }
            if !progress(written) {
                return Ok(false);
            }
            items = &items[count..];
        }
        let whole = writer.finish()?.verify().map_err(io("read back"))?;
        if !whole {
            // So that the next run trusts nothing that is there.
            std::fs::remove_file(&places.journal).map_err(io("remove the journal of"))?;
            return Err(Error::Malformed {
                path: places.file.clone(),
                what: "checksum".into(),
                expected: "what was written".into(),
                got: "different bytes when read back; the storage may be failing".into(),
            });
        }
        Ok(true)
    }

    /// Appends `range` as it is; false if `progress` said to stop.
    fn copy(
        &self,
        range: &ByteRange,
        writer: &mut Writer<Segments>,
        written: &mut u64,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool> {
        let mut piece = vec![];
        for start in (0..range.len).step_by(PIECE as usize) {
            let len = PIECE.min(range.len - start);
            piece.resize(len as usize, 0);
            self.checkpoint.read(&ByteRange { offset: range.offset + start, len, ..*range }, &mut piece)?;
            writer.append(&piece)?;
            *written += len;
            if !progress(*written) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The planes of the matrices that `items` begin with, as many as there are threads; and how many items that were.
    fn encode(&self, items: &[Item]) -> Result<(Vec<Vec<u8>>, usize)> {
        let matrix = |item| match item {
            &Item { source: Source::Requantised(ref weight, to), .. } => Some((weight, to)),
            Item { source: Source::Stored(_), .. } => None,
        };
        let matrices: Vec<_> = items.iter().map_while(matrix).take(self.options.threads.max(1)).collect();
        let made: Vec<Result<Vec<Vec<u8>>>> = thread::scope(|scope| {
            let encode = |(weight, to)| requantise::requantise(&self.checkpoint, weight, to);
            let started: Vec<_> =
                matrices.iter().map(|matrix| scope.spawn(move || encode(*matrix))).collect();
            started.into_iter().map(|t| t.join().expect("encoding does not panic")).collect()
        });
        let planes = made.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten();
        Ok((planes.collect(), matrices.len()))
    }

    /// A writer that has written the header to `out`, which is `path` to errors.
    fn writer<W: Write>(&self, out: W, path: &Path, loss: Option<&Loss>) -> Result<Writer<W>> {
        let tensors = self.layout.items.iter().flat_map(|item| &item.tensors);
        let fault = |tensor: &Tensor, expected: &str| Error::Tensor {
            path: self.checkpoint.path().into(),
            tensor: tensor.name.clone(),
            expected: expected.into(),
            got: tensor.encoding.to_string(),
        };
        if self.checkpoint.format() == Format::Gguf {
            let spec = |tensor: &Tensor| gguf::TensorSpec {
                name: tensor.name.clone(),
                encoding: tensor.encoding.clone(),
                shape: tensor.shape.clone(),
            };
            let specs: Vec<_> = tensors.map(spec).collect();
            return Ok(Writer::Gguf(gguf::Writer::new(out, path, &self.metadata(loss), &specs)?));
        }
        let spec = |tensor: &Tensor| match element_type(&tensor.encoding) {
            Some(dtype) => {
                Ok(safetensors::TensorSpec { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() })
            }
            None => Err(fault(tensor, "an element type of safetensors files")),
        };
        let specs = tensors.map(spec).collect::<Result<Vec<_>>>()?;
        let format = if self.checkpoint.format() == Format::Mlx { "mlx" } else { "pt" };
        let metadata = [("format", format)];
        Ok(Writer::Safetensors(safetensors::Writer::new(out, path, &metadata, &specs)?))
    }

    /// The original's key-values, and what has been lost, which takes the same bytes whatever it is.
    fn metadata(&self, loss: Option<&Loss>) -> Metadata {
        let mut metadata = Metadata::new(self.checkpoint.path());
        for (key, value) in self.checkpoint.metadata().iter().filter(|(key, _)| !key.starts_with("split.")) {
            metadata.insert(key, value.clone());
        }
        metadata.insert("general.alignment", Value::U32(PAGE_BYTES as u32));
        if let Some(bits) = self.options.experts_bits {
            let measured = |figure: fn(&Loss) -> f64| Value::F64(loss.map_or(f64::NAN, figure));
            metadata.insert("moeflux.pack.experts_bits", Value::U32(bits.into()));
            metadata.insert("moeflux.pack.kl_divergence", measured(|loss| loss.kl_divergence));
            metadata.insert("moeflux.pack.standard_error", measured(|loss| loss.standard_error));
            metadata.insert("moeflux.pack.same_top", measured(|loss| loss.same_top));
            metadata.insert("moeflux.pack.tokens", Value::U64(loss.map_or(0, |loss| loss.tokens)));
        }
        metadata
    }

    /// Writes what a copy says of itself: beside the weights of a folder its configuration and whatever else the original
    /// has there; in a GGUF file what it has lost.
    fn describe(&self, places: &Places, loss: Option<&Loss>) -> Result<()> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action: "write", path, source }
        };
        if self.checkpoint.format() == Format::Gguf {
            if let Some(loss) = loss {
                let mut header = vec![];
                self.writer(&mut header, &places.file, Some(loss))?;
                let mut file = OpenOptions::new().write(true).open(&places.file).map_err(io(&places.file))?;
                file.write_all(&header).and_then(|()| file.sync_all()).map_err(io(&places.file))?;
            }
            return Ok(());
        }
        let original = self.checkpoint.path();
        let list = |source| Error::Io { action: "list", path: original.into(), source };
        for entry in std::fs::read_dir(original).map_err(list)? {
            let (path, name) = entry.map(|e| (e.path(), e.file_name())).map_err(list)?;
            let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("");
            let made_anew = [CONFIG, INDEX].iter().any(|made| name == *made);
            if path.is_file() && !made_anew && BESIDE_WEIGHTS.contains(&ending) {
                let to = places.unfinished.join(&name);
                std::fs::copy(&path, &to).map_err(io(&to))?;
            }
        }
        let path = places.unfinished.join(CONFIG);
        let text = format!("{:#}\n", self.config(loss));
        let write = || {
            let mut file = std::fs::File::create(&path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(io(&path))
    }

    /// The original's configuration, with encodings that have changed and what that has lost.
    fn config(&self, loss: Option<&Loss>) -> Json {
        let mut config = self.checkpoint.config().clone();
        if !self.is_lossy() {
            return config;
        }
        for key in ["quantization", "quantization_config"] {
            let settings = |dtype: &DType| match dtype {
                DType::Affine { bits, group, .. } => json!({ "group_size": group, "bits": bits }),
                _ => Json::Null,
            };
            if !config[key].is_object() {
                let first = self.layout.encodings.values().next();
                config[key] = first.map_or(Json::Null, settings);
            }
            for (module, dtype) in &self.layout.encodings {
                config[key][module] = settings(dtype);
            }
        }
        config["moeflux_pack"] = json!({
            "experts_bits": self.options.experts_bits,
            "kl_divergence": loss.map(|loss| loss.kl_divergence),
            "standard_error": loss.map(|loss| loss.standard_error),
            "same_top": loss.map(|loss| loss.same_top),
            "tokens": loss.map(|loss| loss.tokens),
        });
        config
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models;

    fn model(path: &Path) -> Model {
        models::record(Arc::new(Checkpoint::open(path).unwrap())).unwrap()
    }

    fn fixture(name: &str) -> Model {
        model(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
    }

    fn pack(name: &str, experts_bits: Option<u8>) -> Pack {
        let options = PackOptions { experts_bits, threads: 2 };
        Pack { segment: 10_000, ..Pack::new(&fixture(name), options).unwrap() }
    }

    const LOSS: Loss = Loss { kl_divergence: 0.25, standard_error: 0.01, same_top: 0.75, tokens: 9 };

    fn write(pack: &Pack, out: &Path, progress: &mut dyn FnMut(u64) -> bool) -> Result<Outcome> {
        pack.write(out, progress, |_| Ok(LOSS))
    }

    /// The content of a file, or of a folder's files by their names.
    fn content(path: &Path) -> Vec<(String, Vec<u8>)> {
        if path.is_file() {
            return vec![(String::new(), std::fs::read(path).unwrap())];
        }
        let files = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
        let file = |e: std::fs::DirEntry| {
            (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).unwrap())
        };
        let mut all: Vec<_> = files.map(file).collect();
        all.sort();
        all
    }

    #[test]
    fn stopping_and_going_on_gives_the_same_copy() {
        for (name, bits) in [
            ("gguf/qwen3_moe_q8_0", None),
            ("gguf/qwen3_moe_q8_0", Some(4)),
            ("mlx/qwen3_moe_mixed", None),
            ("mlx/qwen3_moe_mixed", Some(4)),
            ("hf/minimax_m2_stacked", None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
            let lost = bits.map(|_| LOSS);
            let complete = Outcome::Complete(lost);
            assert_eq!(write(&pack(name, bits), &whole, &mut |_| true).unwrap(), complete, "{name}");
            let expected = content(&whole);
            let mut stops = 0;
            let step = pack(name, bits).bytes() as usize / 7;
            // Stops a little later every time; what was there is damaged once.
            for limit in (0..).step_by(step) {
                let outcome = write(&pack(name, bits), &parts, &mut |bytes| bytes < limit).unwrap();
                assert_eq!(outcome == complete, parts.exists());
                if outcome == complete {
                    break;
                }
                stops += 1;
                if stops == 2 {
                    let file = pack(name, bits).places(&parts).file;
                    let mut bytes = std::fs::read(&file).unwrap();
                    bytes.truncate(bytes.len() / 2);
                    std::fs::write(&file, bytes).unwrap();
                }
            }
            assert!(stops > 2, "{name}: {stops} stops");
            assert!(content(&parts) == expected, "{name}");
            assert_eq!(content_names(folder.path()), ["parts", "whole"], "{name}: nothing else is left");
        }
    }

    fn content_names(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            names.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// What an interrupted run with other options has left, which may be longer.
    #[test]
    fn another_copy_may_have_been_begun() {
        let folder = tempfile::tempdir().unwrap();
        let (whole, out) = (folder.path().join("whole.gguf"), folder.path().join("out.gguf"));
        let pack = pack("gguf/qwen3_moe_q8_0", Some(4));
        write(&pack, &whole, &mut |_| true).unwrap();
        let places = pack.places(&out);
        std::fs::write(&places.file, vec![1; 3 * content(&whole)[0].1.len()]).unwrap();
        std::fs::write(&places.journal, [2; 800]).unwrap();
        write(&pack, &out, &mut |_| true).unwrap();
        assert!(content(&out) == content(&whole));
    }

    #[test]
    fn damage_is_noticed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["gguf/qwen3_moe_q8_0", "mlx/mixtral_4bit"] {
            let out = folder.path().join("out");
            let pack = pack(name, None);
            let mut damaged = false;
            let error = write(&pack, &out, &mut |written| {
                if written > pack.bytes() / 2 && !damaged {
                    damaged = true;
                    let mut file = OpenOptions::new().write(true).open(pack.places(&out).file).unwrap();
                    file.write_all(b"damage").unwrap();
                }
                true
            })
            .unwrap_err();
            assert!(error.to_string().contains("checksum"), "{error}");
            assert!(!out.exists());
            assert_eq!(write(&pack, &out, &mut |_| true).unwrap(), Outcome::Complete(None));
            if out.is_dir() {
                std::fs::remove_dir_all(out).unwrap()
            } else {
                std::fs::remove_file(out).unwrap()
            }
        }
    }

    #[test]
    fn a_lossy_copy_has_no_name_before_its_loss_is_known() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["gguf/qwen3_moe_q8_0", "mlx/qwen3_moe_mixed"] {
            let out = folder.path().join("out");
            let pack = pack(name, Some(4));
            let measure = |path: &Path| {
                assert!(!out.exists());
                let copy = model(path);
                assert_eq!(copy.experts.sets(), 2, "{name}: the copy can be opened");
                assert_eq!(Loss::of(copy.checkpoint()), None);
                Err(Error::Io { action: "measure", path: path.into(), source: std::io::Error::other("no") })
            };
            let error = pack.write(&out, &mut |_| true, measure).unwrap_err();
            assert!(error.to_string().contains("cannot measure"), "{error}");
            assert!(!out.exists());
            assert_eq!(write(&pack, &out, &mut |_| true).unwrap(), Outcome::Complete(Some(LOSS)));
            assert_eq!(Loss::of(&Checkpoint::open(&out).unwrap()), Some((4, LOSS)), "{name}");
            if out.is_dir() {
                std::fs::remove_dir_all(out).unwrap()
            } else {
                std::fs::remove_file(out).unwrap()
            }
        }
    }

    #[test]
    fn what_cannot_be_packed_is_refused() {
        let refused = |model: &Model, experts_bits, expected: &str| {
            let error = Pack::new(model, PackOptions { experts_bits, threads: 1 }).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} lacks {expected}");
        };
        refused(&fixture("hf/mixtral_basic"), None, "packed already");
        refused(&fixture("hf/mixtral_basic"), Some(4), "expected a GGUF or MLX checkpoint");
        refused(&fixture("hf/gpt_oss_bf16"), None, "got interleaved ones");
        refused(&fixture("gguf/qwen3_moe_q8_0"), Some(5), "expected one of [4, 6, 8], got 5");
        refused(&fixture("gguf/qwen3_moe_q8_0"), Some(8), "expected fewer bits than the experts have, got 8");
        let folder = tempfile::tempdir().unwrap();
        for name in ["gguf/qwen3_moe_q8_0", "mlx/mixtral_4bit"] {
            let packed = folder.path().join("packed");
            write(&pack(name, None), &packed, &mut |_| true).unwrap();
            refused(&model(&packed), None, "packed already");
            let _ = std::fs::remove_file(&packed).or_else(|_| std::fs::remove_dir_all(&packed));
        }
    }
}
