//! Least-squares searches for the scale and base of a few dozen values, shared by the quantisers.
//!
//! For fixed integers q the best scale and base of w = scale · q + base solve a linear least-squares problem in
//! closed form; for a fixed line the best integers are the nearest ones. The searches start from some steps
//! around the one that just spans the values, alternate the two, and keep the best. All errors count alike:
//! without activations to learn from, no weight is known to matter more than another.
//!
//! Sums run over eight lanes in a fixed order, and nothing is contracted to fused multiply-adds: what is compiled
//! for AVX2 gives the same bits as what is not.

/// Lanes of a sum; the blocks searched here are multiples of it.
const LANES: usize = 8;
/// Most values that are searched at once.
const MAX_LEN: usize = 128;

/// Defines a function that runs `$body` in a copy compiled for AVX2 where the CPU has it. Neither copy is inlined:
/// with the length of the block known, LLVM unrolls its loops and then vectorises them badly (half the speed).
macro_rules! widest {
    ($(#[$doc:meta])* $name:ident = $body:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        $(#[$doc])*
        #[inline(never)]
        pub(super) fn $name($($arg: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) -> $result {
                    $body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has AVX2, as just checked.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

/// Range of the integers q.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) min: f32,
    pub(super) max: f32,
}

impl Span {
    /// The integer nearest to `v` (ties to even) within the span, as f32; `min` for NaN.
    #[inline(always)]
    pub(super) fn nearest(self, v: f32) -> f32 {
        // A sum with 1.5 · 2²³ has no room for fraction bits: the addition itself rounds.
        const SHIFT: f32 = 12_582_912.0;
        let v = if v > self.min { v } else { self.min };
        let v = if v < self.max { v } else { self.max };
        (v + SHIFT) - SHIFT
    }

    /// The largest integer of the span that is at most `v`; `min` for NaN.
    pub(super) fn floor(self, v: f32) -> f32 {
        let q = self.nearest(v);
        if q > v && q > self.min { q - 1.0 } else { q }
    }
}

/// w = scale · q + base.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Line {
    pub(super) scale: f32,
    pub(super) base: f32,
}

/// Sums over values x and the integers q nearest to them under some line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    /// Σ q
    pub(super) q: f32,
    /// Σ q²
    pub(super) qq: f32,
    /// Σ q · x
    pub(super) qx: f32,
    /// Σ (scale · q + base − x)²
    pub(super) error: f32,
}

widest! {
    /// Sums over `x` and the nearest integers.
    sums = sums_with(x: &[f32], line: Line, span: Span) -> Sums
}

widest! {
    /// The line with integers 0..=`q_max`, a scale of at least 0 and a base of at most `base_max` found closest
    /// to `x`.
    line = search_line(x: &[f32], q_max: f32, base_max: f32) -> Line
}

widest! {
    /// The scale of w = scale · q found closest to `x`.
    ray = search_ray(x: &[f32], span: Span) -> f32
}

impl Line {
    /// Reciprocal of the scale; 0, which makes 0 the nearest integer to everything, where there is none.
    fn inverse(self) -> f32 {
        let inverse = 1.0 / self.scale;
        if inverse.is_finite() { inverse } else { 0.0 }
    }

    /// The nearest integers to `x`, counted from the low end of the span.
    pub(super) fn assign(self, x: &[f32], span: Span, q: &mut [u8]) {
        let inverse = self.inverse();
        for (q, &x) in q.iter_mut().zip(x) {
            *q = (span.nearest((x - self.base) * inverse) - span.min) as u8;
        }
    }
}

#[inline(always)]
fn sums_with(x: &[f32], line: Line, span: Span) -> Sums {
    let inverse = line.inverse();
    let (mut q, mut e) = ([0.0; MAX_LEN], [0.0; MAX_LEN]);
    let (q, e) = (&mut q[..x.len()], &mut e[..x.len()]);
    for ((q, e), &x) in q.iter_mut().zip(&mut *e).zip(x) {
        *q = span.nearest((x - line.base) * inverse);
        *e = line.scale * *q + line.base - x;
    }
    Sums { q: total(q), qq: dot(q, q), qx: dot(q, x), error: dot(e, e) }
}

impl Sums {
    /// The best line for these integers of `n` values that add up to `sum`; none if they are all equal.
    #[inline(always)]
    fn solve(&self, n: f32, sum: f32, base_max: f32) -> Option<Line> {
        let determinant = n * self.qq - self.q * self.q;
        let scale = (n * self.qx - self.q * sum) / determinant;
        let base = (sum - scale * self.q) / n;
        let line = if base > base_max {
            Line { scale: (self.qx - base_max * self.q) / self.qq, base: base_max }
        } else {
            Line { scale, base }
        };
        (line.scale > 0.0 && line.scale.is_finite()).then_some(line)
    }
}

#[inline(always)]
fn search_line(x: &[f32], q_max: f32, base_max: f32) -> Line {
    // Steps tried: those under which the values span this many more than `q_max`.
    const EXTRA: [f32; 6] = [-1.0, -0.5, 0.0, 0.5, 1.0, 2.0];
    const ROUNDS: usize = 2;
    let (low, high) = extent(x);
    let low = if low < base_max { low } else { base_max };
    let range = high - low;
    let plain = Line { scale: high / q_max - low / q_max, base: low };
    // Sums of squares must not overflow.
    if !(range > 0.0 && range < 1e17) {
        return plain;
    }
    // Sums of values from the lowest up lose less to cancellation.
    let mut shifted = [0.0; MAX_LEN];
    let y = &mut shifted[..x.len()];
    for (y, x) in y.iter_mut().zip(x) {
        *y = x - low;
    }
    let (n, total) = (y.len() as f32, total(y));
    let span = Span { min: 0.0, max: q_max };
    let mut best = (Line { base: 0.0, ..plain }, f32::INFINITY);
    for extra in EXTRA {
        let mut trial = Line { scale: range / (q_max + extra), base: 0.0 };
        for round in 0..=ROUNDS {
            let sums = sums_with(y, trial, span);
            if sums.error < best.1 {
                best = (trial, sums.error);
            }
            match sums.solve(n, total, base_max - low) {
                Some(next) if round < ROUNDS => trial = next,
                _ => break,
            }
        }
    }
    Line { base: best.0.base + low, ..best.0 }
}

#[inline(always)]
fn search_ray(x: &[f32], span: Span) -> f32 {
    // As for the line; the largest magnitude goes to the longer, negative side of the span.
    const EXTRA: [f32; 5] = [-1.0, -0.5, 0.0, 0.5, 1.0];
    let (low, high) = extent(x);
    let peak = if high > -low { high } else { low };
    let mut best = (peak / span.min, f32::INFINITY);
    for extra in EXTRA {
        let mut trial = Line { scale: peak / (span.min - extra), base: 0.0 };
        for _ in 0..2 {
            let sums = sums_with(x, trial, span);
            if sums.error < best.1 {
                best = (trial.scale, sums.error);
            }
            if sums.qq == 0.0 {
                break;
            }
            trial.scale = sums.qx / sums.qq;
        }
    }
    best.0
}

/// Smallest and largest of `x`.
#[inline(always)]
fn extent(x: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    for x in x.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            low[i] = if x[i] < low[i] { x[i] } else { low[i] };
            high[i] = if x[i] > high[i] { x[i] } else { high[i] };
        }
    }
    (low.into_iter().fold(f32::INFINITY, f32::min), high.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

/// Σ a
#[inline(always)]
pub(super) fn total(a: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for a in a.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lanes[i] += a[i];
        }
    }
    fold(lanes)
}

