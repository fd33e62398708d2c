//! Lowering to the kernels of `kernels/attention.h`: appending to caches, attending with them, putting splits together.

use crate::gpu::arguments::{AppendConstants, AttendChosenConstants, AttendConstants, CombineConstants};
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS};
use crate::gpu::memory::Band;
use crate::graph::{Chosen, Value, WeightId};

/// Query heads that a group of the attention kernel handles, and its threads.
pub(super) const QUERIES: usize = 8;
pub(super) const ATTENTION_THREADS: u32 = 128;

/// Of a row's position and first page.
const PLACE_BYTES: usize = 2 * size_of::<u32>();

/// What the attention kernel is told.
pub(super) struct Attend {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Channels of a key and of a value, and of a cached row of each.
    pub(super) dims: [usize; 4],
    pub(super) scale: f32,
    /// Positions of a window and of a chunk, 0 for none.
    pub(super) reach: [u32; 2],
    pub(super) sinks: Option<WeightId>,
    /// The tokens that are seen; all when absent.
    pub(super) chosen: Option<Chosen>,
    /// (rows, heads · extent): added to scores, by distance.
    pub(super) added: Option<Value>,
    /// Whether rows that see keys after their own are to see those too.
    pub(super) ahead: bool,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Heads that share a key head and a choice.
pub(super) fn heads_that_share(a: &Attend, chosen: Chosen) -> usize {
    gcd(a.heads / a.kv_heads, a.heads / chosen.groups)
}

/// Bytes of so many floats.
pub(super) fn floats(count: usize) -> usize {
    count * size_of::<f32>()
}

impl Lowering<'_> {
    /// Where the places of rows from `row` on are.
    pub(super) fn places_from(&self, row: usize) -> Slice {
        self.input(self.layout.places + row * PLACE_BYTES)
    }

    /// Where the results of splits go, and their statistics.
    pub(super) fn splits_scratch(&self) -> [Slice; 2] {
        let scratch = self.memory.scratch.attention;
        [scratch.parts.into(), scratch.stats.into()]
    }

    /// Writes x (rows, heads · len) to channels of a cache.
    pub(super) fn append(&mut self, x: Value, cache: Slice, to: AppendConstants) {
        let buffers = [self.value(x), self.input(self.layout.places), self.pages(), cache];
        let dispatch = Launch { unit: "attention", kernel: "append", buffers: &buffers, constants: &to }
            .over([self.rows, 1, 1], THREADS);
        self.run.push(dispatch);
    }

    pub(super) fn attend(&mut self, a: &Attend, [q, keys, values]: [Slice; 3], out: Slice) {
        let [key_dim, value_dim, ..] = a.dims;
        for band in self.shape.bands() {
            let first = band.rows.start;
            let slices = [q.at(floats(first * a.heads * key_dim)), keys, values];
            let out = out.at(floats(first * a.heads * value_dim));
            match a.chosen {
                Some(chosen) => self.attend_chosen(a, chosen, &band, slices, out),
                None => self.attend_all(a, &band, slices, out),
            }
        }
        if a.ahead {
            self.attend_ahead(a, [q, keys, values], out);
        }
    }

    /// Attention, once more, of those rows that see keys after their own.
    pub(super) fn attend_ahead(&mut self, a: &Attend, slices: [Slice; 3], out: Slice) {
        let all = Band { rows: 0..self.rows, splits: 1 };
        self.attend_rows(a, (&all, true), slices, out);
    }

    fn attend_all(&mut self, a: &Attend, band: &Band, slices: [Slice; 3], out: Slice) {
        self.attend_rows(a, (band, false), slices, out);
    }

    /// Attention of the band's rows, or only of those of them that see keys after their own.
    fn attend_rows(
        &mut self,
        a: &Attend,
        (band, ahead): (&Band, bool),
        [q, keys, values]: [Slice; 3],
        out: Slice,
    ) {
        let chunks = (a.heads / a.kv_heads).div_ceil(QUERIES);
        let (rows, splits) = (band.rows.len(), band.splits);
        let [key_dim, value_dim, key_stride, value_stride] = a.dims;
        let [parts, stats] = self.splits_scratch();
        let to = if splits == 1 { out } else { parts };
        let first = band.rows.start;
        let places = self.places_from(first);
        let added =
            a.added.map_or(self.input(0), |added| self.value(added).at(floats(first * added.width())));
        let sees =
            if ahead { self.input(self.layout.sees + first * size_of::<u32>()) } else { self.input(0) };
        let sinks = self.optional(a.sinks);
        let buffers = [q, keys, values, added, places, sees, self.pages(), sinks, stats, to];
        let [window, chunk] = a.reach;
        let constants = AttendConstants {
            heads: a.heads,
            kv_heads: a.kv_heads,
            chunks,
            key_dim,
            value_dim,
            key_stride,
            value_stride,
            scale: a.scale,
            window,
            chunk,
            kv_type: self.kv_code(),
            splits,
            has_sinks: a.sinks.is_some(),
            extent: a.added.map_or(0, |added| added.width() / a.heads),
            ahead,
        };
        let dispatch =
            Launch { unit: "attention", kernel: "attend", buffers: &buffers, constants: &constants }
                .over([a.kv_heads * chunks, splits, rows], ATTENTION_THREADS);
        self.run.push(dispatch);
        if splits > 1 {
            self.combine([parts, stats, out], rows * a.heads, splits, value_dim);
        }
    }

