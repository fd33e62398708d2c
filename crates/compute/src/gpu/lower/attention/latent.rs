//! Lowering of latent attention: queries into the latent space, attention over latents, results out of it.

use super::attend::Attend;
use super::heads::{EnteredHeads, HeadPart};
use crate::backend::PAGE_TOKENS;
use crate::gpu::arguments::{AppendConstants, EnterLatentsConstants};
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS};
use crate::gpu::memory::{AttentionScratch, PANEL_COLUMNS, PANEL_TOKENS, TensorScratch};
use crate::gpu::steps::EnteringLatents;
use crate::graph::{LatentAttention, LatentInputs, LatentWeights, Value, WeightId};

/// What maps queries into the latent space; `halves`: to f16.
fn to_latents(weights: LatentWeights, shape: &LatentAttention, halves: bool) -> (WeightId, HeadPart) {
    let LatentAttention { nope, rope, rank, value, .. } = *shape;
    let (weight, rows, transposed) = match weights {
        LatentWeights::Joint(weight) => (weight, nope + value, true),
        LatentWeights::Split { k, .. } => (k, rank, false),
    };
    let stride = rank + rope;
    (weight, HeadPart { rows, first: 0, r#in: nope, each: nope, out: rank, transposed, stride, halves })
}

/// What makes values of latents.
fn to_values(weights: LatentWeights, shape: &LatentAttention) -> (WeightId, HeadPart) {
    let LatentAttention { nope, rank, value, .. } = *shape;
    let (weight, rows, first) = match weights {
        LatentWeights::Joint(weight) => (weight, nope + value, nope),
        LatentWeights::Split { v, .. } => (v, value, 0),
    };
    let (transposed, halves) = (false, false);
    (weight, HeadPart { rows, first, r#in: rank, each: rank, out: value, transposed, stride: value, halves })
}

impl Lowering<'_> {
    /// Queues what divides, normalises and rotates what attention starts from: latents and rotated keys to their pages, rotated
    /// channels of queries to theirs, as f16 if `halves`.
    fn enter_latents(
        &mut self,
        entering: &EnteringLatents,
        shape: &LatentAttention,
        [latents, query]: [Slice; 2],
        halves: bool,
    ) {
        let EnteringLatents { q, kv, norm: (weight, eps), rope: rotation } = *entering;
        let LatentAttention { heads, nope, rope, rank, .. } = *shape;
        let (angles, pairs, interleaved) = self.angles(rotation);
        let (places, pages) = (self.input(self.layout.places), self.pages());
        let buffers =
            [self.value(q), self.value(kv), self.vector(weight), angles, places, pages, latents, query];
        let kv_type = self.kv_code();
        let constants =
            &EnterLatentsConstants { heads, nope, rope, rank, pairs, interleaved, eps, halves, kv_type };
        let launch = Launch { unit: "latent", kernel: "enter_latents", buffers: &buffers, constants };
        let groups = 1 + (heads * rope).div_ceil(THREADS as usize);
        self.run.push(launch.over([self.rows, groups, 1], THREADS));
    }

    /// Queues what brings latents and rotated keys to their pages.
    fn append_latents(&mut self, parts: [Option<Value>; 2], latents: Slice, [rank, rope]: [usize; 2]) {
        let kv_type = self.kv_code();
        for (part, [start, len]) in parts.into_iter().zip([[0, rank], [rank, rope]]) {
            let to = AppendConstants { heads: 1, dim: rank + rope, start, len, kv_type };
            part.into_iter().for_each(|x| self.append(x, latents, to));
        }
    }

    /// Memory for products by warp groups where these suit a shape: activations in their form find room where results of
    /// attention go.
    fn wide_products(&self, shape: &LatentAttention) -> Option<TensorScratch> {
        let LatentAttention { nope, rank, value, .. } = *shape;
        let entered = self.rows.next_multiple_of(PANEL_TOKENS) * nope.next_multiple_of(PANEL_COLUMNS) * 2;
        let fits = nope.is_multiple_of(32)
            && nope <= rank
            && rank.is_multiple_of(PANEL_COLUMNS)
            && value.is_multiple_of(8)
            && entered <= self.rows * rank * 4;
        // Weights become f16.
        self.heads_scratch().filter(|_| fits && self.reads_f16())
    }

    pub(in crate::gpu::lower) fn latent_attention(
        &mut self,
        inputs: LatentInputs,
        weights: LatentWeights,
        cache: usize,
        entering: Option<EnteringLatents>,
        out: Value,
    ) {
        let LatentInputs { q_nope, c, rotated, sinks, chosen } = inputs;
        let shape = self.graph.latent_caches[cache];
        let LatentAttention { heads, nope, rope, rank, scale, .. } = shape;
        let latents = self.memory.state.latents[cache].slice();
        let width = rank + rope;
        let AttentionScratch { query, mixed, .. } = self.memory.scratch.attention;
        let (query, mixed) = (Slice::from(query), Slice::from(mixed));
        let out = self.value(out);
        let suits = chosen.as_ref().map_or(sinks.is_none(), |chosen| self.gathers_tokens(chosen));
        let on_groups = suits && self.takes_wide_latents(&shape);
        // Where each head's query begins, and how many columns further the next one's.
        let (q, each) = match entering {
            Some(EnteringLatents { q, .. }) => (self.value(q), nope + rope),
            None => (self.value(q_nope), nope),
        };
        match entering {
            Some(entering) => self.enter_latents(&entering, &shape, [latents, query], on_groups),
            None => self.append_latents([Some(c), rotated.map(|[_, k_rope]| k_rope)], latents, [rank, rope]),
        }
        let given = sinks.map(|sinks| self.vector(sinks));
        let listed = chosen.filter(|_| on_groups);
        let [read] = if on_groups { self.in_f16([latents], width * PAGE_TOKENS, [0; 2]) } else { [latents] };
        let gathered = listed.map(|chosen| self.gathered_latents(&shape, &chosen, given, read));
        let products = self.wide_products(&shape);
        let (k, part) = to_latents(weights, &shape, on_groups);
        match products {
            Some(scratch) => {
                let tile = self.heads_width(heads, rank);
                let entered = self.enter_heads(scratch, [q, mixed], [heads, nope, each], tile);
                self.wide_heads(scratch, k, part, entered, query);
            }
            None => self.heads(k, HeadPart { each, ..part }, [q, query]),
        }
        if let Some([q_rope, _]) = rotated.filter(|_| entering.is_none()) {
            self.copy_heads([self.value(q_rope), query], heads, [rope, width, rank], on_groups);
        }
        let (v, part) = to_values(weights, &shape);
        let tile = self.heads_width(heads, part.out);
        // Of one split, attention writes what the products take.
        let enters = on_groups && products.is_some() && self.shape.splits == 1;
        let tile_if_entered = enters.then_some(tile);
        if let Some(gathered) = gathered {
            self.gathered(&gathered, [query, mixed], tile_if_entered);
        } else if on_groups {
            self.wide_latents(&shape, [query, read, mixed], tile_if_entered);
        } else {
            let dims = [width, rank, width, width];
            let (reach, added, ahead) = ([0; 2], None, false);
            let attend = Attend { heads, kv_heads: 1, dims, scale, reach, sinks, chosen, added, ahead };
            self.attend(&attend, [query, latents, latents], mixed);
        }
        match products {
            Some(scratch) => {
                let entered = if enters {
                    EnteredHeads { x: mixed, width: tile, scaled: false }
                } else {
                    self.enter_heads(scratch, [mixed, query], [heads, rank, rank], tile)
                };
                self.wide_heads(scratch, v, part, entered, out);
            }
            None => self.heads(v, part, [mixed, out]),
        }
    }
}