/// Σ a · b
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    fold(lanes)
}

#[inline(always)]
fn fold(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values without a pattern, spread over ±`spread`.
    fn values(n: usize, seed: u32, spread: f32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next() * next() * spread).collect()
    }

    #[test]
    fn the_copy_for_avx2_gives_the_same_bits() {
        for seed in 0..200 {
            let x = values(16 << (seed % 4), seed, 10f32.powi(seed as i32 % 7 - 3));
            let span = Span { min: -32.0, max: 31.0 };
            assert_eq!(ray(&x, span).to_bits(), search_ray(&x, span).to_bits());
            for base_max in [0.0, f32::INFINITY] {
                let (a, b) = (line(&x, 15.0, base_max), search_line(&x, 15.0, base_max));
                assert_eq!((a.scale.to_bits(), a.base.to_bits()), (b.scale.to_bits(), b.base.to_bits()));
                let (a, b) = (sums(&x, a, span), sums_with(&x, b, span));
                let bits = |s: Sums| [s.q, s.qq, s.qx, s.error].map(f32::to_bits);
                assert_eq!(bits(a), bits(b));
            }
        }
    }

    #[test]
    fn values_on_a_line_are_found_exactly() {
        let x: Vec<f32> = (0..32).map(|i| 0.25 * (i * 7 % 16) as f32 - 1.5).collect();
        let found = line(&x, 15.0, 0.0);
        assert_eq!((found.scale, found.base), (0.25, -1.5));
        let x: Vec<f32> = (0..64).map(|i| -0.5 * (i - 32) as f32).collect();
        assert_eq!(ray(&x, Span { min: -32.0, max: 31.0 }), -0.5);
    }

    #[test]
    fn a_base_is_not_raised_over_its_maximum() {
        let x = values(32, 5, 0.1).iter().map(|v| v + 3.0).collect::<Vec<_>>();
        let found = line(&x, 15.0, 0.0);
        assert!(found.base <= 0.0, "{found:?}");
        assert!(sums(&x, found, Span { min: 0.0, max: 15.0 }).error < 0.1, "{found:?}");
    }
}
