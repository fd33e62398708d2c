//! Pictures in prompts: [`Picture`], and the encoder that makes one from a file.
//!
//! [`Engine::read_picture`] decodes a file, has the encoder make rows of it, and returns a [`Picture`]: ids that stand in a
//! prompt where the picture is. Evaluating such ids takes the rows of the picture in place of embeddings of tokens; it must
//! be alive then. A session that has evaluated them needs it no more.
//!
//! The encoder runs on the backend of the model. GPUs have no kernels for it.

mod decode;
mod patches;
mod resize;
pub(crate) mod tokens;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Embeddings, Executable, ExpertSource, ExpertView, KvType,
    Span,
};
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::quant::dequantize;
use xxhash_rust::xxh3::xxh3_128;

use crate::engine::Engine;
use crate::models::{Model, PictureForm, Vision};
use crate::session::Session;
use crate::{Error, Result};
use patches::{Patches, PositionTable};
use tokens::{Places, is_picture};

/// Pictures that there is room for at the same time, if all are of the largest size. The last one that was read is among them
/// for when it comes again.
const ALIVE: usize = 4;

/// A picture that was read. Two are the same if their ids are.
#[derive(Debug)]
pub struct Picture {
    /// What stands for it in a prompt.
    tokens: Vec<u32>,
    /// The token that a chat template writes in its place.
    placeholder: u32,
    /// (tokens, levels · hidden_size), f32.
    values: Vec<f32>,
}

impl PartialEq for Picture {
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl Eq for Picture {}

impl Picture {
    /// The ids that stand for it in a prompt: beyond the vocabulary, and the same for the same picture.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The token that a chat template writes in its place.
    pub fn placeholder(&self) -> u32 {
        self.placeholder
    }
}

/// Puts pictures in the places that `prompt` has for them, in order.
///
/// # Errors
/// [`Error::Picture`] if it has another number of places.
pub(crate) fn place(prompt: Vec<u32>, pictures: &[Arc<Picture>]) -> Result<Vec<u32>> {
    let Some(first) = pictures.first() else { return Ok(prompt) };
    let places = prompt.iter().filter(|token| **token == first.placeholder).count();
    if places != pictures.len() {
        return Err(Error::Picture {
            expected: format!("a chat template that has a place for each of {}", pictures.len()),
            got: places.to_string(),
        });
    }
    let (mut placed, mut next) = (vec![], pictures.iter());
    for token in prompt {
        match next.as_slice().first().filter(|_| token == first.placeholder) {
            Some(_) => placed.extend(next.next().into_iter().flat_map(|picture| &picture.tokens)),
            None => placed.push(token),
        }
    }
    Ok(placed)
}

/// Refuses a prompt with parts of pictures other than those that it `shows`, one after the other.
///
/// # Errors
/// [`Error::Picture`].
pub(crate) fn check_shown(prompt: &[u32], shows: &[Arc<Picture>]) -> Result<()> {
    let in_prompt = prompt.iter().filter(|token| is_picture(**token));
    if in_prompt.eq(shows.iter().flat_map(|picture| &picture.tokens)) {
        return Ok(());
    }
    Err(Error::Picture { expected: "the pictures of the request in its prompt".into(), got: "others".into() })
}

/// The encoder of an engine.
pub(crate) struct Encoder {
    form: PictureForm,
    executable: Box<dyn Executable>,
    positions: PositionTable,
    /// Most pixels that a picture is read with.
    most_pixels: usize,
    /// By the first of their ids.
    alive: HashMap<u32, Weak<Picture>>,
    /// The last one.
    last: Option<Arc<Picture>>,
}

/// Most patches of a picture of so many pixels.
fn most_patches(form: &PictureForm, most_pixels: usize) -> usize {
    let most = form.max_pixels.min(most_pixels).max(form.factor() * form.factor());
    most / (form.patch_size * form.patch_size)
}

/// Most tokens of pictures that are alive.
fn most_tokens(form: &PictureForm, most_pixels: usize) -> usize {
    ALIVE * most_patches(form, most_pixels) / (form.merge_size * form.merge_size)
}

fn compile_options(activations: ActivationMode, rows: usize) -> CompileOptions {
    CompileOptions { activations, kv_type: KvType::F32, max_rows: rows, ..CompileOptions::default() }
}

/// Bytes that the encoder of `model` takes besides its weights, for pictures of up to `most_pixels`; 0 if there is none.
pub(crate) fn memory(
    model: &Model,
    backend: &dyn Backend,
    activations: ActivationMode,
    most_pixels: usize,
) -> u64 {
    let Some(vision) = &model.vision else { return 0 };
    let Vision { encoder, form, positions } = &**vision;
    let rows = most_patches(form, most_pixels);
    let scratch = backend.scratch_bytes(&encoder.graph, compile_options(activations, rows)) as u64;
    let table = encoder.graph.weights()[positions.index()].matrix;
    let floats = (rows as u64)
        .saturating_mul(vision.row_width() as u64)
        .saturating_add((table.rows * table.cols) as u64);
    let made = most_tokens(form, most_pixels).saturating_mul(form.levels * form.hidden_size) as u64;
    scratch.saturating_add(floats.saturating_add(made).saturating_mul(size_of::<f32>() as u64))
}

impl Encoder {
    /// The encoder of `model`, if it was recorded; `progress` gets the bytes of each weight.
    pub(crate) fn new(
        model: &Model,
        backend: &dyn Backend,
        activations: ActivationMode,
        most_pixels: usize,
        progress: impl FnMut(u64),
    ) -> Result<Option<Self>> {
        let Some(vision) = &model.vision else { return Ok(None) };
        let Vision { encoder, form, positions } = &**vision;
        let weights = encoder.load(progress)?;
        let table = &weights[positions.index()];
        let positions =
            PositionTable { side: form.grid_side, width: table.cols(), values: dequantize(table.view())? };
        let options = compile_options(activations, most_patches(form, most_pixels));
        let executable = backend.compile(&encoder.graph, weights, options)?;
        let (alive, last) = (HashMap::new(), None);
        Ok(Some(Self { form: form.clone(), executable, positions, most_pixels, alive, last }))
    }

