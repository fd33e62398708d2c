//! Sessions on disk: tokens, key-value pages and recurrent state in a safetensors container.
//!
//! The last tensor is a checksum (XXH3, 128 bits) of every byte before it, header included, and the metadata have the
//! fingerprint of the engine that wrote it. A file is read whole and verified before a session is touched, which costs memory of the
//! file's size for the time of loading. Files are written beside their place and moved there when they are complete.

use std::cell::RefCell;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use moeflux_compute::backend::PAGE_TOKENS;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::checkpoint::CheckpointFile;
use crate::checkpoint::safetensors::{ElementType, Header, TensorInfo, TensorSpec, Writer};
use crate::engine::Engine;
use crate::pictures::tokens::is_picture;
use crate::session::{Session, Slot};
use crate::speculation::{DraftRows, Drafter, KEPT_HIDDEN};
use crate::{Error, Result};

/// How a file is named while it is being written.
pub(crate) const PARTIAL_PREFIX: &str = ".session-";
pub(crate) const PARTIAL_SUFFIX: &str = ".partial";
/// What `format` in the metadata says.
const FORMAT: &str = "moeflux session 2";
/// Most bytes of a header that is ours, its note included.
const MAX_HEADER: u64 = 16 << 20;
const CHECKSUM: usize = 16;

/// Passes on what is written to it and hashes it.
struct Hashing<'a, W> {
    out: W,
    hash: &'a RefCell<Xxh3>,
}

impl<W: Write> Write for Hashing<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hash.borrow_mut().update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// A verified file.
struct Saved {
    tokens: Vec<u32>,
    pages: Vec<Vec<u8>>,
    state: Option<Vec<u8>>,
    drafts: Option<SavedDrafts>,
    note: String,
}

/// What the layer that drafts has, if the file was written by an engine with the same one.
struct SavedDrafts {
    rows: DraftRows,
    pages: Vec<Vec<u8>>,
}

impl Engine {
    /// Writes `session` to `path`, with a note for whoever loads it. The file is complete or not there.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written, or as reading experts, of which it has samples.
    pub fn save(&self, session: &Session, path: &Path, note: &str) -> Result<()> {
        let io = |source| Error::Io { action: "write", path: path.to_owned(), source };
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut partial = tempfile::Builder::new();
        partial.prefix(PARTIAL_PREFIX).suffix(PARTIAL_SUFFIX);
        let mut file = partial.tempfile_in(folder).map_err(io)?;
        let hash = RefCell::new(Xxh3::new());
        let out = Hashing { out: BufWriter::new(file.as_file_mut()), hash: &hash };

        let spec = |name: &str, dtype, shape| TensorSpec { name: name.to_owned(), dtype, shape };
        let pages = &session.pages()[..session.position().div_ceil(PAGE_TOKENS)];
        let mut specs = vec![
            spec("tokens", ElementType::U32, vec![session.position()]),
            spec("pages", ElementType::U8, vec![pages.len(), self.executable.page_bytes()]),
        ];
        if session.state().is_some() {
            specs.push(spec("state", ElementType::U8, vec![self.executable.slot_bytes()]));
        }
        let drafts = self.drafter.as_ref().filter(|_| session.position() > 0).map(|drafter| {
            let (numbers, hidden) = session.drafts.saved();
            (drafter, numbers, hidden)
        });
        if let Some((drafter, numbers, hidden)) = &drafts {
            let width = self.hidden_size();
            specs.push(spec(
                "draft.pages",
                ElementType::U8,
                vec![pages.len(), drafter.executable.page_bytes()],
            ));
            specs.push(spec("draft.rows", ElementType::U32, vec![numbers.len()]));
            specs.push(spec("draft.hidden", ElementType::F32, vec![hidden.len() / width, width]));
        }
        specs.push(spec("checksum", ElementType::U8, vec![CHECKSUM]));
        let mut metadata = vec![("format", FORMAT), ("note", note)];
        metadata.extend(self.fingerprint.parts(self.experts().store(), self.own_sets())?);
        if let Some(adapter) = self.adapter_print(session) {
            metadata.push(("adapter", adapter));
        }
        if let Some((drafter, ..)) = &drafts {
            metadata.push(("draft", drafter.fingerprint.as_str()));
        }
        let mut writer = Writer::new(out, path, &metadata, &specs)?;

        for token in session.tokens() {
            writer.append(&token.to_le_bytes())?;
        }
        let mut bytes = vec![];
        for page in pages {
            bytes.clear();
            self.executable.read_page(*page, &mut bytes)?;
            writer.append(&bytes)?;
        }
        if let Some(slot) = session.state() {
            bytes.clear();
            self.executable.read_slot(slot.number(), &mut bytes)?;
            writer.append(&bytes)?;
        }
        if let Some((drafter, numbers, hidden)) = &drafts {
            for page in pages {
                bytes.clear();
                drafter.executable.read_page(*page, &mut bytes)?;
                writer.append(&bytes)?;
            }
            let numbers: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            writer.append(&numbers)?;
            let hidden: Vec<u8> = hidden.iter().flat_map(|v| v.to_le_bytes()).collect();
            writer.append(&hidden)?;
        }
        let digest = hash.borrow().digest128();
        writer.append(&digest.to_le_bytes())?;
        drop(writer.finish()?);
        file.as_file().sync_all().map_err(io)?;
        file.persist(path).map_err(|error| io(error.error))?;
        Ok(())
    }

