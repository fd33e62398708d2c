//! Lowering of latent attention to `kernels/cuda/latent_attention.cu`, for devices with warp groups.

use super::attend::floats;
use crate::gpu::arguments::WideLatentsConstants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::gpu::memory::Band;
use crate::graph::LatentAttention;

/// Of `kernels/cuda/latent_groups.h`: queries of a tile, and threads.
pub(super) const QUERIES: usize = 64;
pub(super) const THREADS: u32 = 512;
/// Bytes of 64 rows of 64 channels.
const PART: usize = 64 * 64 * 2;

/// Shared memory of these kernels: queries, two tiles of keys of so many channels, weights.
pub(super) fn shared_bytes(key: usize) -> u32 {
    (1024 + 3 * key.div_ceil(64) * PART + PART) as u32
}

/// The kernels for latents and rotated keys of so many channels: of attention over all latents, and over chosen ones.
pub(super) fn kernels(shape: &LatentAttention) -> Option<[&'static str; 2]> {
    match (shape.rank, shape.rope) {
        (512, 64) => Some(["latent_attention_512_64", "chosen_attention_512_64"]),
        (256, 64) => Some(["latent_attention_256_64", "chosen_attention_256_64"]),
        (256, 32) => Some(["latent_attention_256_32", "chosen_attention_256_32"]),
        _ => None,
    }
}

impl Lowering<'_> {
    /// Whether these kernels suit an attention without sinks over all latents, or `gathered`'s one over some.
    pub(super) fn takes_wide_latents(&self, shape: &LatentAttention) -> bool {
        kernels(shape).is_some()
            && self.memory.scratch.tensor.is_some()
            && self.memory.info.warp_groups
            && self.reads_f16()
            && shape.scale > 0.0
    }

    /// Queues attention of queries in f16 over f16 pages. `out` is (rows, heads · rank); of one split, with a `width`, in the
    /// form that `latent_products` takes in tiles of so many tokens.
    pub(super) fn wide_latents(
        &mut self,
        shape: &LatentAttention,
        [query, latents, out]: [Slice; 3],
        width: Option<usize>,
    ) {
        let LatentAttention { heads, rank, rope, .. } = *shape;
        for band in self.shape.bands() {
            let first = band.rows.start * heads;
            let query = query.at(first * (rank + rope) * size_of::<u16>());
            self.wide_latents_of(shape, &band, [query, latents, out.at(floats(first * rank))], width);
        }
    }

    fn wide_latents_of(
        &mut self,
        shape: &LatentAttention,
        band: &Band,
        [query, latents, out]: [Slice; 3],
        width: Option<usize>,
    ) {
        let LatentAttention { heads, rank, rope, scale, .. } = *shape;
        let (rows, sequences, splits) = (band.rows.len(), self.shape.sequences, band.splits);
        let [parts, stats] = self.splits_scratch();
        let to = if splits == 1 { out } else { parts };
        let (of, places) = (self.input(self.layout.sequences), self.places_from(band.rows.start));
        let buffers = [query, latents, of, places, self.pages(), stats, to];
        let scale = scale * std::f32::consts::LOG2_E;
        let constants =
            &WideLatentsConstants { heads, rows, sequences, splits, scale, width: width.unwrap_or(0) };
        let [kernel, _] = kernels(shape).expect("channels that there are kernels for");
        let launch = Launch { unit: "cuda/latent_attention", kernel, buffers: &buffers, constants };
        let works = if splits == 1 {
            rows * heads / QUERIES + sequences
        } else {
            rows * heads.div_ceil(QUERIES) * splits
        };
        let dispatch = launch.over([works.min(self.memory.info.multiprocessors), 1, 1], THREADS);
        self.run.push(Dispatch { shared: shared_bytes(rank + rope), ..dispatch });
        if splits > 1 {
            self.combine([parts, stats, out], rows * heads, splits, rank);
        }
    }
}