    /// Reads a picture.
    fn read(&mut self, bytes: &[u8], model: &Model) -> Result<Arc<Picture>> {
        let decoded = decode::decode(bytes)?;
        let patches = Patches::new(&self.form, &decoded, self.most_pixels)?;
        drop(decoded);
        let (rows, columns) = patches.grid;
        let side = self.form.merge_size;
        let (height, width) = (rows / side, columns / side);
        let hash = xxh3_128(patches.picture.as_raw());
        let ids = tokens::ids(hash, height, width);
        if let Some(known) = self.alive.get(&ids[0]).and_then(Weak::upgrade).filter(|k| k.tokens == ids) {
            return Ok(known);
        }
        self.last = None;
        self.alive.retain(|_, picture| picture.strong_count() > 0);
        let alive = self.alive.values().filter_map(Weak::upgrade);
        let wanted = ids.len() + alive.map(|picture| picture.tokens.len()).sum::<usize>();
        let most = most_tokens(&self.form, self.most_pixels);
        if wanted > most {
            return Err(Error::PicturesFull { wanted, most });
        }
        let values = self.encode(&patches, model)?;
        let picture = Arc::new(Picture { tokens: ids, placeholder: self.form.placeholder, values });
        self.alive.insert(picture.tokens[0], Arc::downgrade(&picture));
        self.last = Some(Arc::clone(&picture));
        Ok(picture)
    }

    /// (blocks, levels · hidden_size).
    fn encode(&mut self, patches: &Patches, model: &Model) -> Result<Vec<f32>> {
        let count = patches.grid.0 * patches.grid.1;
        let (mut rows, mut positions) = (vec![], vec![]);
        for place in patches.places(&self.form) {
            patches.append(&self.form, place, &mut rows);
            self.positions.append(place, patches.grid, &mut rows);
            positions.push([0, place.0 as u32, place.1 as u32]);
        }
        let block = self.form.merge_size * self.form.merge_size;
        let outputs: Vec<u32> = (0..count as u32).step_by(block).collect();
        let span = Span { rows: 0..count, start: 0, pages: &[], ..Span::default() };
        let batch = Batch {
            tokens: &vec![0; count],
            spans: &[span],
            outputs: &outputs,
            rows: &rows,
            positions: &positions,
            ..Batch::default()
        };
        let mut values = vec![];
        self.executable.run(&batch, &mut NoExperts, &mut values)?;
        if values.iter().fold(false, |bad, v| bad | !v.is_finite()) {
            let path = model.checkpoint().path().into();
            let culprit = model.vision.as_ref().and_then(|vision| vision.encoder.find_not_finite());
            let reason = culprit.unwrap_or_else(|| "values overflow".into());
            return Err(Error::Vision {
                path,
                reason: format!("what the encoder makes is not finite: {reason}"),
            });
        }
        Ok(values)
    }

    /// The picture that begins with the id `first`, if it is alive.
    fn alive(&self, first: u32) -> Option<Arc<Picture>> {
        self.alive.get(&first).and_then(Weak::upgrade)
    }
}

/// What rows of a batch that are no tokens have in their place, and where all stand.
#[derive(Debug, Default)]
pub(crate) struct PictureRows {
    /// Of every row, with one of the vocabulary, which counts for nothing, where a picture is.
    tokens: Vec<u32>,
    rows: Vec<u32>,
    values: Vec<f32>,
    positions: Vec<[u32; 3]>,
}

impl PictureRows {
    /// Whether a batch of these sequences and tokens needs any.
    pub(crate) fn needed<'a>(mut parts: impl Iterator<Item = (&'a Session, &'a [u32])>) -> bool {
        parts.any(|(session, tokens)| {
            !session.pictures().is_empty() || tokens.iter().any(|token| is_picture(*token))
        })
    }

