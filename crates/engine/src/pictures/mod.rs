//! Pictures in prompts: [`Picture`], and the encoder that makes one from a file.
//!
//! [`Engine::read_picture`] decodes a file, has the encoder make rows of it, and returns a [`Picture`]: ids that stand in a
//! prompt where the picture is. Evaluating such ids takes the rows of the picture in place of embeddings of tokens; it must
//! be alive then. A session that has evaluated them needs it no more.
//!
//! The encoder runs where the model does, on the first of several GPUs, but on the processor where a GPU has no kernels for it
//! or too little memory beside the model.

mod blocks;
mod decode;
mod resize;
mod sheet;
mod soft_tokens;
mod tiles;
pub(crate) mod tokens;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use image::RgbImage;
use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Embeddings, Executable, ExpertSource, ExpertView, KvType,
    Span,
};
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::quant::dequantize;
use xxhash_rust::xxh3::Xxh3;

use crate::engine::{Engine, Options};
use crate::models::{Model, PictureForm, Sizing, Vision};
use crate::session::Session;
use crate::{Error, Result};
use sheet::{Patches, PositionTable, Sheet};
use tiles::Tiling;
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
    /// What each of them is for the model.
    parts: Vec<Part>,
    /// (rows, levels · hidden_size), f32.
    values: Vec<f32>,
}

