//! Lowering to the kernels of `kernels/decode.h` and `kernels/cuda/tensor_decode.cu`: attention where every row is the newest
//! of a sequence of its own, and that of a few rows of one sequence, with the same bits.

use super::attend::floats;
use super::reach;
use crate::backend::KvType;
use crate::gpu::arguments::DecodeConstants;
use crate::gpu::device::{Dispatch, Order, Slice};
use crate::gpu::kernels::TENSOR_DECODE_UNIT;
use crate::gpu::lower::context::{Launch, Lowering, THREADS, named};
use crate::gpu::memory::{Band, SCALED_COLUMNS};
use crate::gpu::steps::Prepare;
use crate::graph::{Attention, Value, WeightId};

/// Splits of short sequences, which this kernel takes in one: up to 256 keys.
const SHORT: usize = 2;

/// Attention with what is done to its heads before.
pub(super) struct DecodeAttention<'a> {
    pub(super) shape: &'a Attention,
    pub(super) inputs: [Value; 3],
    pub(super) prepare: Prepare,
    /// Keys and values.
    pub(super) caches: [Slice; 2],
    pub(super) sinks: Option<WeightId>,
    pub(super) out: Value,
}

/// The kernel for rows of one band, and how their work is divided.
struct DecodeKernel {
    unit: &'static str,
    name: &'static str,
    /// Groups that share a key head, and parts that keys are divided into.
    chunks: usize,
    splits: usize,
}

/// What a dispatch does: see `appends` and `attends` of `kernels/heads.h`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Both,
    Append,
    Attend,
}

