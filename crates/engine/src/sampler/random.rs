//! Random numbers that are the same on every platform.

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

#[cfg(test)]
mod tests {
    use super::*;

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
