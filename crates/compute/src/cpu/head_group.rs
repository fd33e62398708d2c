//! The two products of attention for query heads that share keys and values: scores of a page's keys, and the weighted
//! sum of its values. A key or value is loaded once for several heads; each head's sums have an order of their own, so
//! that results depend on nothing else.

#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use half::f16;

use super::simd::{Isa, Kernel};

/// What keys and values are stored as.
pub(super) trait Element: Copy {
    /// `n` ≤ `LANES` elements from `p`, then zeros.
    ///
    /// # Safety
    /// `p` is valid for reads of as many.
    unsafe fn load<I: Isa>(isa: I, p: *const Self, n: usize) -> I::F;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const Self, n: usize) -> I::F {
        // SAFETY: by the caller.
        unsafe { if n == I::LANES { isa.load(p) } else { isa.load_first(p, n) } }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const Self, n: usize) -> I::F {
        // SAFETY: by the caller; `f16` is a transparent wrapper of its bits.
        unsafe { if n == I::LANES { isa.load_f16(p.cast()) } else { isa.load_first_f16(p.cast(), n) } }
    }
}

/// out\[h, k\] = scale · Σ q\[h\] · keys\[k\].
pub(super) struct Scores<'a, E> {
    /// (heads, dim), f32.
    pub(super) q: &'a [f32],
    /// (n, dim).
    pub(super) keys: &'a [E],
    pub(super) dim: usize,
    pub(super) scale: f32,
    /// (heads, n), f32.
    pub(super) out: &'a mut [f32],
}

impl<E: Element> Kernel for Scores<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let heads = self.q.len() / self.dim;
        let n = self.keys.len() / self.dim;
        assert!(self.q.len() == heads * self.dim && self.keys.len() == n * self.dim, "whole heads and keys");
        assert!(self.out.len() == heads * n, "a score for every head and key");
        let mut head = 0;
        // Sixteen sums fit registers, and are added up crosswise.
        while I::LANES == 16 && head + 8 <= heads {
            self.heads::<I, 8, 2>(isa, head, n);
            head += 8;
        }
        while head + 4 <= heads {
            if I::LANES == 16 {
                self.heads::<I, 4, 4>(isa, head, n);
            } else {
                self.heads::<I, 4, 2>(isa, head, n);
            }
            head += 4;
        }
        while head < heads {
            if I::LANES == 16 {
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
            self.tile::<I, H, K>(isa, head, key, n);
            key += K;
        }
        while key < n {
            self.tile::<I, H, 1>(isa, head, key, n);
            key += 1;
        }
    }

    #[inline(always)]
    fn tile<I: Isa, const H: usize, const K: usize>(&mut self, isa: I, head: usize, key: usize, n: usize) {
        let dim = self.dim;
        let mut sums = [[isa.splat(0.0); H]; K];
        let mut i = 0;
        while i < dim {
            let count = I::LANES.min(dim - i);
            let mut keys = [isa.splat(0.0); K];
            for k in 0..K {
                // SAFETY: within key `key` + k < n.
                keys[k] = unsafe { E::load(isa, self.keys.as_ptr().add((key + k) * dim + i), count) };
            }
            for h in 0..H {
                // SAFETY: within head `head` + h, one of the heads.
                let q =
                    unsafe { <f32 as Element>::load(isa, self.q.as_ptr().add((head + h) * dim + i), count) };
                for k in 0..K {
                    sums[k][h] = isa.mul_add(q, keys[k], sums[k][h]);
                }
            }
            i += I::LANES;
        }
        if H * K == 16 {
            let mut all = [isa.splat(0.0); 16];
            for h in 0..H {
                for k in 0..K {
                    all[h * K + k] = sums[k][h];
                }
            }
            let totals = isa.reduce_add_16(all);
            for (h, totals) in totals.chunks_exact(K).enumerate() {
                let out = &mut self.out[(head + h) * n + key..][..K];
                for k in 0..K {
                    out[k] = totals[k] * self.scale;
                }
            }
        } else {
            for h in 0..H {
                for k in 0..K {
                    self.out[(head + h) * n + key + k] = isa.reduce_add(sums[k][h]) * self.scale;
                }
            }
        }
    }
}

/// sums\[h\] += Σ weights\[h, k\] · values\[k\], in order of k.
pub(super) struct WeightedSums<'a, E> {
    /// (heads, n), f32.
    pub(super) weights: &'a [f32],
    /// (n, dim).
    pub(super) values: &'a [E],
    pub(super) dim: usize,
    /// (heads, dim), f32.
    pub(super) sums: &'a mut [f32],
}

impl<E: Element> Kernel for WeightedSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let heads = self.sums.len() / self.dim;
        let n = self.values.len() / self.dim;
        assert!(self.sums.len() == heads * self.dim && self.values.len() == n * self.dim, "whole vectors");
        assert!(self.weights.len() == heads * n, "a weight for every head and value");
        let mut head = 0;
        while I::LANES == 16 && head + 8 <= heads {
            self.heads::<I, 8>(isa, head, n);
            head += 8;
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
                // SAFETY: columns of a head; `C` > 1 only with whole vectors.
                let from = unsafe { self.sums.as_ptr().add((head + h) * dim + i + c * I::LANES) };
                // SAFETY: as above.
                sums[h][c] = unsafe { <f32 as Element>::load(isa, from, count) };
            }
        }
        for k in 0..n {
            let mut values = [isa.splat(0.0); C];
            for c in 0..C {
                // SAFETY: columns of value k < n.
                let from = unsafe { self.values.as_ptr().add(k * dim + i + c * I::LANES) };
                // SAFETY: as above.
                values[c] = unsafe { E::load(isa, from, count) };
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
