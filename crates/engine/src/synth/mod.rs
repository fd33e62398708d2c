//! Synthetic checkpoints: random weights at the shape of a published model, for measuring without a download.
//!
//! [`Plan`] lists the weights of a [`Recipe`]; [`Plan::write`] makes and writes them in pieces on several threads. A
//! piece's random numbers depend on the seed and its place only, so the same recipe gives the same bytes on any
//! number of threads. Blocks are random bits rather than quantised floats: writing is as fast as the disk.
//!
//! Such a model computes as much as the real one and routes to experts as unevenly as the recipe asks. It says
//! nothing that means anything.

mod blocks;
mod gguf;
mod mlx;
mod pieces;
mod shapes;
mod vocabulary;
mod weights;

use std::path::Path;

pub use shapes::{Architecture, SHAPES, Shape};

use crate::checkpoint::Format;
use crate::sampler::random::Random;
use crate::{Error, Result};
use weights::Weight;

/// How the weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// GGUF with llama.cpp's Q4_K_M mix.
    Q4KM,
    /// GGUF in Q8_0.
    Q8_0,
    /// GGUF in F16.
    F16,
    /// MLX, 4 bits in groups of 64, routers 8 bits.
    Mlx4Bit,
    /// MLX, 8 bits in groups of 64.
    Mlx8Bit,
}

impl Encoding {
    /// Every encoding; a format's first one is its usual one.
    pub const ALL: &[Self] = &[Self::Q4KM, Self::Q8_0, Self::F16, Self::Mlx4Bit, Self::Mlx8Bit];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4KM => "q4_k_m",
            Self::Q8_0 => "q8_0",
            Self::F16 => "f16",
            Self::Mlx4Bit => "4bit",
            Self::Mlx8Bit => "8bit",
        }
    }

    /// The format that has this encoding.
    pub fn format(self) -> Format {
        match self {
            Self::Q4KM | Self::Q8_0 | Self::F16 => Format::Gguf,
            Self::Mlx4Bit | Self::Mlx8Bit => Format::Mlx,
        }
    }

    /// The encoding called `name` that `format` has; without a name the usual one.
    ///
    /// # Errors
    /// [`Error::Option`] listing those that there are.
    pub fn by_name(format: Format, name: Option<&str>) -> Result<Self> {
        let of_format = || Self::ALL.iter().copied().filter(|encoding| encoding.format() == format);
        of_format().find(|encoding| name.is_none_or(|name| name == encoding.name())).ok_or_else(|| {
            let names: Vec<&str> = of_format().map(Self::name).collect();
            let got = name.unwrap_or("none").to_owned();
            Error::Option { option: "quant", expected: names.join(", "), got }
        })
    }
}

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
    /// Exponent of the experts' popularity: the expert of rank r is chosen about r^−s as often as the first. At 0 all
    /// are equally popular.
    pub router_skew: f32,
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
    weights: Vec<Weight>,
}

impl Plan {
    /// Checks `recipe` and lists its weights.
    ///
    /// # Errors
    /// [`Error::Option`] for layers or a skew that cannot be.
    pub fn new(recipe: Recipe) -> Result<Self> {
        let most = recipe.shape.num_hidden_layers;
        if !(1..=most).contains(&recipe.layers) {
            let expected = format!("1 to {most}, the layers of {}", recipe.shape.name);
            return Err(Error::Option { option: "layers", expected, got: recipe.layers.to_string() });
        }
        if !(0.0..=10.0).contains(&recipe.router_skew) {
            let (expected, got) = ("0 to 10".to_owned(), recipe.router_skew.to_string());
            return Err(Error::Option { option: "router-skew", expected, got });
        }
        Ok(Self { recipe, weights: weights::weights(&recipe)? })
    }

    /// Bytes of all weights; files have a few megabytes of header and vocabulary on top.
    pub fn bytes(&self) -> u64 {
        let planes =
            |w: &Weight| (0..w.dtype.planes()).map(|p| (w.rows() * w.row_bytes(p)) as u64).sum::<u64>();
        self.weights.iter().map(planes).sum()
    }

    /// Writes the checkpoint: to the file `path` for GGUF, into the existing folder `path` for MLX. Nothing is
    /// cleaned up after an error. `progress` gets the weight bytes written so far and says whether to go on.
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
            Format::Mlx | Format::HuggingFace => mlx::write(self, path, threads, progress),
            Format::Gguf => gguf::write(self, path, threads, progress),
        }
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