/// What an id of a picture is for the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// A row that the encoder made.
    Row(usize),
    /// A token of the vocabulary, which says where the picture begins, say.
    Token(u32),
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

    /// Rows around the id at `index` that follow each other; none where it is a token of the vocabulary.
    fn run(&self, index: usize) -> Range<usize> {
        let is_token = |part: &Part| matches!(part, Part::Token(_));
        if is_token(&self.parts[index]) {
            return index..index;
        }
        let (before, after) = self.parts.split_at(index);
        let start = before.iter().rposition(is_token).map_or(0, |at| at + 1);
        let end = after.iter().position(is_token).map_or(self.parts.len(), |at| index + at);
        start..end
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

/// A picture as an encoder sees it.
struct Seen {
    sheets: Vec<Sheet>,
    parts: Vec<Part>,
    /// Tokens of its height and width, where they have positions on those; else zeros.
    sides: [usize; 2],
}

impl PictureForm {
    /// Most rows that the encoder makes of a picture of so many pixels, and most patches that it sees.
    fn most(&self, most_pixels: usize) -> [usize; 2] {
        let block = self.merge_size * self.merge_size;
        match self.sizing {
            Sizing::Blocks { max_pixels, .. } => {
                let most = max_pixels.min(most_pixels).max(self.factor() * self.factor());
                let patches = most / (self.patch_size * self.patch_size);
                [patches / block, patches]
            }
            Sizing::SoftTokens { max_soft_tokens, .. } => {
                let tokens = soft_tokens::most_tokens(self, max_soft_tokens, most_pixels);
                [tokens, tokens * block]
            }
            Sizing::Tiles { side, .. } => {
                let most = self.tiling(most_pixels).map_or(1, |tiling| tiling.most);
                let sheets = if most > 1 { most + 1 } else { 1 };
                let patches = (side / self.patch_size) * (side / self.patch_size);
                // A row more for each sheet.
                [sheets * patches / block, sheets * (patches + 1)]
            }
        }
    }

    /// How pictures of up to so many pixels are cut into tiles, if they are.
    fn tiling(&self, most_pixels: usize) -> Option<Tiling> {
        match self.sizing {
            Sizing::Tiles { side, max_tiles, to_max_canvas, .. } => {
                let most = max_tiles.min(most_pixels / (side * side)).max(1);
                Some(Tiling { side, most, to_max_canvas })
            }
            _ => None,
        }
    }

    /// What the encoder sees of a picture that is read with at most `most_pixels`.
    ///
    /// # Errors
    /// [`Error::Picture`] if its sides are too different.
    fn see(&self, picture: &RgbImage, most_pixels: usize) -> Result<Seen> {
        let size = (picture.height() as usize, picture.width() as usize);
        let sheet = |(height, width)| Sheet::new(self, resize::resize(picture, width, height, self.filter));
        let block = self.merge_size * self.merge_size;
        let rows = |sheet: &Sheet| (0..sheet.grid.0 * sheet.grid.1 / block).map(Part::Row);
        match &self.sizing {
            Sizing::Blocks { min_pixels, max_pixels, .. } => {
                let sheet = sheet(blocks::size_of(self, [*min_pixels, *max_pixels], size, most_pixels)?);
                let sides = [sheet.grid.0, sheet.grid.1].map(|side| side / self.merge_size);
                Ok(Seen { parts: rows(&sheet).collect(), sheets: vec![sheet], sides })
            }
            Sizing::SoftTokens { max_soft_tokens, positions, begin, end } => {
                let tokens = soft_tokens::most_tokens(self, *max_soft_tokens, most_pixels);
                let sheet = sheet(soft_tokens::size_of(self, tokens, size)?);
                if sheet.grid.0.max(sheet.grid.1) > *positions {
                    let expected = format!("a side of at most {positions} patches");
                    return Err(Error::Picture {
                        expected,
                        got: format!("{} by {}", sheet.grid.1, sheet.grid.0),
                    });
                }
                let [begin, end] = [begin, end].map(|token| [Part::Token(*token)]);
                let parts = begin.into_iter().chain(rows(&sheet)).chain(end).collect();
                Ok(Seen { parts, sheets: vec![sheet], sides: [0; 2] })
            }
            Sizing::Tiles { side, tokens, .. } => {
                let tiling = self.tiling(most_pixels).expect("pictures are cut into tiles");
                let (sheets, canvas) = tiling.cut(self, picture);
                let each = (side / self.factor()) * (side / self.factor());
                Ok(Seen { parts: tiles::parts(tokens, canvas, each), sheets, sides: [0; 2] })
            }
        }
    }
}

impl Seen {
    /// What tells it from others.
    fn hash(&self) -> u128 {
        let mut hash = Xxh3::new();
        for sheet in &self.sheets {
            hash.update(sheet.pixels.as_raw());
        }
        // Ids say how many tokens its sides have, if those have positions.
        if self.sides == [0; 2] {
            let sizes = self.sheets.iter().flat_map(|sheet| [sheet.grid.0, sheet.grid.1]);
            sizes.for_each(|size| hash.update(&(size as u64).to_le_bytes()));
        }
        hash.digest128()
    }
}

fn compile_options(activations: ActivationMode, rows: usize) -> CompileOptions {
    CompileOptions { activations, kv_type: KvType::F32, max_rows: rows, ..CompileOptions::default() }
}

/// Where an encoder runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EncoderPlace {
    /// On the processor, whatever the model runs on.
    Processor,
    /// Beside the model, with so many bytes of the backend's own memory.
    Beside(u64),
}

impl EncoderPlace {
    /// That of the encoder of `model`, if it has one.
    ///
    /// # Errors
    /// If there is no device.
    pub(crate) fn new(model: &Model, backend: &dyn Backend, options: &Options) -> Result<Self> {
        let Some(vision) = &model.vision else { return Ok(Self::Beside(0)) };
        let graph = &vision.encoder.graph;
        let [_, rows] = vision.form.most(options.picture_pixels.unwrap_or(0));
        if backend.refuses(graph).is_some() {
            return Ok(Self::Processor);
        }
        let bytes = backend.bytes_beside(graph, compile_options(options.activations, rows))?;
        Ok(bytes.map_or(Self::Processor, Self::Beside))
    }

    /// Bytes of the backend's own memory.
    pub(crate) fn own_bytes(self) -> u64 {
        match self {
            Self::Processor => 0,
            Self::Beside(bytes) => bytes,
        }
    }
}