    fn attend_chosen(
        &mut self,
        a: &Attend,
        chosen: Chosen,
        band: &Band,
        [q, keys, values]: [Slice; 3],
        out: Slice,
    ) {
        let share = heads_that_share(a, chosen);
        let (chunks, rows, splits) = (share.div_ceil(QUERIES), band.rows.len(), band.splits);
        let [parts, stats] = self.splits_scratch();
        let to = if splits == 1 { out } else { parts };
        let first = band.rows.start;
        let blocks = self.value(chosen.blocks).at(floats(first * chosen.blocks.width()));
        let places = self.places_from(first);
        let buffers = [q, keys, values, blocks, places, self.pages(), self.optional(a.sinks), stats, to];
        let [key_dim, value_dim, key_stride, value_stride] = a.dims;
        let on_tensor_cores = self.block_attention(a, chosen, band, [q, keys, values, blocks, to]);
        let constants = AttendChosenConstants {
            heads: a.heads,
            kv_heads: a.kv_heads,
            share,
            chunks,
            key_dim,
            value_dim,
            key_stride,
            value_stride,
            scale: a.scale,
            kv_type: self.kv_code(),
            splits,
            has_sinks: a.sinks.is_some(),
            groups: chosen.groups,
            top_k: chosen.blocks.width() / chosen.groups,
            block: chosen.block,
            tail: chosen.tail,
        };
        let (unit, kernel) = ("attention", "attend_chosen");
        let plain = || {
            let launch = Launch { unit, kernel, buffers: &buffers, constants: &constants };
            launch.over([a.heads / share * chunks, splits, rows], ATTENTION_THREADS)
        };
        let dispatch = on_tensor_cores.unwrap_or_else(plain);
        self.run.push(dispatch);
        if splits > 1 {
            self.combine([parts, stats, out], rows * a.heads, splits, a.dims[1]);
        }
    }

    /// Puts the splits of attention together, of so many heads of all rows.
    pub(super) fn combine(&mut self, buffers: [Slice; 3], heads: usize, splits: usize, value_dim: usize) {
        self.combine_rounded(buffers, [heads, heads], splits, value_dim, None);
    }

    /// The same for heads of all rows and of one, also rounded to eight bits if there is a place for it.
    pub(super) fn combine_rounded(
        &mut self,
        [parts, stats, out]: [Slice; 3],
        [heads, of_row]: [usize; 2],
        splits: usize,
        value_dim: usize,
        rounded: Option<[Slice; 3]>,
    ) {
        let constants = CombineConstants { splits, value_dim, rounds: rounded.is_some(), heads: of_row };
        let [bytes, scales, factors] = rounded.unwrap_or([out; 3]);
        let buffers = [parts, stats, out, bytes, scales, factors];
        let launch =
            Launch { unit: "attention", kernel: "combine", buffers: &buffers, constants: &constants };
        let dispatch = launch.over([heads, value_dim.div_ceil(32), 1], ATTENTION_THREADS);
        self.run.push(dispatch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::arguments::{BatchEnterConstants, NormConstants};
    use crate::gpu::device::Device;
    use crate::gpu::emulator::Emulator;

    /// What is put together is rounded as it is where it enters a product: codes, scales and factors.
    #[test]
    fn splits_put_together_are_rounded_as_products_round() {
        const ROWS: usize = 3;
        const HEADS: usize = 2;
        const DIM: usize = 96;
        const SPLITS: usize = 5;
        const COLS: usize = HEADS * DIM;
        let floats = |n: usize, seed: usize| -> Vec<u8> {
            let values = (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 * 0.13 - 5.0);
            values.flat_map(f32::to_le_bytes).collect()
        };
        let stats: Vec<u8> = (0..2 * ROWS * HEADS * SPLITS)
            .flat_map(|i| if i % 2 == 0 { (i % 7) as f32 } else { 0.5 + (i % 3) as f32 }.to_le_bytes())
            .collect();
        for mut device in [Emulator::new(5), Emulator::new(6).metal()] {
            let mut uploaded = |bytes: &[u8]| {
                let buffer = device.alloc(bytes.len()).unwrap();
                device.upload(buffer.into(), bytes).unwrap();
                Slice::from(buffer)
            };
            let sizes = [COLS, COLS / 4, 4].map(|bytes| ROWS * bytes);
            let own = sizes.map(|bytes| uploaded(&vec![0x55; bytes]));
            let expected = sizes.map(|bytes| uploaded(&vec![0xaa; bytes]));
            let parts = uploaded(&floats(ROWS * HEADS * SPLITS * DIM, 1));
            let [stats, out] = [uploaded(&stats), uploaded(&vec![0; ROWS * COLS * 4])];
            let constants = CombineConstants { splits: SPLITS, value_dim: DIM, rounds: true, heads: HEADS };
            let buffers = [parts, stats, out, own[0], own[1], own[2]];
            let combine =
                Launch { unit: "attention", kernel: "combine", buffers: &buffers, constants: &constants };
            let buffers = [out, out, expected[0], expected[1], expected[2]];
            let constants = BatchEnterConstants { norm: NormConstants::default(), cols: COLS };
            let enter =
                Launch { unit: "batch", kernel: "batch_enter", buffers: &buffers, constants: &constants };
            let combine = combine.over([ROWS * HEADS, DIM / 32, 1], ATTENTION_THREADS);
            device.run(&[combine, enter.over([ROWS, 1, 1], 256)]).unwrap();
            for ((own, expected), bytes) in own.into_iter().zip(expected).zip(sizes) {
                let [mut got, mut wanted] = [vec![0; bytes], vec![0; bytes]];
                device.download(own, &mut got).unwrap();
                device.download(expected, &mut wanted).unwrap();
                assert_eq!(got, wanted);
            }
        }
    }
}