    /// Tokens of a batch whose sequences have these.
    pub(crate) fn tokens<'a>(&'a self, tokens: &'a [u32]) -> &'a [u32] {
        if self.tokens.is_empty() { tokens } else { &self.tokens }
    }

    /// For the rows of a batch.
    pub(crate) fn embeddings(&self) -> Embeddings<'_> {
        Embeddings { rows: &self.rows, values: &self.values }
    }

    /// Of every row; empty where all are at their place in the sequence.
    pub(crate) fn positions(&self) -> &[[u32; 3]] {
        &self.positions
    }
}

impl Engine {
    /// Reads the picture that a file's `bytes` hold: PNG, JPEG, WebP or GIF. The same picture is encoded once while it is
    /// alive, and for as long as no other was read.
    ///
    /// # Errors
    /// [`Error::Picture`] if the bytes are none; [`Error::Vision`] if the model was opened without
    /// [`Options::picture_pixels`](crate::Options::picture_pixels).
    pub fn read_picture(&mut self, bytes: &[u8]) -> Result<Arc<Picture>> {
        let Some(mut encoder) = self.encoder.take() else { return Err(self.no_encoder()) };
        let outcome = encoder.read(bytes, self.model());
        self.encoder = Some(encoder);
        outcome
    }

    /// The pictures that `session` has evaluated, without their rows: they stand in prompts that begin as it does.
    ///
    /// # Errors
    /// [`Error::Vision`] if it has some and the model was opened without its encoder.
    pub(crate) fn pictures_of(&self, session: &Session) -> Result<Vec<Arc<Picture>>> {
        let ranges = session.pictures().ranges();
        let Some(encoder) = &self.encoder else {
            return if ranges.is_empty() { Ok(vec![]) } else { Err(self.no_encoder()) };
        };
        let placeholder = encoder.form.placeholder;
        let picture = |range: Range<usize>| {
            Arc::new(Picture { tokens: session.tokens()[range].to_vec(), placeholder, values: vec![] })
        };
        Ok(ranges.into_iter().map(picture).collect())
    }

    fn no_encoder(&self) -> Error {
        let path = self.model().checkpoint().path().into();
        Error::Vision { path, reason: "the model was opened without its encoder".into() }
    }

    /// Whether the model reads pictures.
    pub fn reads_pictures(&self) -> bool {
        self.encoder.is_some()
    }

    /// Adds to `out` what `tokens` need, as rows from `row` on, that follow the first `position` tokens of `session` and then those
    /// of `before`.
    ///
    /// # Errors
    /// [`Error::Picture`] if a picture is not alive any more.
    pub(crate) fn add_picture_rows(
        &self,
        (session, position): (&Session, usize),
        (before, tokens): (&[u32], &[u32]),
        row: usize,
        out: &mut PictureRows,
    ) -> Result<()> {
        let mut places: Places = session.pictures().clone();
        places.cut(position);
        places.extend(position, before);
        let position = position + before.len();
        places.extend(position, tokens);
        out.positions.extend((0..tokens.len()).map(|index| places.rope_position(position + index)));
        out.tokens.extend(tokens.iter().map(|token| if is_picture(*token) { 0 } else { *token }));
        let mut picture: Option<Arc<Picture>> = None;
        for (index, token) in tokens.iter().enumerate().filter(|(_, token)| is_picture(**token)) {
            let gone =
                || Error::Picture { expected: "one that is alive".into(), got: "one that is not".into() };
            let (first, part) = places.part(position + index).ok_or_else(gone)?;
            if picture.as_ref().is_none_or(|picture| picture.tokens[0] != first) {
                picture = self.encoder.as_ref().and_then(|encoder| encoder.alive(first));
            }
            let own = picture
                .as_ref()
                .filter(|picture| picture.tokens.get(part) == Some(token))
                .ok_or_else(gone)?;
            let width = own.values.len() / own.tokens.len();
            out.rows.push((row + index) as u32);
            out.values.extend_from_slice(&own.values[part * width..(part + 1) * width]);
        }
        Ok(())
    }
}

/// An encoder has no experts.
struct NoExperts;

impl ExpertSource for NoExperts {
    fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> moeflux_compute::Result<()> {
        Ok(())
    }

    fn visit(
        &mut self,
        _: ExpertSetId,
        _: &[u32],
        _: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        Ok(())
    }
}
