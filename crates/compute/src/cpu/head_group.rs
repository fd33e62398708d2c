//! Attention of query heads that share keys and values, a block of keys after the other: scores of its keys, their softmax
//! so far, and the weighted sum of its values. A key or value is loaded once for several heads; each head's sums have an order
//! of their own, so that results depend on nothing else.

#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::ops::Range;

use half::f16;

use super::simd::{Isa, Kernel, Simd, prefetch_second};
use super::vector;
use crate::kv_type::Q8Block;

/// What keys and values are stored as: a unit of `LEN` elements. Keys, values and the vectors that they are in consist of
/// whole units.
pub(super) trait Element: Copy {
    /// Elements of a unit.
    const LEN: usize;

    /// `n` ≤ `LANES` elements from element `at` on, then zeros; whole vectors of a unit of several.
    ///
    /// # Safety
    /// `p` is valid for reads of the units that they are in.
    unsafe fn load<I: Isa>(isa: I, p: *const Self, at: usize, n: usize) -> I::F;
}

impl Element for f32 {
    const LEN: usize = 1;

    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const Self, at: usize, n: usize) -> I::F {
        // SAFETY: by the caller.
        unsafe { if n == I::LANES { isa.load(p.add(at)) } else { isa.load_first(p.add(at), n) } }
    }
}

impl Element for f16 {
    const LEN: usize = 1;

    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const Self, at: usize, n: usize) -> I::F {
        // SAFETY: by the caller; `f16` is a transparent wrapper of its bits.
        unsafe {
            let p = p.add(at).cast();
            if n == I::LANES { isa.load_f16(p) } else { isa.load_first_f16(p, n) }
        }
    }
}

impl Element for Q8Block {
    const LEN: usize = Self::LEN;

    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const Self, at: usize, _: usize) -> I::F {
        // Vectors of units are whole ones, as a unit is a multiple of them.
        const { assert!(Self::LEN.is_multiple_of(I::LANES)) };
        // SAFETY: by the caller.
        let block = unsafe { &*p.add(at / Self::LEN) };
        // SAFETY: `at` is a multiple of `LANES`, so that the vector ends within the block.
        let values = unsafe { isa.load_i8(block.values.as_ptr().add(at % Self::LEN)) };
        let scale = isa.f16_to_f32(isa.splat_u(block.scale.to_bits().into()));
        isa.mul(isa.to_f32(values), scale)
    }
}

/// Units of so many elements.
pub(super) fn units<E: Element>(all: &[E], elements: Range<usize>) -> &[E] {
    &all[elements.start / E::LEN..elements.end / E::LEN]
}

/// Query heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queries<'a> {
    /// Channels `dim` of head h begin at h · `stride`.
    pub(super) q: &'a [f32],
    pub(super) stride: usize,
    /// Of a query, and of a key.
    pub(super) dim: usize,
    /// Of scores.
    pub(super) scale: f32,
}

/// Keys, and their values.
pub(super) struct KeyBlock<'a, E> {
    /// (n, `dim` of the queries).
    pub(super) keys: &'a [E],
    /// Channels of value k begin at k · `stride`.
    pub(super) values: &'a [E],
    pub(super) stride: usize,
}

/// What heads have made of the keys so far.
pub(super) struct HeadSums<'a> {
    /// (heads): greatest score and sum of weights; −∞ and 0 before the first block.
    pub(super) states: &'a mut [(f32, f32)],
    /// (heads, channels of a value), f32; zeros before the first block.
    pub(super) sums: &'a mut [f32],
}

impl HeadSums<'_> {
    /// Adds a block. `scores` holds (heads, n) at least; `ahead` is fetched on the way through keys, and through values.
    pub(super) fn add<E: Element>(
        &mut self,
        simd: Simd,
        queries: Queries<'_>,
        block: KeyBlock<'_, E>,
        scores: &mut [f32],
        ahead: [Ahead; 2],
    ) {
        self.add_with(simd, queries, block, scores, ahead, |_| ());
    }

    /// As [`HeadSums::add`], with `change` applied to the scores (heads, n).
    pub(super) fn add_with<E: Element>(
        &mut self,
        simd: Simd,
        queries: Queries<'_>,
        block: KeyBlock<'_, E>,
        scores: &mut [f32],
        [while_keys, while_values]: [Ahead; 2],
        change: impl FnOnce(&mut [f32]),
    ) {
        let KeyBlock { keys, values, stride } = block;
        let (heads, n) = (self.states.len(), keys.len() * E::LEN / queries.dim);
        let (dim, scores) = (self.sums.len() / heads, &mut scores[..heads * n]);
        simd.run(Scores { queries, heads, keys, out: scores, ahead: while_keys });
        change(scores);
        vector::softmax_blocks(simd, scores, self.states, self.sums);
        let sums = &mut *self.sums;
        simd.run(WeightedSums { weights: scores, values, stride, dim, sums, ahead: while_values });
    }
}

