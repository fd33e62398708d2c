//! Vector helpers against f64, at every SIMD level of this machine and at lengths around those of vectors.

use half::f16;
use moeflux_compute::cpu::{
    simd::{Simd, SimdLevel},
    vector,
};

use crate::support::random::Random;

const LENGTHS: [usize; 14] = [0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 64, 67, 128, 1000];

/// Runs `test` for every level and length, with two vectors of random values.
fn check(test: impl Fn(Simd, &[f32], &[f32])) {
    let mut random = Random::new(1);
    for level in SimdLevel::available() {
        for n in LENGTHS {
            test(Simd::new(level).unwrap(), &random.normals(n), &random.normals(n));
        }
    }
}

fn f16s(x: &[f32]) -> Vec<f16> {
    x.iter().map(|&x| f16::from_f32(x)).collect()
}

/// Distance in units in the last place of `expected` as f32.
fn ulps(got: f32, expected: f64) -> f64 {
    let unit = f64::from((expected as f32).abs().next_up()) - f64::from((expected as f32).abs());
    (f64::from(got) - expected).abs() / unit
}

#[track_caller]
fn assert_sum(simd: Simd, got: f32, terms: impl Iterator<Item = f64> + Clone) {
    let magnitude: f64 = terms.clone().map(f64::abs).sum();
    let expected: f64 = terms.sum();
    let error = (f64::from(got) - expected).abs();
    assert!(error <= 1e-6 * magnitude, "{}: {got}, expected {expected}", simd.level());
}

#[track_caller]
fn assert_each(simd: Simd, got: &[f32], expected: impl ExactSizeIterator<Item = f64>, max_ulps: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
        let ulps = ulps(got, expected);
        let level = simd.level();
        assert!(ulps <= max_ulps, "{level}, element {i}: {got}, expected {expected}, {ulps} ulps");
    }
}

#[test]
fn dot_products() {
    check(|simd, a, b| {
        let terms =
            |b: &[f32]| -> Vec<f64> { a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).collect() };
        assert_sum(simd, vector::dot_f32(simd, a, b), terms(b).into_iter());
        assert_sum(simd, vector::sum_of_squares(simd, a), terms(a).into_iter());
    });
}

