//! Which tokens are left and how likely each is, against the definitions applied to a sorted list.

use proptest::prelude::*;

use super::{Sampler, SamplerOptions};

/// Tokens that `sampler` leaves of `logits` and their probabilities, by id.
fn left_by(sampler: &Sampler, logits: &[f32]) -> Vec<(u32, f64)> {
    let draw = sampler.draw();
    let mut logits = logits.to_vec();
    for change in &draw.adjustments {
        let logit = &mut logits[change.token as usize];
        *logit = change.of(*logit);
    }
    let weights = draw.weights(&logits);
    let total = weights.iter().sum::<u64>() as f64;
    (0..)
        .zip(weights)
        .filter(|(_, weight)| *weight > 0)
        .map(|(id, weight)| (id, weight as f64 / total))
        .collect()
}

/// Logits with bias, and with penalties for the last tokens of `history`.
fn adjusted(options: &SamplerOptions, logits: &[f32], history: &[u32]) -> Vec<f32> {
    let recent = &history[history.len().saturating_sub(options.penalty_window)..];
    let adjust = |(id, logit): (u32, &f32)| {
        let logit = logit + options.logit_bias.get(&id).copied().unwrap_or(0.0);
        let count = recent.iter().filter(|token| **token == id).count();
        if count == 0 {
            return logit;
        }
        let factor = options.repetition_penalty;
        let repeated = if logit > 0.0 { logit / factor } else { logit * factor };
        repeated - (options.presence_penalty + options.frequency_penalty * count as f32)
    };
    (0..).zip(logits).map(adjust).collect()
}

/// Tokens that truncation leaves of `logits`, each with whether rounding could leave it out as well.
fn truncated(options: &SamplerOptions, logits: &[f32]) -> Vec<(u32, bool)> {
    const ROUNDING: f64 = 1e-6;
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|logit| f64::from(*logit))).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if options.top_k > 0 {
        ranked.truncate(options.top_k);
    }
    let best = ranked[0].1;
    let total: f64 = ranked.iter().map(|(_, logit)| (logit - best).exp()).sum();
    let (top_p, min_p) = (f64::from(options.top_p), f64::from(options.min_p));
    let mut before = 0.0;
    let mut left = vec![];
    for (id, logit) in ranked {
        let likelihood = (logit - best).exp();
        if (before < top_p + ROUNDING || top_p >= 1.0) && likelihood >= min_p - ROUNDING {
            let rounded = before >= top_p - ROUNDING && top_p < 1.0 || likelihood < min_p + ROUNDING;
            left.push((id, rounded && likelihood < 1.0));
        }
        before += likelihood / total;
    }
    left
}

/// Checks both against each other, after `history`.
fn check(options: SamplerOptions, logits: &[f32], history: &[u32]) {
    let mut sampler = Sampler::new(options.clone(), logits.len()).expect("valid options");
    history.iter().for_each(|token| sampler.accept(*token));
    let left = left_by(&sampler, logits);
    let logits = adjusted(&options, logits, history);
    let expected = truncated(&options, &logits);
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let tempered = |id: u32| (f64::from(logits[id as usize] - best) / f64::from(options.temperature)).exp();
    for (id, uncertain) in &expected {
        let found = left.binary_search_by_key(id, |(id, _)| *id).is_ok();
        // A weight has 40 bits.
        assert!(
            found || *uncertain || tempered(*id) < 1e-12,
            "{options:?}: token {id} is missing, {} are left",
            left.len()
        );
    }
    let total: f64 = left.iter().map(|(id, _)| tempered(*id)).sum();
    for (id, probability) in &left {
        assert!(expected.iter().any(|(expected, _)| expected == id), "{options:?}: token {id} is left");
        let right = tempered(*id) / total;
        assert!((probability - right).abs() < 2e-7, "{options:?}: token {id} has {probability}, not {right}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn truncation_is_by_definition(
        logits in proptest::collection::vec(-12_f32..12.0, 1..600),
        temperature in 0.3_f32..3.0,
        top_k in prop_oneof![Just(0), 1_usize..300],
        top_p in prop_oneof![Just(1.0), 0.01_f32..1.0],
        min_p in prop_oneof![Just(0.0), 0.0_f32..0.5],
    ) {
        check(SamplerOptions { temperature, top_k, top_p, min_p, ..Default::default() }, &logits, &[]);
    }

    #[test]
    fn penalties_and_bias_are_by_definition(
        logits in proptest::collection::vec(-5_f32..5.0, 8),
        history in proptest::collection::vec(0_u32..8, 0..40),
        penalty_window in 0_usize..20,
        repetition_penalty in prop_oneof![Just(1.0), 0.5_f32..2.0],
        presence_penalty in prop_oneof![Just(0.0), -1.0_f32..1.0],
        frequency_penalty in prop_oneof![Just(0.0), -1.0_f32..1.0],
        logit_bias in proptest::collection::btree_map(0_u32..8, -3_f32..3.0, 0..3),
        top_p in prop_oneof![Just(1.0), 0.5_f32..1.0],
    ) {
        let options = SamplerOptions {
            temperature: 1.0,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            penalty_window,
            logit_bias,
            top_p,
            ..Default::default()
        };
        check(options, &logits, &history);
    }
}

#[test]
fn a_token_counts_until_its_last_occurrence_leaves_the_window() {
    let options = SamplerOptions {
        temperature: 1.0,
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        penalty_window: 3,
        ..Default::default()
    };
    let history = [1, 1, 0, 2, 1, 1, 1, 1, 0, 0, 2, 2, 2];
    for end in 0..=history.len() {
        check(options.clone(), &[0.3, 0.2, 0.1], &history[..end]);
    }
}

/// Steps of logits so small that a bound that is off by a thousandth keeps or drops some.
#[test]
fn min_p_ends_where_it_says() {
    let logits: Vec<f32> = (0..8000).map(|step| -1e-3 * step as f32).collect();
    for min_p in [0.000_5, 0.01, 0.1, 0.333, 0.5, 0.9, 0.999, 1.0] {
        check(SamplerOptions { temperature: 1.0, min_p, ..Default::default() }, &logits, &[]);
    }
    // As likely as the most likely one is enough.
    check(SamplerOptions { temperature: 1.0, min_p: 1.0, ..Default::default() }, &[2.0, 2.0, 1.0], &[]);
}

/// Tokens of equal logits: the lower ids stay.
#[test]
fn ties_stay_in_order() {
    for (top_k, top_p) in [(3, 1.0), (0, 0.3), (5, 0.5), (130, 0.99), (0, 0.75)] {
        let options = SamplerOptions { temperature: 1.0, top_k, top_p, ..Default::default() };
        let logits: Vec<f32> = (0..300).map(|id| if id % 2 == 0 { 1.0 } else { 0.5 }).collect();
        check(options, &logits, &[]);
    }
}
