//! Operations on slices that attention, norms and gates are made of.
//!
//! Sums run in several vectors of partial sums whose number depends on the level alone, so results are the same
//! bits at every call. All functions panic if slices that belong together differ in length.

use half::f16;

use super::simd::{Isa, Kernel, MAX_LANES, Simd};

/// Defines a function that runs its body as a [`Kernel`], with `isa` in scope.
macro_rules! kernel {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident($isa:ident, $($argument:ident: $type:ty),*)
        $(-> $output:ty)? $body:block
    ) => {
        $(#[$attribute])*
        #[allow(clippy::needless_lifetimes, reason = "the lifetime is that of the kernel's struct")]
        $visibility fn $name<'a>(simd: Simd, $($argument: $type),*) $(-> $output)? {
            struct CpuCall<'a> {
                $($argument: $type),*
            }

            impl<'a> Kernel for CpuCall<'a> {
                #[allow(unused_parens, reason = "functions without a result")]
                type Output = ($($output)?);

                #[inline(always)]
                fn run<I: Isa>(self, $isa: I) -> Self::Output {
                    let Self { $($argument),* } = self;
                    $body
                }
            }

            simd.run(CpuCall { $($argument),* })
        }
    };
}

/// Sets every element of `$to` to `$value`, in which the names of `$to` and `$from` stand for vectors.
macro_rules! update {
    ($isa:ident, $to:ident $(, $from:ident)*; $value:expr) => {{
        let n = $to.len();
        $(assert_eq!($from.len(), n, "lengths agree");)*
        let to = $to.as_mut_ptr();
        let mut i = 0;
        while i + I::LANES <= n {
            // SAFETY: i + LANES is at most the length of all slices.
            unsafe {
                let ($to, $($from),*) = ($isa.load(to.add(i)), $($isa.load($from.as_ptr().add(i))),*);
                $isa.store(to.add(i), $value);
            }
            i += I::LANES;
        }
        if i < n {
            let rest = n - i;
            // SAFETY: i + rest is the length of all slices.
            unsafe {
                let ($to, $($from),*) = (
                    $isa.load_first(to.add(i), rest),
                    $($isa.load_first($from.as_ptr().add(i), rest)),*
                );
                $isa.store_first(to.add(i), $value, rest);
            }
        }
    }};
}

kernel! {
    /// Σ a · b.
    pub fn dot_f32(isa, a: &'a [f32], b: &'a [f32]) -> f32 {
        let n = a.len();
        assert_eq!(b.len(), n, "lengths agree");
        let (a, b) = (a.as_ptr(), b.as_ptr());
        let mut sums = [isa.splat(0.0); 4];
        let mut i = 0;
        while i + 4 * I::LANES <= n {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = i + k * I::LANES;
                // SAFETY: at + LANES ≤ n.
                *sum = unsafe { isa.mul_add(isa.load(a.add(at)), isa.load(b.add(at)), *sum) };
            }
            i += 4 * I::LANES;
        }
        while i + I::LANES <= n {
            // SAFETY: i + LANES ≤ n.
            sums[0] = unsafe { isa.mul_add(isa.load(a.add(i)), isa.load(b.add(i)), sums[0]) };
            i += I::LANES;
        }
        if i < n {
            let rest = n - i;
            // SAFETY: i + rest = n.
            let (a, b) = unsafe { (isa.load_first(a.add(i), rest), isa.load_first(b.add(i), rest)) };
            sums[1] = isa.mul_add(a, b, sums[1]);
        }
        isa.reduce_add(isa.add(isa.add(sums[0], sums[1]), isa.add(sums[2], sums[3])))
    }
}

/// Σ x².
pub fn sum_of_squares(simd: Simd, x: &[f32]) -> f32 {
    dot_f32(simd, x, x)
}

kernel! {
    /// out += a · v.
    pub fn axpy_f32(isa, a: f32, v: &'a [f32], out: &'a mut [f32]) {
        let a = isa.splat(a);
        update!(isa, out, v; isa.mul_add(a, v, out));
    }
}

kernel! {
    /// x *= a.
    pub fn scale(isa, a: f32, x: &'a mut [f32]) {
        let a = isa.splat(a);
        update!(isa, x; isa.mul(x, a));
    }
}

kernel! {
    /// out += v.
    pub fn add(isa, v: &'a [f32], out: &'a mut [f32]) {
        update!(isa, out, v; isa.add(out, v));
    }
}

kernel! {
    /// out *= v.
    pub fn mul(isa, v: &'a [f32], out: &'a mut [f32]) {
        update!(isa, out, v; isa.mul(out, v));
    }
}