#[test]
fn elementwise() {
    check(|simd, a, b| {
        let pairs = || a.iter().zip(b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
        // The sum may be small against its terms, whose product is rounded at levels without fusion.
        let close = |got: &[f32], expected: Vec<f64>| {
            for (&got, expected) in got.iter().zip(expected) {
                assert!((f64::from(got) - expected).abs() <= 1e-6, "{}: {got}, {expected}", simd.level());
            }
        };

        let mut out = b.to_vec();
        vector::axpy_f32(simd, 0.3, a, &mut out);
        close(&out, pairs().map(|(a, b)| f64::from(0.3f32) * a + b).collect());

        let mut out = a.to_vec();
        vector::scale(simd, 1.1, &mut out);
        assert_each(simd, &out, a.iter().map(|&a| f64::from(a) * f64::from(1.1f32)), 0.5);

        let mut out = b.to_vec();
        vector::add(simd, a, &mut out);
        close(&out, pairs().map(|(a, b)| a + b).collect());

        let mut out = b.to_vec();
        vector::mul(simd, a, &mut out);
        assert_each(simd, &out, pairs().collect::<Vec<_>>().into_iter().map(|(a, b)| a * b), 0.5);

        let mut out = vec![f32::NAN; a.len()];
        vector::scaled_product(simd, a, 0.7, b, &mut out);
        let expected = pairs().map(|(a, b)| a * f64::from(0.7f32) * b);
        assert_each(simd, &out, expected.collect::<Vec<_>>().into_iter(), 1.5);

        let mut out = vec![f16::ZERO; a.len()];
        vector::to_f16(simd, a, &mut out);
        assert_eq!(out, f16s(a));
    });
}

#[test]
fn softmaxes_go_on_from_block_to_block() {
    check(|simd, a, b| {
        if a.is_empty() {
            return;
        }
        let (a, b): (Vec<f32>, Vec<f32>) = (a.iter().map(|a| 9.0 * a).collect(), b.to_vec());
        // Two softmaxes, one of them of small scores in the second block; each has a weighted sum so far.
        let mut scores = [a.clone(), b.clone()].concat();
        let (mut states, mut sums) = ([(0.5, 1.0), (-40.0, 3.0)], [1.0, 2.0]);
        vector::softmax_blocks(simd, &mut scores, &mut states, &mut sums);
        for (k, (x, (max, total))) in [(&a, (0.5f32, 1.0f32)), (&b, (-40.0, 3.0))].into_iter().enumerate() {
            let greatest = x.iter().copied().fold(max, f32::max);
            let shrink = f64::from(max - greatest).exp();
            let weights = &scores[k * a.len()..][..a.len()];
            assert_each(simd, weights, x.iter().map(|&x| f64::from(x - greatest).exp()), 2.0);
            assert_eq!(states[k].0, greatest);
            assert_sum(
                simd,
                states[k].1,
                weights.iter().map(|&w| f64::from(w)).chain([f64::from(total) * shrink]),
            );
            assert_each(simd, &sums[k..k + 1], [f64::from(k as f32 + 1.0) * shrink].into_iter(), 2.0);
        }
    });
}

#[test]
fn exponentials() {
    check(|simd, a, _| {
        let max = a.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut out = a.to_vec();
        let sum = vector::exp_sum(simd, max, &mut out);
        assert_each(simd, &out, a.iter().map(|&a| f64::from(a - max).exp()), 2.0);
        assert_sum(simd, sum, out.iter().map(|&e| f64::from(e)));
    });
    // The whole range, subnormal results included.
    let x: Vec<f32> = (-110_000..90_000).map(|i| i as f32 * 1e-3).collect();
    for level in SimdLevel::available() {
        let simd = Simd::new(level).unwrap();
        let mut out = x.clone();
        vector::exp_sum(simd, 0.0, &mut out);
        for (&x, &got) in x.iter().zip(&out) {
            let expected = f64::from(x).exp();
            if expected > f64::from(f32::MAX) {
                assert_eq!(got, f32::INFINITY, "{level}: exp({x})");
            } else {
                assert!(ulps(got, expected) <= 2.0, "{level}: exp({x}) = {got:e}, expected {expected:e}");
            }
        }
        let mut special = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, -1e30, 0.0, 1e30];
        vector::exp_sum(simd, 0.0, &mut special);
        assert_eq!(special[0], 0.0);
        assert!(special[1].is_nan());
        assert_eq!(special[2..], [f32::INFINITY, 0.0, 1.0, f32::INFINITY]);
    }
}

#[test]
fn gates() {
    check(|simd, a, b| {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let gates: Vec<f32> = a.iter().map(|a| 10.0 * a).collect();
        let mut out = gates.clone();
        vector::silu_mul(simd, &mut out, b);
        let expected = gates.iter().zip(b).map(|(&g, &b)| f64::from(g) * sigmoid(g) * f64::from(b));
        assert_each(simd, &out, expected.collect::<Vec<_>>().into_iter(), 4.0);

        let mut out = b.to_vec();
        vector::sigmoid_mul(simd, &gates, &mut out);
        let expected = gates.iter().zip(b).map(|(&g, &b)| sigmoid(g) * f64::from(b));
        assert_each(simd, &out, expected.collect::<Vec<_>>().into_iter(), 4.0);
    });
    check(|simd, a, _| {
        for scale in [1e-6, 0.1, 3.0, 40.0] {
            let x: Vec<f32> = a.iter().map(|a| scale * a).collect();
            let mut out = x.clone();
            vector::soft_limit(simd, 4.0, &mut out);
            assert_each(simd, &out, x.iter().map(|&x| 4.0 * (f64::from(x) / 4.0).tanh()), 4.0);
        }
    });
    for level in SimdLevel::available() {
        let mut x = [-1e30, -f32::INFINITY, 0.0, 1e30, f32::NAN];
        vector::soft_limit(Simd::new(level).unwrap(), 2.5, &mut x);
        assert_eq!(x[..4], [-2.5, -2.5, 0.0, 2.5]);
        assert!(x[4].is_nan());
        let mut gate = [-1e30, -200.0, 0.0, 200.0, 1e30, f32::NAN];
        vector::silu_mul(Simd::new(level).unwrap(), &mut gate, &[1.0; 6]);
        assert_eq!(gate[..5], [0.0, 0.0, 0.0, 200.0, 1e30]);
        assert!(gate[5].is_nan());
    }
}
