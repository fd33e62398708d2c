//! The scalar meaning of attention over tokens and entries: see [`CompressedAttention`].

use super::attention::softmax;
use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp, attend, dot};
use crate::Result;
use crate::backend::{PAGE_TOKENS, Span};
use crate::graph::{
    BlockAttentionOp, BlockInputs, CompressedAttention, CompressedAttentionOp, CompressedInputs, StateId,
    TokenForm, WindowMeanOp, WindowPool, WindowPoolOp,
};

/// One entry from the tokens that it depends on, oldest first: (kv, gate) of each, `bias` (window, channels). Of the
/// window before, there is nothing at the start of a sequence.
pub fn window_pool(shape: &WindowPool, bias: &[f32], tokens: &[(&[f32], &[f32])]) -> Vec<f32> {
    let (window, width, channels) = (shape.window, shape.width, shape.channels());
    let skipped = shape.held() + 1 - tokens.len();
    let channel = |c: usize| {
        let of = |i: usize| if shape.overlap && i + skipped >= window { width + c } else { c };
        let logit = |(i, (_, gate)): (usize, &(&[f32], &[f32]))| {
            gate[of(i)] + bias[(i + skipped) % window * channels + of(i)]
        };
        let logits: Vec<f32> = tokens.iter().enumerate().map(logit).collect();
        let weights = softmax(&logits);
        tokens.iter().zip(weights).enumerate().map(|(i, (t, w))| w * f64::from(t.0[of(i)])).sum::<f64>()
            as f32
    };
    (0..width).map(channel).collect()
}

/// What the index gives an entry with this key.
pub(super) fn index_score(q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    let heads = q.chunks_exact(key.len()).zip(weights);
    // `max` would drop a NaN.
    let relu = |v: f64| if v < 0.0 { 0.0 } else { v };
    let sum: f64 = heads.map(|(q, w)| f64::from(*w) * relu(f64::from(dot(q, key)))).sum();
    (sum / (q.len() as f64).sqrt()) as f32
}

impl ReferenceOp for WindowPoolOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let ([kv, gate], bias) = ([self.kv, self.gate].map(|value| call.of(value)), own.vector(self.bias)?);
        Ok(Outcome::Rows(own.pool([kv, gate], &bias, &self.shape, self.state, call.batch.spans)))
    }
}

impl ReferenceOp for WindowMeanOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        Ok(Outcome::Rows(own.window_mean(call.of(self.x), self.window, self.state, call.batch.spans)))
    }
}

impl ReferenceOp for CompressedAttentionOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let CompressedInputs { q, kv, entries, index, sinks } = self.inputs;
        let sinks = own.vector(sinks)?;
        let index = index.map(|index| {
            ([index.q, index.k].map(|value| call.of(value)), index.weights.map(|weights| call.of(weights)))
        });
        let inputs = [q, kv, entries].map(|value| call.of(value));
        let spans = call.batch.spans;
        Ok(Outcome::Rows(own.compressed_attention(self.cache.0, inputs, index, &sinks, spans)))
    }
}

impl ReferenceOp for BlockAttentionOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let BlockInputs { q, k, v, index } = self.inputs;
        let weights = index.weights.map(|weights| call.of(weights));
        let inputs = [q, k, v, index.q, index.k].map(|value| call.of(value));
        Ok(Outcome::Rows(own.block_attention(self.cache.0, inputs, weights, call.batch.spans)))
    }
}

impl Interpreter {
    fn pool(
        &mut self,
        [kv, gate]: [&Matrix; 2],
        bias: &[f32],
        shape: &WindowPool,
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let (channels, held) = (shape.channels(), shape.held());
        let mut out = vec![vec![0.0; shape.width]; kv.len()];
        for span in spans {
            let before = self.state(state, span);
            let mut tokens: Vec<(&[f32], &[f32])> =
                before.chunks_exact(2 * channels).map(|token| token.split_at(channels)).collect();
            for (i, row) in span.rows.clone().enumerate() {
                tokens.push((&kv[row], &gate[row]));
                let position = span.start + i;
                if shape.ends(position) {
                    let seen = (held + 1).min(position + 1);
                    out[row] = window_pool(shape, bias, &tokens[tokens.len() - seen..]);
                }
            }
            let last = &tokens[tokens.len() - held..];
            let after = last.iter().flat_map(|(kv, gate)| kv.iter().chain(*gate)).copied().collect();
            self.states.insert((state.0, span.slots.write), after);
        }
        out
    }

