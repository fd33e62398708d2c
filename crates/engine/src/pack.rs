//! [`Pack`]: a copy of a GGUF checkpoint in which every expert is one contiguous, page-aligned range.
//!
//! Published files hold all gate projections of a layer, then all up, then all down: an expert is three reads at places
//! far apart. The copy has a tensor for each projection of each expert, one behind the other, which is GGUF all the same
//! and is opened like any other file. No byte of a weight changes. The price is a copy on disk and a longer directory.
//!
//! Writing goes in segments; a journal beside the unfinished file holds the checksum of each that has reached the disk.
//! Started again, it reads the source from the beginning, compares checksums with the journal's, and writes from the
//! first segment that differs or is missing. At the end the file is read back against the checksums and renamed.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::gguf::{Metadata, TensorSpec, Value, Writer};
use crate::checkpoint::{ByteRange, Checkpoint, Encoding, Format};
use crate::io::buffer::PAGE_BYTES;
use crate::{Error, Result};

/// Bytes of a segment.
const SEGMENT: usize = 32 << 20;
/// Bytes copied at once.
const PIECE: u64 = 4 << 20;

/// How writing ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The file is complete and verified.
    Complete,
    /// `progress` said to stop; the same call goes on from there.
    Stopped,
}

/// A packed copy, ready to be written.
#[derive(Debug)]
pub struct Pack {
    checkpoint: Arc<Checkpoint>,
    metadata: Metadata,
    tensors: Vec<(TensorSpec, ByteRange)>,
    segment: usize,
}

/// Layer and place within an expert of a stacked projection; `None` for other tensors.
fn stacked_projection(name: &str) -> Option<(usize, usize, &'static str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let parts =
        [("ffn_gate_exps.weight", "gate"), ("ffn_up_exps.weight", "up"), ("ffn_down_exps.weight", "down")];
    let (place, (_, projection)) = parts.iter().enumerate().find(|(_, (stacked, _))| *stacked == part)?;
    Some((layer.parse().ok()?, place, projection))
}

