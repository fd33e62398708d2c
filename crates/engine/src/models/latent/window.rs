//! Multi-head latent attention over a window of recent tokens. Attention over latents has no window, so that each head's keys and
//! values are made of them and kept: heads · (nope + rope + value) numbers a token in place of rank + rope.

use std::ops::Range;

use moeflux_compute::graph::{Attention, LatentAttention, Placement, Precision, Value};

use super::Latent;
use crate::Result;
use crate::models::recorder::Recorder;

/// Rows of `kv_b_proj` that give each head's `nope` channels of keys, `each` rows a head, and after them any `rope` others.
fn rows_of_keys(heads: usize, each: usize, [nope, rope]: [usize; 2]) -> Vec<Range<usize>> {
    let all = heads * each;
    let filling = || (0..rope).step_by(all).map(|first| 0..all.min(rope - first));
    (0..heads).flat_map(|head| std::iter::once(head * each..head * each + nope).chain(filling())).collect()
}

impl Latent {
    /// Attention of queries, and of what `kv_a_proj_with_mqa` gives, over the last `window` tokens.
    pub(super) fn over_window(
        &self,
        r: &mut Recorder,
        base: &str,
        [q, kv]: [Value; 2],
        window: usize,
    ) -> Result<Value> {
        let LatentAttention { heads, nope, rope, rank, value, scale } = self.shape;
        let (joint, each) = (format!("{base}.kv_b_proj"), nope + value);
        let (mut q, mut c, mut key) = (q, kv, None);
        if rope > 0 {
            c = r.graph.slice(kv, 1, 0, rank)?;
            key = Some(self.shared_key(r, base, kv)?);
            if let Some(rotation) = self.rope {
                let place = Placement { first: nope, inverse: false, stride: 1 };
                q = r.graph.placed_rope(q, heads, rotation, place)?;
            }
        }
        let c = self.normed(r, base, c)?;
        let rows = rows_of_keys(heads, each, [nope, rope]);
        let mut k = r.linear_part(c, &joint, heads * each, &rows, Precision::Fast)?;
        if let Some(key) = key {
            k = with_shared_key(r, k, key, [heads, nope, rope])?;
        }
        let rows: Vec<Range<usize>> = (1..=heads).map(|head| head * each - value..head * each).collect();
        let v = r.linear_part(c, &joint, heads * each, &rows, Precision::Fast)?;
        let grouped = Attention::grouped(heads, heads, nope + rope, scale);
        let shape = Attention { value_dim: value, window: Some(window), ..grouped };
        let sinks = self.sinks(r, base)?;
        Ok(r.graph.attention_with_sinks(q, k, v, shape, sinks)?)
    }
}

/// k (rows, heads · (nope + rope)) with `key` (rows, rope) in place of each head's last channels.
fn with_shared_key(r: &mut Recorder, k: Value, key: Value, [heads, nope, rope]: [usize; 3]) -> Result<Value> {
    let first = r.graph.slice(k, 1, 0, nope)?;
    let last = r.graph.slice(k, 1, 0, rope)?;
    let (ones, none) = (r.graph.clamp_between(first, [1.0; 2]), r.graph.clamp(last, 0.0));
    let kept = r.graph.join(ones, none);
    let kept = r.graph.repeat(kept, heads);
    let k = r.graph.product(k, kept)?;
    let before = r.graph.clamp(first, 0.0);
    let key = r.graph.join(before, key);
    let key = r.graph.repeat(key, heads);
    Ok(r.graph.add(k, key)?)
}