kernel! {
    /// out = (x · a) · w: a normalised row times its weights.
    pub fn scaled_product(isa, x: &'a [f32], a: f32, w: &'a [f32], out: &'a mut [f32]) {
        let a = isa.splat(a);
        update!(isa, out, x, w; {
            let _ = out;
            isa.mul(isa.mul(x, a), w)
        });
    }
}

kernel! {
    /// Σ x.
    pub fn sum(isa, x: &'a [f32]) -> f32 {
        let mut sum = isa.splat(0.0);
        let mut i = 0;
        while i + I::LANES <= x.len() {
            // SAFETY: i + LANES ≤ the length.
            sum = isa.add(sum, unsafe { isa.load(x.as_ptr().add(i)) });
            i += I::LANES;
        }
        if i < x.len() {
            // SAFETY: the rest ends where x does.
            sum = isa.add(sum, unsafe { isa.load_first(x.as_ptr().add(i), x.len() - i) });
        }
        isa.reduce_add(sum)
    }
}

/// The greatest element; −∞ if there is none. NaN elements may be passed over.
#[inline(always)]
fn greatest<I: Isa>(isa: I, x: &[f32]) -> f32 {
    if x.len() < I::LANES {
        return x.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    }
    let last = x.len() - I::LANES;
    // SAFETY: last + LANES is the length.
    let mut max = unsafe { isa.load(x.as_ptr().add(last)) };
    for i in (0..last).step_by(I::LANES) {
        // SAFETY: i < last.
        max = isa.max(max, unsafe { isa.load(x.as_ptr().add(i)) });
    }
    let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
    // SAFETY: LANES ≤ MAX_LANES.
    unsafe { isa.store(lanes.as_mut_ptr(), max) };
    // Halves with each other, which is done sooner than one element after the other.
    let mut half = MAX_LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = lanes[i].max(lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

kernel! {
    /// x = exp(x − max); returns Σx. With the maximum of x: a softmax, short of the division.
    pub fn exp_sum(isa, max: f32, x: &'a mut [f32]) -> f32 {
        sum_of_exp(isa, max, x)
    }
}

/// [`exp_sum`].
#[inline(always)]
fn sum_of_exp<I: Isa>(isa: I, max: f32, x: &mut [f32]) -> f32 {
    let n = x.len();
    let x = x.as_mut_ptr();
    let max = isa.splat(max);
    let mut sum = isa.splat(0.0);
    let mut i = 0;
    while i + I::LANES <= n {
        // SAFETY: i + LANES ≤ n.
        unsafe {
            let e = exp(isa, isa.sub(isa.load(x.add(i)), max));
            isa.store(x.add(i), e);
            sum = isa.add(sum, e);
        }
        i += I::LANES;
    }
    if i < n {
        let rest = n - i;
        // SAFETY: i + rest = n. Loaded again so that lanes past the end count as zero.
        unsafe {
            let e = exp(isa, isa.sub(isa.load_first(x.add(i), rest), max));
            isa.store_first(x.add(i), e, rest);
            sum = isa.add(sum, isa.load_first(x.add(i), rest));
        }
    }
    isa.reduce_add(sum)
}

kernel! {
    /// A block of each of some softmaxes that go over their scores block by block (Milakov and Gimelshein 2018). `scores`
    /// (softmaxes, n) become weights relative to the greatest score so far; `states`, which are the greatest score and the sum
    /// of weights, and the weighted sums `sums` (softmaxes, width) of the blocks before follow it.
    ///
    /// # Panics
    /// If there is no softmax, or one has no score or no sum.
    pub fn softmax_blocks(isa, scores: &'a mut [f32], states: &'a mut [(f32, f32)], sums: &'a mut [f32]) {
        let (n, width) = (scores.len() / states.len(), sums.len() / states.len());
        let each = scores.chunks_exact_mut(n).zip(sums.chunks_exact_mut(width)).zip(states);
        for ((scores, sums), (max, total)) in each {
            let greatest = max.max(greatest(isa, scores));
            if greatest > *max {
                let shrink = (*max - greatest).exp();
                let by = isa.splat(shrink);
                update!(isa, sums; isa.mul(sums, by));
                (*max, *total) = (greatest, *total * shrink);
            }
            *total += sum_of_exp(isa, greatest, scores);
        }
    }
}

kernel! {
    /// gate = silu(gate) · up, with silu(g) = g / (1 + exp(−g)).
    pub fn silu_mul(isa, gate: &'a mut [f32], up: &'a [f32]) {
        let (zero, one) = (isa.splat(0.0), isa.splat(1.0));
        update!(isa, gate, up; {
            let denominator = isa.add(one, exp(isa, isa.sub(zero, gate)));
            isa.mul(isa.div(gate, denominator), up)
        });
    }
}

kernel! {
    /// out += a · b.
    pub(crate) fn add_product(isa, a: &'a [f32], b: &'a [f32], out: &'a mut [f32]) {
        update!(isa, out, a, b; isa.mul_add(a, b, out));
    }
}

kernel! {
    /// x = silu(x) = x / (1 + exp(−x)).
    pub fn silu(isa, x: &'a mut [f32]) {
        let (zero, one) = (isa.splat(0.0), isa.splat(1.0));
        update!(isa, x; isa.div(x, isa.add(one, exp(isa, isa.sub(zero, x)))));
    }
}

kernel! {
    /// out *= sigmoid(gate), with sigmoid(g) = 1 / (1 + exp(−g)).
    pub fn sigmoid_mul(isa, gate: &'a [f32], out: &'a mut [f32]) {
        let (zero, one) = (isa.splat(0.0), isa.splat(1.0));
        update!(isa, out, gate; isa.div(out, isa.add(one, exp(isa, isa.sub(zero, gate)))));
    }
}

kernel! {
    /// x = limit · tanh(x / limit).
    pub fn soft_limit(isa, limit: f32, x: &'a mut [f32]) {
        let (two, limit) = (isa.splat(2.0), isa.splat(limit));
        update!(isa, x; {
            let e = exp_m1(isa, isa.mul(two, isa.div(x, limit)));
            isa.mul(limit, isa.div(e, isa.add(e, two)))
        });
    }
}

kernel! {
    /// Rounds to f16, ties to even.
    pub fn to_f16(isa, x: &'a [f32], out: &'a mut [f16]) {
        let n = x.len();
        assert_eq!(out.len(), n, "lengths agree");
        let (x, out) = (x.as_ptr(), out.as_mut_ptr().cast::<u16>());
        let mut i = 0;
        while i + I::LANES <= n {
            // SAFETY: i + LANES ≤ n; `f16` is a transparent wrapper of its bits.
            unsafe { isa.store_f16(out.add(i), isa.load(x.add(i))) };
            i += I::LANES;
        }
        if i < n {
            let mut lanes = [0; MAX_LANES];
            // SAFETY: i + (n − i) = n; LANES ≤ MAX_LANES.
            unsafe {
                isa.store_f16(lanes.as_mut_ptr(), isa.load_first(x.add(i), n - i));
                out.add(i).copy_from_nonoverlapping(lanes.as_ptr(), n - i);
            }
        }
    }
}

/// eˣ to about one unit in the last place, with subnormal results, zero, infinity and NaN where they
/// belong.
///
/// x = n · ln 2 + r with |r| ≤ ln 2 / 2; the polynomial for eʳ and the split of ln 2 are those of Cephes' expf.
#[inline(always)]
pub(crate) fn exp<I: Isa>(isa: I, x: I::F) -> I::F {
    // Beyond these the result is zero or infinite.
    let (n, p) = split_exp(isa, [-104.0, 89.0], x);
    let p = isa.add(p, isa.splat(1.0));

    // 2ⁿ in two factors, as n may lie outside the range of exponents.
    let (low, high) = (isa.sar::<1>(n), isa.sar::<1>(isa.add_u(n, isa.splat_u(1))));
    isa.mul(isa.mul(p, power_of_two(isa, low)), power_of_two(isa, high))
}

/// eˣ − 1 for x within ±20, of which the ends stand for what is beyond, to about one unit in the last place.
#[inline(always)]
fn exp_m1<I: Isa>(isa: I, x: I::F) -> I::F {
    let (n, p) = split_exp(isa, [-20.0, 20.0], x);
    let power = power_of_two(isa, n);
    isa.mul_add(p, power, isa.sub(power, isa.splat(1.0)))
}

/// n and eʳ − 1 for x, which is limited to a range. NaN passes.
#[inline(always)]
fn split_exp<I: Isa>(isa: I, [least, most]: [f32; 2], x: I::F) -> (I::U, I::F) {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const P: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_58e-2, 0.166_666_66, 0.5];

    // Written so that NaN passes.
    let x = isa.min(isa.splat(most), isa.max(isa.splat(least), x));
    let n = isa.round(isa.mul(x, isa.splat(std::f32::consts::LOG2_E)));
    let n_f32 = isa.to_f32(n);
    let r = isa.mul_add(n_f32, isa.splat(-LN2_HIGH), x);
    let r = isa.mul_add(n_f32, isa.splat(-LN2_LOW), r);

    let mut p = isa.splat(P[0]);
    for &coefficient in &P[1..] {
        p = isa.mul_add(p, r, isa.splat(coefficient));
    }
    (n, isa.mul_add(isa.mul(p, r), r, r))
}

/// 2ⁿ for n in −126..128.
#[inline(always)]
fn power_of_two<I: Isa>(isa: I, n: I::U) -> I::F {
    isa.of_bits(isa.shl::<23>(isa.add_u(n, isa.splat_u(127))))
}