/// Bytes of the processor's memory that the encoder of `model` takes, besides its weights unless those are in a backend's own, for
/// pictures of up to as many pixels as `options` say; 0 if there is none.
///
/// # Errors
/// [`Error::Option`] for threads of the processor that cannot be meant.
pub(crate) fn memory(
    model: &Model,
    place: EncoderPlace,
    backend: &dyn Backend,
    options: &Options,
) -> Result<u64> {
    let Some(vision) = &model.vision else { return Ok(0) };
    let Vision { encoder, form, positions, .. } = &**vision;
    let [made, rows] = form.most(options.picture_pixels.unwrap_or(0));
    let compile = compile_options(options.activations, rows);
    let scratch = match place {
        EncoderPlace::Processor => {
            let scratch = options.processor.backend()?.scratch_bytes(&encoder.graph, compile) as u64;
            scratch.saturating_add(if backend.has_own_memory() { encoder.trunk_bytes() } else { 0 })
        }
        EncoderPlace::Beside(_) if backend.has_own_memory() => 0,
        EncoderPlace::Beside(_) => backend.scratch_bytes(&encoder.graph, compile) as u64,
    };
    let table = encoder.graph.weights()[positions.index()].matrix;
    let floats = (rows as u64)
        .saturating_mul(vision.row_width() as u64)
        .saturating_add((table.rows * table.cols) as u64);
    let made = ALIVE.saturating_mul(made).saturating_mul(form.levels * form.hidden_size) as u64;
    Ok(scratch.saturating_add(floats.saturating_add(made).saturating_mul(size_of::<f32>() as u64)))
}

/// Tokens that `model` needs to evaluate at once for pictures of up to so many pixels: all that attend to each other. 0 if none do.
pub(crate) fn tokens_at_once(model: &Model, most_pixels: usize) -> usize {
    let vision = model.vision.as_ref().filter(|_| model.looks_ahead());
    vision.map_or(0, |vision| vision.form.most(most_pixels)[0])
}

impl Encoder {
    /// The encoder of `model`, if it was recorded; `progress` gets the bytes of each weight.
    pub(crate) fn new(
        model: &Model,
        place: EncoderPlace,
        backend: &dyn Backend,
        options: &Options,
        progress: impl FnMut(u64),
    ) -> Result<Option<Self>> {
        let Some(vision) = &model.vision else { return Ok(None) };
        let Vision { encoder, form, positions, class } = &**vision;
        let most_pixels = options.picture_pixels.unwrap_or(0);
        let weights = encoder.load(progress)?;
        let table = &weights[positions.index()];
        let class = class.map(|class| dequantize(weights[class.index()].view())).transpose()?;
        let positions = PositionTable { width: table.cols(), values: dequantize(table.view())?, class };
        let compile = compile_options(options.activations, form.most(most_pixels)[1]);
        let executable = match place {
            EncoderPlace::Processor => {
                options.processor.backend()?.compile(&encoder.graph, weights, compile)?
            }
            EncoderPlace::Beside(_) => backend.compile_beside(&encoder.graph, weights, compile)?,
        };
        let (alive, last) = (HashMap::new(), None);
        Ok(Some(Self { form: form.clone(), executable, positions, most_pixels, alive, last }))
    }

    /// Reads a picture.
    fn read(&mut self, bytes: &[u8], model: &Model) -> Result<Arc<Picture>> {
        let decoded = decode::decode(bytes)?;
        let seen = self.form.see(&decoded, self.most_pixels)?;
        drop(decoded);
        let ids = tokens::ids(seen.hash(), seen.sides, seen.parts.len());
        if let Some(known) = self.alive.get(&ids[0]).and_then(Weak::upgrade).filter(|k| k.tokens == ids) {
            return Ok(known);
        }
        self.last = None;
        self.alive.retain(|_, picture| picture.strong_count() > 0);
        let alive = self.alive.values().filter_map(Weak::upgrade);
        let rows = |parts: &[Part]| parts.iter().filter(|part| matches!(part, Part::Row(_))).count();
        let wanted = rows(&seen.parts) + alive.map(|picture| rows(&picture.parts)).sum::<usize>();
        let most = ALIVE * self.form.most(self.most_pixels)[0];
        if wanted > most {
            return Err(Error::PicturesFull { wanted, most });
        }
        let values = self.encode(&Patches::new(&self.form, &seen.sheets, &self.positions), model)?;
        let (tokens, parts) = (ids, seen.parts);
        let picture = Arc::new(Picture { tokens, placeholder: self.form.placeholder, parts, values });
        self.alive.insert(picture.tokens[0], Arc::downgrade(&picture));
        self.last = Some(Arc::clone(&picture));
        Ok(picture)
    }