impl Lowering<'_> {
    /// Queues the attention; false if the kernels do not suit it.
    pub(super) fn decode_attention(&mut self, d: &DecodeAttention<'_>) -> bool {
        let Attention { head_dim, value_dim, .. } = *d.shape;
        let stepwise = self.shape.is_stepwise();
        let suits = (self.is_few() || self.is_batch())
            && (self.shape.sequences == self.shape.rows || stepwise)
            && self.rows == self.shape.rows;
        let is_f32 = self.memory.state.kv_type == KvType::F32;
        if !suits || value_dim != head_dim || is_f32 || !matches!(head_dim, 64 | 128 | 256) {
            return false;
        }
        if stepwise {
            // Rows see the keys of those before.
            self.shape.bands().for_each(|band| self.decode_band(d, &band, Task::Append, None));
        }
        let task = if stepwise { Task::Attend } else { Task::Both };
        // One kernel of those that are left rounds nothing.
        let rounds = |band: Band| {
            let DecodeKernel { unit, splits, .. } = self.decode_kernel(d.shape, &band);
            splits > 1 || unit != TENSOR_DECODE_UNIT
        };
        let rounded = self.rounded_for_reader(d.out).filter(|_| self.shape.bands().all(rounds));
        self.shape.bands().for_each(|band| self.decode_band(d, &band, task, rounded));
        if rounded.is_some() {
            self.entered = Some(d.out);
        }
        true
    }

    fn decode_kernel(&self, shape: &Attention, band: &Band) -> DecodeKernel {
        let (group, head_dim) = (shape.heads / shape.kv_heads, shape.head_dim);
        // Short sequences leave most of a device idle: a group a head. Longer ones share loads of keys between heads.
        let short = band.splits <= SHORT;
        // Many rows fill a device, however short.
        let shares = !short || self.is_batch();
        let tensor_cores = self.memory.scratch.tensor.is_some();
        let on_tensor_cores = tensor_cores && shares && group > 1 && head_dim <= 128;
        let queries = if !shares || group == 1 {
            1
        } else if on_tensor_cores {
            8
        } else {
            4
        };
        let chunks = group.div_ceil(queries);
        let splits = if short {
            1
        } else if on_tensor_cores {
            // So many that every multiprocessor has a group, where there are keys enough.
            let rows = if self.shape.is_stepwise() { 1 } else { self.rows };
            let groups = shape.kv_heads * chunks * rows;
            let least = if self.is_batch() { 1 } else { 2 };
            (self.memory.info.multiprocessors / groups).clamp(least, band.splits)
        } else {
            band.splits / 2
        };
        // Few keys and more groups than multiprocessors.
        let beside = short && shape.kv_heads * chunks * band.rows.len() > self.memory.info.multiprocessors;
        let name = match (head_dim, queries) {
            (128, 8) if beside => "tensor_decode_128_beside",
            (64, 8) => "tensor_decode_64",
            (128, 8) => "tensor_decode_128",
            (64, 1) => "decode_64_1",
            (64, _) => "decode_64_4",
            (128, 1) => "decode_128_1",
            (128, _) => "decode_128_4",
            (_, 1) => "decode_256_1",
            (..) => "decode_256_4",
        };
        let unit = if on_tensor_cores { TENSOR_DECODE_UNIT } else { "decode" };
        DecodeKernel { unit, name, chunks, splits }
    }

    /// Queues a band's dispatches; results are also rounded if there is a place for that.
    fn decode_band(&mut self, d: &DecodeAttention<'_>, band: &Band, task: Task, rounded: Option<[Slice; 3]>) {
        let Attention { heads, kv_heads, head_dim, scale, .. } = *d.shape;
        let DecodeKernel { unit, name, chunks, splits } = self.decode_kernel(d.shape, band);
        // What appends needs a group a key head.
        let (chunks, splits) = if task == Task::Append { (1, 1) } else { (chunks, splits) };
        let (angles, pairs, interleaved) = self.angles(d.prepare.rope);
        let (q_norm, k_norm) = (d.prepare.q_norm, d.prepare.k_norm);
        let weight = |norm: Option<(WeightId, f32)>| self.optional(norm.map(|(weight, _)| weight));
        let [parts, stats] = self.splits_scratch();
        let first = band.rows.start;
        let of_rows = |value: Value| self.value(value).at(floats(first * value.width()));
        let [q, k, v] = d.inputs.map(of_rows);
        let out = of_rows(d.out);
        let rounded = rounded.map(|[bytes, scales, factors]| {
            let before = first * d.out.width();
            [bytes.at(before), scales.at(floats(before / SCALED_COLUMNS * 2)), factors.at(floats(first))]
        });
        let [bytes, scales, factors] = rounded.unwrap_or([out; 3]);
        let mut buffers = vec![
            q,
            k,
            v,
            weight(q_norm),
            weight(k_norm),
            angles.at(floats(first * 2 * pairs)),
            self.places_from(first),
            self.pages(),
            self.optional(d.sinks),
            d.caches[0],
            d.caches[1],
            stats,
            if splits == 1 { out } else { parts },
        ];
        let eps = |norm: Option<(WeightId, f32)>| norm.map_or(0.0, |(_, eps)| eps);
        let [window, chunk] = reach(d.shape);
        let constants = DecodeConstants {
            heads,
            kv_heads,
            chunks,
            q_norm: q_norm.is_some(),
            k_norm: k_norm.is_some(),
            q_eps: eps(q_norm),
            k_eps: eps(k_norm),
            pairs,
            interleaved,
            scale,
            window,
            chunk,
            splits,
            has_sinks: d.sinks.is_some(),
            appends: task != Task::Attend,
            attends: task != Task::Append,
            rounds: splits == 1 && rounded.is_some(),
        };
        if unit == "decode" {
            buffers.extend([bytes, scales, factors]);
        }
        let rows = band.rows.len();
        let launch = Launch { unit, kernel: name, buffers: &buffers, constants: &constants };
        // Keys of rows before are read as soon as those of the cache.
        let order = if task == Task::Attend { Order::AfterEnd } else { Order::After };
        let dispatch = launch.over([kv_heads * chunks, splits, rows], THREADS);
        let dispatch = if self.f16_cache() { dispatch } else { named(dispatch, "q8_0") };
        self.run.push(Dispatch { order, ..dispatch });
        if splits > 1 {
            self.combine_rounded([parts, stats, out], [rows * heads, heads], splits, head_dim, rounded);
        }
    }
}