    fn compressed_attention(
        &mut self,
        cache: usize,
        [q, kv, entries]: [&Matrix; 3],
        index: Option<([&Matrix; 2], Option<&Matrix>)>,
        sinks: &[f32],
        spans: &[Span<'_>],
    ) -> Matrix {
        let shape: CompressedAttention = self.graph.compressed_caches[cache];
        let dim = shape.head_dim;
        let mut out = vec![vec![0.0; shape.heads * dim]; q.len()];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let mut store = |page: usize, at: usize, values: &[f32]| {
                    let page = self.compressed.entry((cache, span.pages[page]));
                    let page = page.or_insert_with(|| vec![0.0; shape.page_elements()]);
                    page[at..at + values.len()].copy_from_slice(values);
                };
                store(position / PAGE_TOKENS, position % PAGE_TOKENS * dim, &kv[row]);
                if (position + 1).is_multiple_of(shape.stride) {
                    let (page, place) = shape.place(shape.entries(position) - 1);
                    let at = PAGE_TOKENS * dim + place * shape.entry_width();
                    store(page, at, &entries[row]);
                    if let Some(([_, k], _)) = index {
                        store(page, at + dim, &k[row]);
                    }
                }
            }
            let page = |page: usize| &self.compressed[&(cache, span.pages[page])];
            let entry = |entry: usize| {
                let (at_page, place) = shape.place(entry);
                &page(at_page)[PAGE_TOKENS * dim + place * shape.entry_width()..][..shape.entry_width()]
            };
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let mut seen: Vec<usize> = (0..shape.entries(position)).collect();
                if let (Some(how), Some(([q, _], weights))) = (shape.index, index) {
                    let weights =
                        weights.map_or_else(|| vec![1.0; how.heads], |weights| weights[row].clone());
                    let score = |e: &usize| index_score(&q[row], &weights, &entry(*e)[dim..]);
                    seen.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
                    seen.truncate(how.top_k);
                }
                let first = (position + 1).saturating_sub(shape.window);
                let token = |p: usize| &page(p / PAGE_TOKENS)[p % PAGE_TOKENS * dim..][..dim];
                let tokens = (first..=position).map(token);
                let keys: Vec<&[f32]> = tokens.chain(seen.iter().map(|e| &entry(*e)[..dim])).collect();
                for (head, sink) in sinks.iter().enumerate() {
                    let at = head * dim..(head + 1) * dim;
                    attend(&q[row][at.clone()], &keys, &keys, shape.scale, Some(*sink), &mut out[row][at]);
                }
            }
        }
        out
    }

    fn window_mean(&mut self, x: &Matrix, window: usize, state: StateId, spans: &[Span<'_>]) -> Matrix {
        let mut out = x.clone();
        for span in spans {
            let before = self.state(state, span);
            let width = x[span.rows.start].len();
            let mut tokens: Vec<&[f32]> = before.chunks_exact(width).collect();
            for (i, row) in span.rows.clone().enumerate() {
                tokens.push(&x[row]);
                let seen = &tokens[tokens.len() - window..];
                let ends = (span.start + i + 1).is_multiple_of(window);
                let mean = |c: usize| seen.iter().map(|t| f64::from(t[c])).sum::<f64>() / window as f64;
                out[row] = (0..width).map(|c| if ends { mean(c) as f32 } else { 0.0 }).collect();
            }
            let after = tokens[tokens.len() - (window - 1)..].concat();
            self.states.insert((state.0, span.slots.write), after);
        }
        out
    }

    fn block_attention(
        &mut self,
        cache: usize,
        [q, k, v, index_q, index_k]: [&Matrix; 5],
        weights: Option<&Matrix>,
        spans: &[Span<'_>],
    ) -> Matrix {
        let shape: CompressedAttention = self.graph.compressed_caches[cache];
        let (dim, stride, width) = (shape.head_dim, shape.stride, shape.token_width());
        let TokenForm::Grouped { kv_heads } = shape.form else { unreachable!("checked when recorded") };
        let index = shape.index.expect("checked when recorded");
        let mut out = vec![vec![0.0; shape.heads * dim]; q.len()];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let mut store = |page: usize, at: usize, values: &[f32]| {
                    let page = self.compressed.entry((cache, span.pages[page]));
                    let page = page.or_insert_with(|| vec![0.0; shape.page_elements()]);
                    page[at..at + values.len()].copy_from_slice(values);
                };
                let token = [&k[row][..], &v[row]].concat();
                store(position / PAGE_TOKENS, position % PAGE_TOKENS * width, &token);
                if (position + 1).is_multiple_of(stride) {
                    let (page, place) = shape.place(shape.entries(position) - 1);
                    store(page, PAGE_TOKENS * width + place * shape.entry_width(), &index_k[row]);
                }
            }
            let page = |page: usize| &self.compressed[&(cache, span.pages[page])];
            let entry = |entry: usize| {
                let (at_page, place) = shape.place(entry);
                &page(at_page)[PAGE_TOKENS * width + place * shape.entry_width()..][..index.head_dim]
            };
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let weights = weights.map_or_else(|| vec![1.0; index.heads], |weights| weights[row].clone());
                let mut blocks: Vec<usize> = (0..shape.entries(position)).collect();
                let score = |e: &usize| index_score(&index_q[row], &weights, entry(*e));
                blocks.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
                blocks.truncate(index.top_k);
                let chosen = blocks.iter().flat_map(|block| block * stride..(block + 1) * stride);
                let seen: Vec<usize> = chosen.chain(shape.entries(position) * stride..position + 1).collect();
                let part =
                    |p: usize, at: usize| &page(p / PAGE_TOKENS)[p % PAGE_TOKENS * width + at..][..dim];
                for head in 0..shape.heads {
                    let kv_head = head / (shape.heads / kv_heads);
                    let keys: Vec<&[f32]> = seen.iter().map(|p| part(*p, kv_head * dim)).collect();
                    let values: Vec<&[f32]> =
                        seen.iter().map(|p| part(*p, (kv_heads + kv_head) * dim)).collect();
                    let at = head * dim..(head + 1) * dim;
                    attend(&q[row][at.clone()], &keys, &values, shape.scale, None, &mut out[row][at]);
                }
            }
        }
        out
    }
}
