//! Lowering of attention over keys that each row has chosen to `kernels/cuda/chosen_attention.cu`, for devices with warp groups.

use super::attend::floats;
use super::wide_latents::{QUERIES, THREADS, kernels, shared_bytes};
use crate::backend::{KvType, PAGE_TOKENS};
use crate::gpu::arguments::{ChosenAttentionConstants, PageConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering, kv_code};
use crate::gpu::memory::Band;
use crate::graph::{Chosen, CompressedAttention, LatentAttention, TokenForm};

/// Elements of the 16 bytes that are copied at once.
const PIECE: usize = 8;

/// Attention over keys that all heads of a row share.
pub(super) struct Gathered {
    kernel: &'static str,
    heads: usize,
    /// Channels of a key and of a value, and bytes of a query's channel.
    dims: [usize; 2],
    query_bytes: usize,
    scale: f32,
    layout: PageConstants,
    window: u32,
    top_k: usize,
    float_list: bool,
    /// (rows, top_k): what rows have chosen.
    list: Slice,
    cache: Slice,
    sinks: Option<Slice>,
}

impl Lowering<'_> {
    /// Whether a choice is one that the kernels know: of tokens, for all heads.
    pub(super) fn gathers_tokens(&self, chosen: &Chosen) -> bool {
        chosen.block == 1 && chosen.groups == 1
    }

    /// Attention over chosen tokens of a latent cache, where [`Lowering::takes_wide_latents`] and
    /// [`Lowering::gathers_tokens`] say that kernels suit it.
    pub(super) fn gathered_latents(
        &self,
        shape: &LatentAttention,
        chosen: &Chosen,
        sinks: Option<Slice>,
        cache: Slice,
    ) -> Gathered {
        let LatentAttention { heads, rank, rope, scale, .. } = *shape;
        let [_, kernel] = kernels(shape).expect("channels that there are kernels for");
        let width = rank + rope;
        let page = width * PAGE_TOKENS;
        // A token is an entry that stands for itself.
        let layout = PageConstants { page, token: 0, entry: width, stride: 1, kv_type: kv_code(KvType::F16) };
        Gathered {
            kernel,
            heads,
            dims: [width, rank],
            query_bytes: size_of::<u16>(),
            scale,
            layout,
            window: 0,
            top_k: chosen.blocks.width(),
            float_list: true,
            list: self.value(chosen.blocks),
            cache,
            sinks,
        }
    }

    /// Attention over a window of tokens and entries that stand for others, where the kernels suit it.
    pub(super) fn gathered_entries(
        &self,
        shape: &CompressedAttention,
        sinks: Option<Slice>,
        cache: Slice,
    ) -> Option<Gathered> {
        let CompressedAttention { form, heads, head_dim, scale, window, index, .. } = *shape;
        let layout = self.page_layout(shape);
        let PageConstants { page, token, entry, .. } = layout;
        let suits = form == TokenForm::Shared
            && head_dim == 512
            && scale > 0.0
            && self.memory.info.warp_groups
            && self.f16_cache()
            && [page, token, entry].iter().all(|elements| elements.is_multiple_of(PIECE));
        suits.then(|| Gathered {
            kernel: "chosen_attention_512_0",
            heads,
            dims: [head_dim; 2],
            query_bytes: size_of::<f32>(),
            scale,
            layout,
            window: u32::try_from(window).unwrap_or(u32::MAX),
            top_k: index.map_or(0, |index| index.top_k),
            float_list: false,
            list: self.memory.scratch.index.chosen.into(),
            cache,
            sinks,
        })
    }

    /// Queues attention of `query` (rows, heads · key channels). `out` is as that of [`Lowering::wide_latents`].
    pub(super) fn gathered(&mut self, g: &Gathered, [query, out]: [Slice; 2], width: Option<usize>) {
        for band in self.shape.bands() {
            let first = band.rows.start * g.heads;
            let query = query.at(first * g.dims[0] * g.query_bytes);
            self.gathered_of(g, &band, [query, out.at(floats(first * g.dims[1]))], width);
        }
    }

    fn gathered_of(&mut self, g: &Gathered, band: &Band, [query, out]: [Slice; 2], width: Option<usize>) {
        let [key, rank] = g.dims;
        let (rows, splits) = (band.rows.len(), band.splits);
        let [parts, stats] = self.splits_scratch();
        let to = if splits == 1 { out } else { parts };
        let list = g.list.at(band.rows.start * g.top_k * size_of::<u32>());
        let (places, sinks) = (self.places_from(band.rows.start), g.sinks.unwrap_or(self.input(0)));
        let buffers = [query, g.cache, list, places, self.pages(), sinks, stats, to];
        let PageConstants { page, token, entry, stride, .. } = g.layout;
        let [page, token, entry] = [page, token, entry].map(|elements| elements / PIECE);
        let constants = &ChosenAttentionConstants {
            heads: g.heads,
            rows,
            splits,
            scale: g.scale * std::f32::consts::LOG2_E,
            width: width.unwrap_or(0),
            page,
            token,
            entry,
            stride,
            window: g.window,
            top_k: g.top_k,
            float_list: g.float_list,
            has_sinks: g.sinks.is_some(),
        };
        let launch = Launch { unit: "cuda/chosen_attention", kernel: g.kernel, buffers: &buffers, constants };
        let works = rows * g.heads.div_ceil(QUERIES) * splits;
        let dispatch = launch.over([works.min(self.memory.info.multiprocessors), 1, 1], THREADS);
        self.run.push(Dispatch { shared: shared_bytes(key), ..dispatch });
        if splits > 1 {
            self.combine([parts, stats, out], rows * g.heads, splits, rank);
        }
    }
}
