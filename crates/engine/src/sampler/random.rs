//! Random numbers and an exponential that are the same on every platform.

use std::hash::{BuildHasher as _, Hasher as _};

/// xoshiro256++ 1.0 by David Blackman and Sebastiano Vigna, seeded through SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut mixed = seed;
        let state = std::array::from_fn(|_| {
            mixed = mixed.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut word = mixed;
            word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            word ^ (word >> 31)
        });
        Self { state }
    }

    pub(crate) fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub(crate) fn next_unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A seed that differs from call to call: the standard library's hash keys come from the system.
pub(crate) fn entropy() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// 1/k! for k = 0 to 13; the next term of e^r is below 2^-57 for |r| ≤ 0.35.
const INVERSE_FACTORIALS: [f64; 14] = {
    let mut inverses = [1.0; 14];
    let mut k = 1;
    let mut factorial = 1.0;
    while k < inverses.len() {
        factorial *= k as f64;
        inverses[k] = 1.0 / factorial;
        k += 1;
    }
    inverses
};

/// e^x for x ≤ 0 within 2^-51 relative, from exactly defined operations only: x = n ln 2 + r with |r| ≤ ln 2 / 2, and
/// the Taylor series of e^r. Below -708, where numbers become subnormal, it is e^-708. There are no branches and no
/// calls in it, so that loops over it become vector instructions.
#[inline]
pub(super) fn exp(x: f64) -> f64 {
    // ln 2 in two parts, the first with its low 32 bits zero so that n times it is exact.
    const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN_2_LOW: f64 = f64::from_bits(0x3DEA_39EF_3579_3C76);
    // Added to a number below 2^51 it leaves the nearest integer in the low bits, and subtracted again the integer.
    const ROUND: f64 = 1.5 * (1_u64 << 52) as f64;
    let x = if x < -708.0 { -708.0 } else { x };
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut series = INVERSE_FACTORIALS[13];
    for coefficient in INVERSE_FACTORIALS[..13].iter().rev() {
        series = series * r + coefficient;
    }
    // n lies in [-1022, 0], the exponents of normal numbers.
    let power = f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52);
    series * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate() {
        for step in 0..70_800 {
            let x = -f64::from(step) / 100.0;
            let (got, expected) = (exp(x), x.exp());
            assert!((got - expected).abs() <= 4.5e-16 * expected, "exp({x}) = {got}, expected {expected}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e9) < 1e-300);
        assert!(exp(f64::NEG_INFINITY) < 1e-300);
    }

    // The reference implementation's output from the state 1, 2, 3, 4.
    #[test]
    fn generator_is_xoshiro256_plus_plus() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let words: [u64; 4] = std::array::from_fn(|_| random.next());
        assert_eq!(words, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    // The reference implementation's first output from the seed 1234567.
    #[test]
    fn seeds_are_mixed_by_splitmix64() {
        assert_eq!(Random::new(1_234_567).state[0], 6_457_827_717_110_365_317);
    }
}
