//! Synthetic checkpoints: random weights at the shape of a published model, for measuring without a download.
//!
//! [`Plan`] lists the weights of a [`Recipe`]; [`Plan::write`] makes and writes them in pieces on several threads. A
//! piece's random numbers depend on the seed and its place only, so the same recipe gives the same bytes on any
//! number of threads. Blocks are random bits rather than quantised floats: writing is as fast as the disk. Or nothing is
//! written, and [`OpenOptions::open_synthetic`](crate::OpenOptions::open_synthetic) makes bytes when they are read.
//!
//! Such a model computes as much as the real one and routes to experts as unevenly as the recipe asks. It says
//! nothing that means anything.

pub(crate) mod blocks;
mod encodings;
mod folder;
mod gguf;
mod hub;
mod hub_blocks;
mod image;
mod low_bit;
mod mlx;
mod pieces;
mod shapes;
mod vocabulary;
mod weights;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use encodings::Encoding;
pub use shapes::{SHAPES, Shape};

use crate::checkpoint::{Checkpoint, CheckpointFile, Format, gguf as gguf_file};
use crate::models::{self, Model};
use crate::sampler::random::Random;
use crate::{Error, Result};
use encodings::Coding;
use image::Image;
use weights::{Contents, Weight};

/// What to make. Equal recipes make equal files.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Sizes.
    pub shape: Shape,
    /// Decoder layers, at most those of the shape.
    pub layers: usize,
    /// How weights are stored.
    pub encoding: Encoding,
    /// Seed of everything random.
    pub seed: u64,
    /// Skew of the routing: the expert of rank r is chosen about r^−s times as often as the first. At 0
    /// routing is uniform.
    pub router_skew: f32,
}

impl Recipe {
    /// All layers of `SHAPE` or `SHAPE:ENCODING`, with uniform routing.
    ///
    /// # Errors
    /// [`Error::Option`] listing the known shapes or encodings.
    pub fn whole(name: &str) -> Result<Self> {
        let (shape, encoding) =
            name.split_once(':').map_or((name, None), |(shape, encoding)| (shape, Some(encoding)));
        let shape = Shape::by_name(shape)?;
        let encoding = match encoding {
            None if !shape.has_gguf() => Encoding::by_name(Format::Mlx, None)?,
            named => Encoding::named(named)?,
        };
        Ok(Self { shape, layers: shape.layers(), encoding, seed: 0, router_skew: 0.0 })
    }
}

/// Leaves a configuration so many layers, and as many entries of lists that have one for each of them.
pub(crate) fn cut_layers(config: &mut serde_json::Value, layers: usize) {
    let names = models::names_of(config["model_type"].as_str().unwrap_or_default());
    let key = names.keys("num_hidden_layers").find(|key| config.get(key).is_some());
    let whole = std::mem::replace(&mut config[key.unwrap_or("num_hidden_layers")], layers.into()).as_u64();
    let lists = config.as_object_mut().into_iter().flatten().filter_map(|(_, value)| value.as_array_mut());
    lists.filter(|list| Some(list.len() as u64) == whole).for_each(|list| list.truncate(layers));
}

/// How writing ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The checkpoint is complete and on the disk.
    Complete,
    /// `progress` said to stop; what has been written is of no use.
    Stopped,
}

/// A checkpoint ready to be written.
#[derive(Debug)]
pub struct Plan {
    recipe: Recipe,
    model: Model,
    weights: Vec<Weight>,
}