impl Pack {
    /// Plans a packed copy of `checkpoint`.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it is not GGUF or has no stacked experts; [`Error::Tensor`] for tensors of encodings that
    /// cannot be used.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Result<Self> {
        let refused = |expected: &str, got: &str| Error::Malformed {
            path: checkpoint.path().into(),
            what: "checkpoint to pack".into(),
            expected: expected.into(),
            got: got.into(),
        };
        if checkpoint.format() != Format::Gguf {
            return Err(refused("GGUF", "safetensors"));
        }
        let (mut trunk, mut experts) = (vec![], vec![]);
        for entry in checkpoint.entries() {
            let Encoding::Weight(dtype) = entry.encoding else {
                return Err(Error::Tensor {
                    path: checkpoint.files()[entry.range.file].path().into(),
                    tensor: entry.name.clone(),
                    expected: "an encoding that weights can be used in".into(),
                    got: entry.encoding.to_string(),
                });
            };
            let stacked = stacked_projection(&entry.name).zip(checkpoint.weight(&entry.name)?);
            let Some(((layer, place, projection), weight)) = stacked.filter(|(_, w)| w.shape.len() == 3)
            else {
                let spec = TensorSpec { name: entry.name.clone(), dtype, shape: entry.shape.clone() };
                trunk.push((spec, entry.range));
                continue;
            };
            for expert in 0..weight.shape[0] {
                let Some(one) = weight.stack_element(expert) else { continue };
                let name = format!("blk.{layer}.ffn_{projection}.{expert}.weight");
                let spec = TensorSpec { name, dtype, shape: one.shape.clone() };
                experts.push(((layer, expert, place), (spec, one.planes[0])));
            }
        }
        if experts.is_empty() {
            return Err(refused("experts stacked by projection", "none; it may be packed already"));
        }
        experts.sort_by_key(|(order, _)| *order);
        let mut metadata = Metadata::new(checkpoint.path());
        for (key, value) in checkpoint.metadata().iter().filter(|(key, _)| !key.starts_with("split.")) {
            metadata.insert(key, value.clone());
        }
        metadata.insert("general.alignment", Value::U32(PAGE_BYTES as u32));
        let tensors = trunk.into_iter().chain(experts.into_iter().map(|(_, tensor)| tensor)).collect();
        Ok(Self { checkpoint, metadata, tensors, segment: SEGMENT })
    }

    /// Bytes of all tensors, each filled up to whole pages; the file has its header on top.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, range)| range.len.next_multiple_of(PAGE_BYTES as u64)).sum()
    }

    /// Writes the copy to `out`, through `out` with `.partial` appended. `progress` gets the bytes written and says
    /// whether to go on.
    ///
    /// # Errors
    /// [`Error::Io`] if writing fails, [`Error::Read`] if the source cannot be read, [`Error::Malformed`] if what was
    /// written is read back otherwise.
    pub fn write(&self, out: &Path, progress: &mut dyn FnMut(u64) -> bool) -> Result<Outcome> {
        let partial = beside(out, ".partial");
        let io = |action| move |source| Error::Io { action, path: beside(out, ".partial"), source };
        let sink = Segments::open(&partial, self.segment).map_err(io("write"))?;
        let specs: Vec<TensorSpec> = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = Writer::new(sink, &partial, &self.metadata, &specs)?;
        let (mut piece, mut written) = (vec![], 0);
        for (_, range) in &self.tensors {
            for start in (0..range.len).step_by(PIECE as usize) {
                let len = PIECE.min(range.len - start);
                piece.resize(len as usize, 0);
                self.checkpoint
                    .read(&ByteRange { offset: range.offset + start, len, ..*range }, &mut piece)?;
                writer.append(&piece)?;
                written += len;
                if !progress(written) {
                    return Ok(Outcome::Stopped);
                }
            }
        }
        let mut sink = writer.finish()?;
        sink.end_segment().map_err(io("write"))?;
        let whole = sink.verify().map_err(io("read back"))?;
        if !whole {
            // So that the next run trusts nothing that is there.
            std::fs::remove_file(beside(out, ".journal")).map_err(io("remove the journal of"))?;
            return Err(Error::Malformed {
                path: partial,
                what: "checksum".into(),
                expected: "what was written".into(),
                got: "other bytes when read back; the storage may be failing".into(),
            });
        }
        std::fs::rename(&partial, out).map_err(io("rename"))?;
        std::fs::remove_file(beside(out, ".journal")).map_err(io("remove the journal of"))?;
        Ok(Outcome::Complete)
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A file written in segments that are skipped if the journal says that they are there.
struct Segments {
    file: File,
    journal: File,
    /// Checksums of the segments that are on the disk.
    there: Vec<u64>,
    /// Segments ended so far.
    ended: usize,
    segment: Vec<u8>,
    size: usize,
}

impl Segments {
    fn open(partial: &Path, size: usize) -> std::io::Result<Self> {
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = open(partial)?;
        let out = partial.with_extension("");
        let mut journal = open(&beside(&out, ".journal"))?;
        let mut bytes = vec![];
        journal.read_to_end(&mut bytes)?;
        let mut there: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        // The journal is written after its segment; without one of them it says nothing.
        let length = file.metadata()?.len() as usize;
        there.truncate(length / size);
        Ok(Self { file, journal, there, ended: 0, segment: Vec::with_capacity(size), size })
    }

    /// Makes sure that the segment is on the disk.
    fn end_segment(&mut self) -> std::io::Result<()> {
        if self.segment.is_empty() {
            return Ok(());
        }
        let sum = xxh3_64(&self.segment);
        if self.there.get(self.ended) != Some(&sum) {
            self.there.truncate(self.ended);
            self.file.seek(SeekFrom::Start((self.ended * self.size) as u64))?;
            self.file.write_all(&self.segment)?;
            self.file.sync_data()?;
            self.journal.set_len(8 * self.ended as u64)?;
            self.journal.seek(SeekFrom::End(0))?;
            self.journal.write_all(&sum.to_le_bytes())?;
            self.journal.sync_data()?;
            self.there.push(sum);
        }
        self.ended += 1;
        self.segment.clear();
        Ok(())
    }

    /// Whether the file holds what was written, and nothing behind it.
    fn verify(mut self) -> std::io::Result<bool> {
        self.there.truncate(self.ended);
        let end = self.file.stream_position()?.max(self.file.metadata()?.len());
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)?;
        self.file.seek(SeekFrom::Start(0))?;
        let mut read = 0;
        for sum in &self.there {
            self.segment.clear();
            read += (&mut self.file).take(self.size as u64).read_to_end(&mut self.segment)? as u64;
            if xxh3_64(&self.segment) != *sum {
                return Ok(false);
            }
        }
        Ok(read == end)
    }
}