/// Memory that is read after what is being read, fetched on the way: what comes in short runs from here and there is over
/// before a processor sees that it is read in order.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    at: *const u8,
    left: usize,
    /// Bytes for each key or value that is read.
    each: usize,
}

impl Ahead {
    /// Nothing.
    pub(super) const NONE: Self = Self { at: std::ptr::null(), left: 0, each: 0 };

    /// All of `next` on the way through `n` keys or values.
    pub(super) fn of<E>(next: &[E], n: usize) -> Self {
        let left = size_of_val(next);
        Self { at: next.as_ptr().cast(), left, each: left.div_ceil(n.max(1)) }
    }

    /// All of `next` at once, where nothing else can be done before it is there.
    pub(super) fn fetch<E>(next: &[E]) {
        Self::of(next, 1).advance(1);
    }

    /// `n` keys or values were read.
    #[inline(always)]
    fn advance(&mut self, n: usize) {
        let bytes = (n * self.each).min(self.left);
        for at in (0..bytes).step_by(64) {
            prefetch_second(self.at.wrapping_add(at));
        }
        self.at = self.at.wrapping_add(bytes);
        self.left -= bytes;
    }
}

/// out\[h, k\] = scale · Σ q\[h\] · keys\[k\].
struct Scores<'a, E> {
    queries: Queries<'a>,
    heads: usize,
    /// (n, dim).
    keys: &'a [E],
    /// (heads, n), f32.
    out: &'a mut [f32],
    /// Fetched on the way.
    ahead: Ahead,
}

impl<E: Element> Kernel for Scores<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let Queries { q, stride, dim, .. } = self.queries;
        let (heads, n) = (self.heads, self.keys.len() * E::LEN / dim);
        assert!(
            heads > 0 && q.len() >= (heads - 1) * stride + dim && self.keys.len() * E::LEN == n * dim,
            "whole vectors"
        );
        assert!(dim.is_multiple_of(E::LEN), "keys of whole units");
        assert!(self.out.len() == heads * n, "a score for every head and key");
        let mut head = 0;
        // Sixteen sums fit registers, and are added up crosswise.
        while head + 4 <= heads {
            if const { I::LANES == 16 } {
                self.heads::<I, 4, 4>(isa, head, n);
            } else {
                self.heads::<I, 4, 2>(isa, head, n);
            }
            head += 4;
        }
        while head < heads {
            if const { I::LANES == 16 } {
                self.heads::<I, 1, 16>(isa, head, n);
            } else {
                self.heads::<I, 1, 4>(isa, head, n);
            }
            head += 1;
        }
    }
}

impl<E: Element> Scores<'_, E> {
    /// `H` heads from `head` on, `K` keys at a time.
    #[inline(always)]
    fn heads<I: Isa, const H: usize, const K: usize>(&mut self, isa: I, head: usize, n: usize) {
        let mut key = 0;
        while key + K <= n {
            self.ahead.advance(K);
            self.tile::<I, H, K>(isa, head, key, n);
            key += K;
        }
        while key < n {
            self.ahead.advance(1);
            self.tile::<I, H, 1>(isa, head, key, n);
            key += 1;
        }
    }

    #[inline(always)]
    fn tile<I: Isa, const H: usize, const K: usize>(&mut self, isa: I, head: usize, key: usize, n: usize) {
        let Queries { q: queries, stride, dim, scale } = self.queries;
        let mut sums = [[isa.splat(0.0); H]; K];
        let mut i = 0;
        while i < dim {
            let count = I::LANES.min(dim - i);
            let mut keys = [isa.splat(0.0); K];
            for k in 0..K {
                // SAFETY: within key `key` + k < n.
                keys[k] = unsafe { E::load(isa, self.keys.as_ptr(), (key + k) * dim + i, count) };
            }
            for h in 0..H {
                // SAFETY: within head `head` + h, one of the heads.
                let q =
                    unsafe { <f32 as Element>::load(isa, queries.as_ptr(), (head + h) * stride + i, count) };
                for k in 0..K {
                    sums[k][h] = isa.mul_add(q, keys[k], sums[k][h]);
                }
            }
            i += I::LANES;
        }
        if const { H * K == 16 } {
            let mut all = [isa.splat(0.0); 16];
            for h in 0..H {
                for k in 0..K {
                    all[h * K + k] = sums[k][h];
                }
            }
            let totals = isa.reduce_add_16(all);
            for h in 0..H {
                for k in 0..K {
                    // SAFETY: K scores from key `key` on of one of the heads, which have n each.
                    unsafe {
                        *self.out.as_mut_ptr().add((head + h) * n + key + k) = totals[h * K + k] * scale
                    };
                }
            }
        } else {
            for h in 0..H {
                for k in 0..K {
                    self.out[(head + h) * n + key + k] = isa.reduce_add(sums[k][h]) * scale;
                }
            }
        }
    }
}