    /// Replaces what `session` holds by what [`Engine::save`] wrote to `path`; returns the note. The loaded position is
    /// a checkpoint of the session.
    ///
    /// After an error the session is as it was before the call.
    ///
    /// # Errors
    /// [`Error::SessionFile`] if the file is not a session of this model with this precision of keys and values, or
    /// damaged; [`Error::ContextFull`] or [`Error::StatesFull`] if there is no room.
    pub fn load(&mut self, session: &mut Session, path: &Path) -> Result<String> {
        let saved = self.read_saved(session, path)?;
        match self.place(session, &saved) {
            Ok(state) => {
                session.replace(saved.tokens, state);
                if let Some(drafts) = saved.drafts {
                    session.drafts = drafts.rows;
                }
            }
            Err(error) => {
                session.release_pages();
                return Err(error);
            }
        }
        session.checkpoint();
        Ok(saved.note)
    }

    /// Writes what was saved to pages of `session` and to a slot, which is returned. All room is found before anything is
    /// overwritten, and what was there comes back if writing fails.
    fn place(&mut self, session: &mut Session, saved: &Saved) -> Result<Option<Arc<Slot>>> {
        self.reserve(session, 0, saved.tokens.len())?;
        let slot = saved.state.as_ref().map(|_| self.take_slot(session)).transpose()?;
        let held = session.position().div_ceil(PAGE_TOKENS).min(saved.pages.len());
        let mut before = vec![];
        for page in &session.pages()[..held] {
            let mut bytes = vec![];
            self.executable.read_page(*page, &mut bytes)?;
            before.push(bytes);
        }
        if let Err(error) = self.write(session.pages(), slot.as_deref(), saved) {
            for (page, bytes) in session.pages().iter().zip(&before) {
                // A device that is lost has nothing that could be kept; the first error says so.
                let _ = self.executable.write_page(*page, bytes);
            }
            return Err(error);
        }
        Ok(slot)
    }

    fn write(&mut self, pages: &[u32], slot: Option<&Slot>, saved: &Saved) -> Result<()> {
        for (page, bytes) in pages.iter().zip(&saved.pages) {
            self.executable.write_page(*page, bytes)?;
        }
        if let (Some(slot), Some(bytes)) = (slot, &saved.state) {
            self.executable.write_slot(slot.number(), bytes)?;
        }
        if let (Some(drafter), Some(drafts)) = (&mut self.drafter, &saved.drafts) {
            for (page, bytes) in pages.iter().zip(&drafts.pages) {
                drafter.executable.write_page(*page, bytes)?;
            }
        }
        Ok(())
    }

