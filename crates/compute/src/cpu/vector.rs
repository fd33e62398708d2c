//! Vector arithmetic of attention, norms and activations. Sums run in 16 lanes that are added pairwise at the end,
//! the same way at every level, so that results depend on the inputs alone.

use super::simd::for_every_level;

/// Lanes that sums are kept in.
const LANES: usize = 16;

/// Adds lanes pairwise.
#[inline(always)]
fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

for_every_level! {
    /// Σ a·b over the shorter length.
    pub fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
        let n = a.len().min(b.len());
        let (a, b) = (&a[..n], &b[..n]);
        // Two sets of lanes hide the latency of the additions.
        let mut lanes = [[0.0f32; LANES]; 2];
        let (mut a_blocks, mut b_blocks) = (a.chunks_exact(2 * LANES), b.chunks_exact(2 * LANES));
        for (a, b) in (&mut a_blocks).zip(&mut b_blocks) {
            for i in 0..LANES {
                lanes[0][i] += a[i] * b[i];
                lanes[1][i] += a[LANES + i] * b[LANES + i];
            }
        }
        for (i, (a, b)) in a_blocks.remainder().iter().zip(b_blocks.remainder()).enumerate() {
            lanes[i / LANES][i % LANES] += a * b;
        }
        let [mut sum, second] = lanes;
        for i in 0..LANES {
            sum[i] += second[i];
        }
        reduce(sum)
    }
}

for_every_level! {
    /// Σ x².
    pub fn sum_of_squares(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let mut blocks = x.chunks_exact(LANES);
        for block in &mut blocks {
            for i in 0..LANES {
                lanes[i] += block[i] * block[i];
            }
        }
        for (lane, v) in lanes.iter_mut().zip(blocks.remainder()) {
            *lane += v * v;
        }
        reduce(lanes)
    }
}

for_every_level! {
    /// out += a · x.
    pub fn axpy_f32(out: &mut [f32], a: f32, x: &[f32]) {
        for (o, v) in out.iter_mut().zip(x) {
            *o += a * v;
        }
    }
}

for_every_level! {
    /// x ← a · x.
    pub fn scale(x: &mut [f32], a: f32) {
        for v in x.iter_mut() {
            *v *= a;
        }
    }
}

/// eˣ, within 2 units in the last place: 2ᵏ · p(r) with r = x − k·ln 2 in two parts (Cody & Waite), p the minimax
/// polynomial of degree 6 on ±½ ln 2. NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 · 2²³ rounds to an integer, ties to even.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let k = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - k * 0.693_359_4) + k * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = (p * r) * r + r + 1.0;
    // 2ᵏ in two factors, so that results below the smallest normal number come out right.
    let k = k as i32;
    let half = k >> 1;
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    p * power(half) * power(k - half)
}

for_every_level! {
    /// x ← e^(x − max); returns the sum.
    pub fn exp_sum(x: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        let mut blocks = x.chunks_exact_mut(LANES);
        for block in &mut blocks {
            for i in 0..LANES {
                block[i] = exp(block[i] - max);
                lanes[i] += block[i];
            }
        }
        for (lane, v) in lanes.iter_mut().zip(blocks.into_remainder()) {
            *v = exp(*v - max);
            *lane += *v;
        }
        reduce(lanes)
    }
}

for_every_level! {
    /// gate ← silu(gate) · up.
    pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = *g / (1.0 + exp(-*g)) * u;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Simd;

    /// Values from −range to range of a fixed sequence.
    fn values(n: usize, seed: u32, range: f32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next() * range).collect()
    }

    #[test]
    fn exp_is_accurate_everywhere() {
        for i in -1040..887 {
            let x = i as f32 / 10.0 + 0.037;
            let (got, exact) = (f64::from(exp(x)), f64::from(x).exp());
            let ulp = f64::from(f32::EPSILON) * exact.max(f64::from(f32::MIN_POSITIVE));
            assert!((got - exact).abs() <= 2.0 * ulp, "exp({x}) = {got}, exactly {exact}");
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(200.0)), (1.0, exp(-104.0), f32::INFINITY));
    }

    #[test]
    fn all_levels_give_the_same_bits() {
        for n in [1, 15, 16, 31, 32, 33, 100, 257] {
            let (a, b) = (values(n, 1, 3.0), values(n, 2, 3.0));
            let run = |simd: Simd| {
                let (mut gate, mut exps, mut sums) = (a.clone(), a.clone(), b.clone());
                silu_mul(simd, &mut gate, &b);
                let total = exp_sum(simd, &mut exps, 3.0);
                axpy_f32(simd, &mut sums, 0.7, &a);
                scale(simd, &mut sums, 1.1);
                let scalars = [dot_f32(simd, &a, &b), sum_of_squares(simd, &a), total];
                let all = [&scalars[..], &gate, &exps, &sums].concat();
                all.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let dot = dot_f32(Simd::detect(), &a, &b);
            assert!((f64::from(dot) - exact).abs() < 1e-4, "{dot} {exact}");
            for simd in Simd::available() {
                assert_eq!(run(simd), run(Simd::available()[0]), "{} n={n}", simd.level());
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        for simd in Simd::available() {
            let mut gate = vec![f32::NAN; 20];
            silu_mul(simd, &mut gate, &[1.0; 20]);
            assert!(gate.iter().all(|g| g.is_nan()));
            assert!(exp_sum(simd, &mut [f32::NAN, 1.0], 1.0).is_nan());
            assert!(dot_f32(simd, &[f32::NAN; 3], &[1.0; 3]).is_nan());
        }
    }
}