/// sums\[h\] += Σ weights\[h, k\] · values\[k\], in order of k.
struct WeightedSums<'a, E> {
    /// (heads, n), f32.
    weights: &'a [f32],
    /// Value k begins at k · `stride`.
    values: &'a [E],
    stride: usize,
    dim: usize,
    /// (heads, dim), f32.
    sums: &'a mut [f32],
    /// Fetched on the way.
    ahead: Ahead,
}

impl<E: Element> Kernel for WeightedSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let heads = self.sums.len() / self.dim;
        let n = self.weights.len() / heads;
        assert!(self.sums.len() == heads * self.dim && self.weights.len() == heads * n, "whole heads");
        let held = self.values.len() * E::LEN;
        assert!(n == 0 || held >= (n - 1) * self.stride + self.dim, "a value for every weight");
        assert!(
            self.stride.is_multiple_of(E::LEN) && self.dim.is_multiple_of(E::LEN),
            "values of whole units"
        );
        let mut head = 0;
        if const { I::LANES == 16 } {
            while head + 8 <= heads {
                self.heads::<I, 8>(isa, head, n);
                head += 8;
            }
        }
        while head + 4 <= heads {
            self.heads::<I, 4>(isa, head, n);
            head += 4;
        }
        while head < heads {
            self.heads::<I, 1>(isa, head, n);
            head += 1;
        }
    }
}

impl<E: Element> WeightedSums<'_, E> {
    #[inline(always)]
    fn heads<I: Isa, const H: usize>(&mut self, isa: I, head: usize, n: usize) {
        let mut i = 0;
        while i + 2 * I::LANES <= self.dim {
            self.columns::<I, H, 2>(isa, head, n, i, I::LANES);
            i += 2 * I::LANES;
        }
        while i < self.dim {
            self.columns::<I, H, 1>(isa, head, n, i, I::LANES.min(self.dim - i));
            i += I::LANES;
        }
    }

    /// `C` vectors of columns from `i` on, of which the last has `count` columns.
    #[inline(always)]
    fn columns<I: Isa, const H: usize, const C: usize>(
        &mut self,
        isa: I,
        head: usize,
        n: usize,
        i: usize,
        count: usize,
    ) {
        let dim = self.dim;
        let mut sums = [[isa.splat(0.0); C]; H];
        for h in 0..H {
            for c in 0..C {
                let at = (head + h) * dim + i + c * I::LANES;
                // SAFETY: columns of a head; `C` > 1 only with whole vectors.
                sums[h][c] = unsafe { <f32 as Element>::load(isa, self.sums.as_ptr(), at, count) };
            }
        }
        for k in 0..n {
            self.ahead.advance(1);
            let mut values = [isa.splat(0.0); C];
            for c in 0..C {
                let at = k * self.stride + i + c * I::LANES;
                // SAFETY: columns of value k < n.
                values[c] = unsafe { E::load(isa, self.values.as_ptr(), at, count) };
            }
            for h in 0..H {
                // SAFETY: there are n weights for each head.
                let weight = isa.splat(unsafe { *self.weights.get_unchecked((head + h) * n + k) });
                for c in 0..C {
                    sums[h][c] = isa.mul_add(weight, values[c], sums[h][c]);
                }
            }
        }
        for h in 0..H {
            for c in 0..C {
                // SAFETY: as where they were loaded.
                unsafe {
                    let to = self.sums.as_mut_ptr().add((head + h) * dim + i + c * I::LANES);
                    if count == I::LANES {
                        isa.store(to, sums[h][c]);
                    } else {
                        isa.store_first(to, sums[h][c], count);
                    }
                }
            }
        }
    }
}
