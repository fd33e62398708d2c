//! The sampler against the distributions that its options define.

use moeflux::Error;
use moeflux::sampler::{Sampler, SamplerOptions};
use proptest::prelude::*;

fn sampler(options: SamplerOptions, vocab_size: usize) -> Sampler {
    Sampler::new(options, vocab_size).expect("valid options")
}

/// Natural logarithms of probabilities, as logits.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

/// How often each token is drawn in 20,000 draws.
fn frequencies(options: SamplerOptions, logits: &[f32]) -> Vec<f64> {
    const DRAWS: usize = 20_000;
    let mut sampler = sampler(SamplerOptions { seed: Some(7), ..options }, logits.len());
    let mut counts = vec![0; logits.len()];
    for _ in 0..DRAWS {
        counts[sampler.sample(logits).expect("finite logits") as usize] += 1;
    }
    counts.into_iter().map(|count: usize| count as f64 / DRAWS as f64).collect()
}

/// Checks drawn frequencies against probabilities, within four standard deviations.
fn check(options: SamplerOptions, logits: &[f32], expected: &[f64]) {
    for (id, (got, expected)) in frequencies(options.clone(), logits).iter().zip(expected).enumerate() {
        let deviation = (expected * (1.0 - expected) / 20_000.0).sqrt();
        assert!(
            (got - expected).abs() <= 4.0 * deviation,
            "{options:?}: token {id} drawn with frequency {got}, expected {expected}"
        );
    }
}

fn tempered(temperature: f32) -> SamplerOptions {
    SamplerOptions { temperature, ..SamplerOptions::default() }
}