    /// Reads and verifies a whole file.
    fn read_saved(&self, session: &Session, path: &Path) -> Result<Saved> {
        let fault = |what, expected: String, got: String| Error::SessionFile {
            path: path.to_owned(),
            what,
            expected,
            got,
        };
        let (page_bytes, slot_bytes) = (self.executable.page_bytes(), self.executable.slot_bytes());
        let file = CheckpointFile::open(path)?;
        let most_pages = self.context().div_ceil(PAGE_TOKENS) as u64;
        let draft_bytes = self.drafter.as_ref().map_or(page_bytes, |own| own.executable.page_bytes());
        let hidden = self.chunk().max(KEPT_HIDDEN) * self.hidden_size() * size_of::<f32>();
        let most = MAX_HEADER
            + most_pages * (page_bytes + draft_bytes + PAGE_TOKENS * size_of::<u32>()) as u64
            + (slot_bytes + CHECKSUM + hidden) as u64;
        if file.length() > most {
            return Err(fault("size", format!("at most {most} bytes"), format!("{} bytes", file.length())));
        }
        let mut bytes = vec![0; file.length() as usize];
        file.read_exact_at(0, &mut bytes)?;
        let header = Header::read(&bytes[..], file.length(), path)?;
        let said = |key: &str| header.metadata.get(key).cloned().unwrap_or_default();
        if said("format") != FORMAT {
            return Err(fault("format", FORMAT.into(), format!("{:?}", said("format"))));
        }
        let find = |name: &str| header.tensors.iter().find(|t| t.name == name);
        let data = |t: &TensorInfo| &bytes[t.offset as usize..(t.offset + t.len) as usize];
        let part =
            |name: &'static str| find(name).ok_or_else(|| fault(name, "a tensor".into(), "none".into()));

        let checksum = part("checksum")?;
        if checksum.offset + checksum.len != file.length() || checksum.len != CHECKSUM as u64 {
            let expected = format!("the last {CHECKSUM} bytes");
            return Err(fault("checksum", expected, format!("{} at {}", checksum.len, checksum.offset)));
        }
        let found = xxh3_128(&bytes[..checksum.offset as usize]);
        if data(checksum) != found.to_le_bytes() {
            let expected = data(checksum).iter().rev().map(|b| format!("{b:02x}")).collect();
            return Err(fault("checksum", expected, format!("{found:032x}")));
        }
        for (part, own) in self.fingerprint.parts(self.experts().store(), self.own_sets())? {
            if said(part) != own {
                let expected = match part {
                    "arithmetic" => format!("{own} (the same model, configuration and context)"),
                    _ => own.to_owned(),
                };
                return Err(fault(part, expected, said(part)));
            }
        }

        let own = self.adapter_print(session).unwrap_or_default();
        if said("adapter") != own {
            let named = |print: &str| if print.is_empty() { "none".into() } else { print.to_owned() };
            return Err(fault("adapter", named(own), named(&said("adapter"))));
        }

        let tokens = part("tokens")?;
        let token = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let values: Vec<u32> = data(tokens).chunks_exact(4).map(token).collect();
        let vocab_size = self.model().graph.vocab_size();
        if values.len() > self.context() {
            return Err(Error::ContextFull { wanted: values.len(), context: self.context() });
        }
        let pictures = self.reads_pictures();
        let known = |token: u32| (token as usize) < vocab_size || (pictures && is_picture(token));
        let beyond = values.iter().find(|token| !known(**token));
        if tokens.dtype != "U32" || beyond.is_some() {
            let got = beyond.map_or_else(|| tokens.dtype.clone(), u32::to_string);
            return Err(fault("tokens", format!("U32 ids below {vocab_size}"), got));
        }
        let pages = part("pages")?;
        let expected = [values.len().div_ceil(PAGE_TOKENS), page_bytes];
        if pages.dtype != "U8" || pages.shape != expected {
            let expected = format!("{expected:?} bytes (as with this precision of keys and values)");
            return Err(fault("pages", expected, format!("{:?} {}", pages.shape, pages.dtype)));
        }
        let recurrent = slot_bytes > 0 && !values.is_empty();
        let state = find("state").map(|t| data(t).to_vec());
        if state.as_ref().map(Vec::len) != recurrent.then_some(slot_bytes) {
            let got = state.map_or("none".into(), |s| format!("{} bytes", s.len()));
            let expected = if recurrent { format!("{slot_bytes} bytes") } else { "none".into() };
            return Err(fault("state", expected, got));
        }
        let pages = match page_bytes {
            0 => vec![],
            _ => data(pages).chunks_exact(page_bytes).map(<[u8]>::to_vec).collect(),
        };
        let drafts = self.drafter.as_ref().filter(|drafter| said("draft") == drafter.fingerprint);
        let drafts = match (drafts, find("draft.pages"), find("draft.rows"), find("draft.hidden")) {
            (Some(drafter), Some(pages), Some(rows), Some(hidden)) => {
                let (rows, hidden) = (data(rows), data(hidden));
                let found = self.saved_drafts(drafter, values.len(), data(pages), rows, hidden);
                let other = || fault("draft", "what belongs to the tokens".into(), "something else".into());
                Some(found.ok_or_else(other)?)
            }
            _ => None,
        };
        Ok(Saved { tokens: values, pages, state, drafts, note: said("note") })
    }

    /// What the layer that drafts had, of a session of `position` tokens; `None` if that cannot be.
    fn saved_drafts(
        &self,
        drafter: &Drafter,
        position: usize,
        pages: &[u8],
        numbers: &[u8],
        hidden: &[u8],
    ) -> Option<SavedDrafts> {
        let word = |b: &[u8]| [b[0], b[1], b[2], b[3]];
        let numbers: Vec<u32> = numbers.chunks_exact(4).map(|b| u32::from_le_bytes(word(b))).collect();
        let hidden: Vec<f32> = hidden.chunks_exact(4).map(|b| f32::from_le_bytes(word(b))).collect();
        let rows = DraftRows::loaded(position, numbers.try_into().ok()?, hidden, self.hidden_size())?;
        let each = drafter.executable.page_bytes();
        let fits = pages.len() == position.div_ceil(PAGE_TOKENS) * each;
        fits.then(|| SavedDrafts {
            rows,
            pages: pages.chunks_exact(each.max(1)).map(<[u8]>::to_vec).collect(),
        })
    }

    /// What the session's adapter is known by, if it has one.
    fn adapter_print(&self, session: &Session) -> Option<&str> {
        session.adapter().map(|number| self.adapters[number as usize].text.as_str())
    }

    /// Expert sets of the model, which come before those of the layer that drafts.
    fn own_sets(&self) -> usize {
        self.model().graph.expert_sets().len()
    }
}