    /// (blocks, levels · hidden_size).
    fn encode(&mut self, patches: &Patches, model: &Model) -> Result<Vec<f32>> {
        let span = |rows: &Range<usize>| Span { rows: rows.clone(), start: 0, pages: &[], ..Span::default() };
        let spans: Vec<Span<'_>> = patches.sheets.iter().map(span).collect();
        let batch = Batch {
            tokens: &vec![0; patches.positions.len()],
            spans: &spans,
            outputs: &patches.blocks,
            rows: &patches.rows,
            positions: &patches.positions,
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
    sees: Vec<u32>,
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

    /// The last position that every row sees; empty where that is its own.
    pub(crate) fn sees(&self) -> &[u32] {
        &self.sees
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
            let tokens = session.tokens()[range].to_vec();
            Arc::new(Picture { tokens, placeholder, parts: vec![], values: vec![] })
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
    /// [`Error::Picture`] if a picture is not alive any more, or attention looks ahead at tokens of one that do not come along.
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
        let stand_in = self.encoder.as_ref().map_or(0, |encoder| encoder.form.stand_in);
        out.tokens.extend(tokens.iter().map(|token| if is_picture(*token) { stand_in } else { *token }));
        let (ahead, first_row) = (self.model().looks_ahead(), out.sees.len());
        if ahead {
            out.sees.extend((0..tokens.len()).map(|index| (position + index) as u32));
        }
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
            let at = match own.parts[part] {
                Part::Row(at) => at,
                Part::Token(token) => {
                    out.tokens[row + index] = token;
                    continue;
                }
            };
            let width =
                self.encoder.as_ref().map_or(0, |encoder| encoder.form.levels * encoder.form.hidden_size);
            out.rows.push((row + index) as u32);
            out.values.extend_from_slice(&own.values[at * width..(at + 1) * width]);
            if ahead {
                let last = index + own.run(part).end - 1 - part;
                if last >= tokens.len() {
                    return Err(Error::Picture {
                        expected: "all tokens of a picture in one batch, as they attend to each other".into(),
                        got: format!("some, without the last {}", last + 1 - tokens.len()),
                    });
                }
                out.sees[first_row + index] = (position + last) as u32;
            }
        }
        Ok(())
    }

    /// How many of `tokens`, which follow the first `position` tokens of `session` and then those of `before`, the next batch has, of
    /// up to `most`: another number where that would cut a picture whose tokens attend to each other.
    pub(crate) fn uncut(
        &self,
        (session, position): (&Session, usize),
        (before, tokens): (&[u32], &[u32]),
        most: usize,
    ) -> usize {
        let end = most.min(tokens.len());
        let cut = tokens.get(end).is_some_and(|token| is_picture(*token));
        if end == 0 || !cut || !self.model().looks_ahead() {
            return end;
        }
        let mut places: Places = session.pictures().clone();
        places.cut(position);
        places.extend(position, before);
        let position = position + before.len();
        places.extend(position, tokens);
        let Some((first, part)) = places.part(position + end) else { return end };
        let Some(picture) = self.encoder.as_ref().and_then(|encoder| encoder.alive(first)) else {
            return end;
        };
        let run = picture.run(part);
        let within = part.saturating_sub(run.start);
        if run.is_empty() || within == 0 {
            return end;
        }
        if within < end { end - within } else { (end + run.end - part).min(tokens.len()) }
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