#[test]
fn draws_follow_the_distribution() {
    let p = logits(&[0.1, 0.4, 0.2, 0.3]);
    check(tempered(1.0), &p, &[0.1, 0.4, 0.2, 0.3]);
    // Squared and normalised: 0.01, 0.16, 0.04, 0.09 of 0.3.
    check(tempered(0.5), &p, &[1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0]);
    check(SamplerOptions { top_k: 2, ..tempered(1.0) }, &p, &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    check(SamplerOptions { top_p: 0.65, ..tempered(1.0) }, &p, &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    check(SamplerOptions { top_p: 0.71, ..tempered(1.0) }, &p, &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
    check(SamplerOptions { min_p: 0.45, ..tempered(1.0) }, &p, &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
    let biased =
        SamplerOptions { logit_bias: [(1, f32::NEG_INFINITY), (0, 2_f32.ln())].into(), ..tempered(1.0) };
    check(biased, &p, &[2.0 / 7.0, 0.0, 2.0 / 7.0, 3.0 / 7.0]);
}

#[test]
fn truncation_is_before_temperature() {
    let p = logits(&[0.5, 0.3, 0.15, 0.05]);
    // At temperature 4 the first two would together be far below 0.75, so all would stay.
    let weights = [0.5_f64.powf(0.25), 0.3_f64.powf(0.25)];
    let total = weights[0] + weights[1];
    let expected = [weights[0] / total, weights[1] / total, 0.0, 0.0];
    check(SamplerOptions { top_p: 0.75, ..tempered(4.0) }, &p, &expected);
}

#[test]
fn penalties_look_back_on_accepted_tokens() {
    let mut penalised = sampler(
        SamplerOptions {
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            penalty_window: 3,
            ..Default::default()
        },
        3,
    );
    let logits = [2.0, 1.6, 0.9];
    let mut chosen = Vec::new();
    for _ in 0..6 {
        let token = penalised.sample(&logits).expect("finite logits");
        penalised.accept(token);
        chosen.push(token);
    }
    // After 0: 1.25, 1.6, 0.9. After 0 1: 1.25, 0.85, 0.9. After 0 1 0: 0.75, 0.85, 0.9. After 1 0 2: 1.25, 0.85, 0.15.
    // After 0 2 0: 0.75, 1.6, 0.15.
    assert_eq!(chosen, [0, 1, 0, 2, 0, 1]);

    let mut repetition = sampler(SamplerOptions { repetition_penalty: 2.0, ..Default::default() }, 3);
    repetition.accept(0);
    repetition.accept(1);
    assert_eq!(repetition.sample(&[1.0, -0.5, 0.6]).expect("finite logits"), 2);
    assert_eq!(repetition.sample(&[-1.0, -0.5, -1.5]).expect("finite logits"), 1);
}

#[test]
fn a_seed_repeats_the_choices_for_ever() {
    let logits: Vec<f32> = (0..1000).map(|id| ((id * 37 % 101) as f32).sqrt()).collect();
    let options = SamplerOptions { top_p: 0.9, seed: Some(42), ..tempered(0.8) };
    let mut sampler = sampler(options, logits.len());
    let tokens: Vec<u32> = (0..8).map(|_| sampler.sample(&logits).expect("finite logits")).collect();
    // Recorded once: a change of any step changes what users' seeds mean.
    assert_eq!(tokens, [816, 322, 988, 701, 797, 592, 128, 608]);
    assert_eq!(sampler.seed(), 42);
}

#[test]
fn unseeded_samplers_differ() {
    let seeds: std::collections::HashSet<u64> = (0..8).map(|_| sampler(tempered(1.0), 4).seed()).collect();
    assert!(seeds.len() > 1);
}

#[test]
fn bad_logits_are_errors() {
    let refuse = |options: SamplerOptions, logits: &[f32]| {
        let result = sampler(options, 3).sample(logits);
        assert!(matches!(result, Err(Error::Logits { .. })), "{logits:?}: {result:?}");
    };
    for temperature in [0.0, 1.0] {
        refuse(tempered(temperature), &[0.0, f32::NAN, 1.0]);
        refuse(tempered(temperature), &[f32::NAN; 3]);
        refuse(tempered(temperature), &[0.0, f32::INFINITY, 1.0]);
        refuse(tempered(temperature), &[f32::NEG_INFINITY; 3]);
        refuse(tempered(temperature), &[0.0, 1.0]);
        let banned = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect();
        refuse(SamplerOptions { logit_bias: banned, ..tempered(temperature) }, &[0.0, 1.0, 2.0]);
        refuse(
            SamplerOptions { logit_bias: [(1, f32::MAX)].into(), ..tempered(temperature) },
            &[0.0, f32::MAX, 2.0],
        );
    }
}

#[test]
fn options_are_validated() {
    let default = SamplerOptions::default;
    let refuse = |name: &str, options: SamplerOptions| match Sampler::new(options, 10) {
        Err(Error::Option { option, .. }) => assert_eq!(option, name),
        other => panic!("{name}: {other:?}"),
    };
    for value in [-0.1, f32::NAN, f32::INFINITY] {
        refuse("temperature", SamplerOptions { temperature: value, ..default() });
    }
    for value in [0.0, -0.5, 1.01, f32::NAN] {
        refuse("top_p", SamplerOptions { top_p: value, ..default() });
    }
    for value in [-0.1, 1.1, f32::NAN] {
        refuse("min_p", SamplerOptions { min_p: value, ..default() });
    }
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refuse("repetition_penalty", SamplerOptions { repetition_penalty: value, ..default() });
    }
    refuse("presence_penalty", SamplerOptions { presence_penalty: f32::NAN, ..default() });
    refuse("frequency_penalty", SamplerOptions { frequency_penalty: f32::INFINITY, ..default() });
    refuse("logit_bias", SamplerOptions { logit_bias: [(10, 1.0)].into(), ..default() });
    refuse("logit_bias", SamplerOptions { logit_bias: [(1, f32::NAN)].into(), ..default() });
    refuse("logit_bias", SamplerOptions { logit_bias: [(1, f32::INFINITY)].into(), ..default() });
}

/// Tokens that the options leave, by the definitions, without any of the sampler's short cuts.
fn allowed(options: &SamplerOptions, logits: &[f32]) -> Vec<u32> {
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|l| f64::from(*l))).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if options.top_k > 0 {
        ranked.truncate(options.top_k);
    }
    let best = ranked[0].1;
    let total: f64 = ranked.iter().map(|(_, logit)| (logit - best).exp()).sum();
    let mut sum = 0.0;
    ranked
        .into_iter()
        .take_while(|(_, logit)| {
            let before = sum;
            sum += (logit - best).exp() / total;
            // A hair of slack where rounding decides.
            before < f64::from(options.top_p) + 1e-9
        })
        .filter(|(_, logit)| (logit - best).exp() >= f64::from(options.min_p) - 1e-9)
        .map(|(id, _)| id)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chosen_tokens_are_allowed(
        logits in proptest::collection::vec(-12_f32..12.0, 1..600),
        temperature in 0.0_f32..3.0,
        top_k in 0_usize..40,
        top_p in 0.01_f32..=1.0,
        min_p in 0.0_f32..0.5,
        seed in any::<u64>(),
    ) {
        let options = SamplerOptions { temperature, top_k, top_p, min_p, seed: Some(seed), ..Default::default() };
        let allowed = allowed(&options, &logits);
        let mut first = sampler(options.clone(), logits.len());
        let mut second = sampler(options, logits.len());
        for _ in 0..20 {
            let token = first.sample(&logits).expect("finite logits");
            prop_assert!(allowed.contains(&token), "token {} of {:?}", token, allowed);
            prop_assert_eq!(second.sample(&logits).expect("finite logits"), token);
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_best(values in proptest::collection::vec(0_u8..4, 1..50)) {
        let logits: Vec<f32> = values.iter().map(|value| f32::from(*value)).collect();
        let best = values.iter().max().expect("not empty");
        let expected = values.iter().position(|value| value == best).expect("found above");
        prop_assert_eq!(sampler(SamplerOptions::default(), logits.len()).sample(&logits).expect("finite") as usize, expected);
    }
}