impl Write for Segments {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let len = bytes.len().min(self.size - self.segment.len());
        self.segment.extend_from_slice(&bytes[..len]);
        if self.segment.len() == self.size {
            self.end_segment()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Arc<Checkpoint> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Arc::new(Checkpoint::open(&path).unwrap())
    }

    fn pack(name: &str) -> Pack {
        Pack { segment: 10_000, ..Pack::new(fixture(name)).unwrap() }
    }

    #[test]
    fn stopping_and_going_on_gives_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let (whole, parts) = (folder.path().join("whole.gguf"), folder.path().join("parts.gguf"));
        assert_eq!(pack("gguf/qwen3_moe_q8_0").write(&whole, &mut |_| true).unwrap(), Outcome::Complete);
        let expected = std::fs::read(&whole).unwrap();
        let mut stops = 0;
        // Stops a little later every time; what was there is damaged once.
        for limit in (0..).step_by(70_000) {
            let outcome = pack("gguf/qwen3_moe_q8_0").write(&parts, &mut |bytes| bytes < limit).unwrap();
            assert_eq!(outcome == Outcome::Complete, parts.exists());
            if outcome == Outcome::Complete {
                break;
            }
            stops += 1;
            if stops == 2 {
                let partial = beside(&parts, ".partial");
                let mut bytes = std::fs::read(&partial).unwrap();
                bytes.truncate(bytes.len() / 2);
                std::fs::write(&partial, bytes).unwrap();
            }
        }
        assert!(stops > 2, "{stops} stops");
        assert_eq!(std::fs::read(&parts).unwrap(), expected);
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "nothing else is left: {left:?}");
    }

    #[test]
    fn damage_is_noticed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.gguf");
        let pack = pack("gguf/qwen3_moe_q8_0");
        let mut damaged = false;
        let error = pack
            .write(&out, &mut |written| {
                if written > pack.bytes() / 2 && !damaged {
                    damaged = true;
                    let mut file = OpenOptions::new().write(true).open(beside(&out, ".partial")).unwrap();
                    file.write_all(b"damage").unwrap();
                }
                true
            })
            .unwrap_err();
        assert!(error.to_string().contains("checksum"), "{error}");
        assert!(!out.exists());
        assert_eq!(pack.write(&out, &mut |_| true).unwrap(), Outcome::Complete);
    }

    #[test]
    fn what_cannot_be_packed_is_refused() {
        let refused = |name: &str, expected: &str| {
            let error = Pack::new(fixture(name)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused("hf/mixtral_basic", "expected GGUF, got safetensors");
        let folder = tempfile::tempdir().unwrap();
        let packed = folder.path().join("packed.gguf");
        pack("gguf/qwen3_moe_q8_0").write(&packed, &mut |_| true).unwrap();
        let again = Pack::new(Arc::new(Checkpoint::open(&packed).unwrap())).unwrap_err();
        assert!(again.to_string().contains("packed already"), "{again}");
    }
}
