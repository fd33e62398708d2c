//! Time of choosing a token on one thread, from flat logits and from peaked ones as trained models make.
//!
//! `cargo bench -p moeflux-compute --bench draw`. The median of several runs is printed.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use moeflux_compute::draw::Draw;

#[path = "../tests/it/support/random.rs"]
#[allow(dead_code)]
mod random;
use random::Random;

const VOCABULARY: usize = 151_936;
const RUNS: usize = 51;

fn median(mut work: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[RUNS / 2]
}

fn main() {
    let mut random = Random::new(1);
    let flat: Vec<f32> = (0..VOCABULARY).map(|_| random.normal()).collect();
    // Likelihoods fall as a power of the rank, the best being a third of all.
    let mut peaked: Vec<f32> = (1..=VOCABULARY).map(|rank| -1.6 * (rank as f32).ln()).collect();
    for i in (1..VOCABULARY).rev() {
        peaked.swap(i, random.below(i + 1));
    }
    let plain = Draw { temperature: 0.8, random: u64::MAX / 3, ..Draw::default() };
    let ways = [
        ("greedy", Draw::default()),
        ("temperature 0.8", plain.clone()),
        ("and top-k 40", Draw { top_k: 40, ..plain.clone() }),
        ("and top-p 0.9", Draw { top_p: 0.9, ..plain.clone() }),
        ("and min-p 0.05", Draw { min_p: 0.05, ..plain.clone() }),
        ("and all three", Draw { top_k: 40, top_p: 0.9, min_p: 0.05, ..plain }),
    ];
    println!("{:<18}{:>12}{:>12}", "ms", "flat", "peaked");
    for (name, draw) in ways {
        let [flat, peaked] =
            [&flat, &peaked].map(|logits| median(|| assert!(black_box(draw.choose(logits)).is_some())));
        println!("{name:<18}{:>12.3}{:>12.3}", flat.as_secs_f64() * 1e3, peaked.as_secs_f64() * 1e3);
    }
}