impl Plan {
    /// Checks `recipe` and lists its weights.
    ///
    /// # Errors
    /// [`Error::Option`] for layers or a skew that cannot be.
    pub fn new(recipe: Recipe) -> Result<Self> {
        if recipe.encoding.format() == Format::Gguf && !recipe.shape.has_gguf() {
            let others = Encoding::ALL.iter().filter(|encoding| encoding.format() != Format::Gguf);
            let names: Vec<&str> = others.map(|encoding| encoding.name()).collect();
            let expected =
                format!("{}, as there are no GGUF files of {}", names.join(", "), recipe.shape.name);
            return Err(Error::Option { option: "quant", expected, got: recipe.encoding.name().to_owned() });
        }
        if recipe.encoding.is_by_columns() && recipe.router_skew > 0.0 {
            // Rows that write nothing to the constant channels would be columns.
            let (expected, got) =
                (format!("0 for {}", recipe.encoding.name()), recipe.router_skew.to_string());
            return Err(Error::Option { option: "router-skew", expected, got });
        }
        let most = recipe.shape.layers();
        if !(1..=most).contains(&recipe.layers) {
            let expected = format!("1 to {most}, the layers of {}", recipe.shape.name);
            return Err(Error::Option { option: "layers", expected, got: recipe.layers.to_string() });
        }
        if !(0.0..=10.0).contains(&recipe.router_skew) {
            let (expected, got) = ("0 to 10".to_owned(), recipe.router_skew.to_string());
            return Err(Error::Option { option: "router-skew", expected, got });
        }
        let shape = recipe.shape.parsed();
        let name = Path::new(recipe.shape.name);
        let format = recipe.encoding.format();
        let (mut config, metadata) = match format {
            Format::Gguf => (serde_json::Value::Null, shape.gguf_metadata(name, recipe.layers)),
            _ => (shape.config().clone(), gguf_file::Metadata::new(name)),
        };
        if config.is_object() {
            cut_layers(&mut config, recipe.layers);
        }
        let checkpoint = Arc::new(Checkpoint::outlined(name, format, config, metadata));
        let coding = Coding::new(&shape, recipe.encoding, recipe.layers);
        let (model, outlined) = models::outline(checkpoint, Box::new(coding))?;
        let embedding = outlined.iter().find(|w| w.name.ends_with("embed_tokens.weight"));
        let contents =
            Contents::new(&recipe, &shape, embedding.map_or(moeflux_compute::DType::F32, |w| w.dtype))?;
        let weights = outlined.into_iter().flat_map(|weight| contents.tensors(weight)).collect();
        Ok(Self { recipe, model, weights })
    }

    /// What the checkpoint will be: for sizing, not for running.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Encoding and bytes of every weight, under its name in the checkpoint.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, moeflux_compute::DType, &[usize], u64)> {
        self.weights.iter().map(|w| (w.name.as_str(), w.dtype, &w.shape[..], w.bytes()))
    }

    /// Bytes of all weights; files have a few megabytes of header and vocabulary on top.
    pub fn bytes(&self) -> u64 {
        self.weights.iter().map(Weight::bytes).sum()
    }

    /// Writes the checkpoint: to the file `path` for GGUF, into the existing folder `path` for others. Nothing is
    /// cleaned up after an error. `progress` gets the weight bytes written so far and says whether to continue.
    ///
    /// # Errors
    /// [`Error::Io`] if writing fails.
    pub fn write(
        &self,
        path: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Outcome> {
        match self.recipe.encoding.format() {
            Format::Mlx | Format::HuggingFace => folder::write(self, path, threads, progress),
            Format::Gguf => gguf::write(self, path, threads, progress),
        }
    }

    /// The checkpoint in one file called `synth:SHAPE` that is on no disk: names, shapes, encodings and sizes are those that
    /// [`Plan::write`] writes, random weights are others. With it the bytes of memory that this takes.
    pub(crate) fn in_memory(&self) -> Result<(Checkpoint, u64)> {
        let Recipe { shape, encoding, seed, .. } = self.recipe;
        let (name, format) = (PathBuf::from(format!("synth:{}", shape.name)), encoding.format());
        let (header, alignment, config) = match format {
            Format::Mlx | Format::HuggingFace => folder::header(self, &name)?,
            Format::Gguf => {
                let (header, alignment) = gguf::header(self, &name)?;
                (header, alignment, serde_json::Value::Null)
            }
        };
        let image = Image::new(seed, header, &self.weights, alignment);
        let (length, memory) = (image.length(), image.memory());
        let file = CheckpointFile::made(&name, length, Box::new(image));
        Ok((Checkpoint::made(format, file, config)?, memory))
    }
}

/// Token ids below `vocab_size`, for measuring with.
pub fn random_tokens(seed: u64, count: usize, vocab_size: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next_unit() * vocab_size as f64) as u32).collect()
}

/// The random numbers of one piece: the key is mixed so that neighbouring pieces have nothing in common.
fn stream(key: [u64; 3]) -> Random {
    let seed = key.into_iter().fold(0, |seed, part| Random::new(seed ^ part).next());
    Random::new(seed)
}
