//! `moeflux trace`, `replay` and `pack` on the model that the binary carries.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn moeflux(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.current_dir(folder).env("XDG_CACHE_HOME", folder).args(arguments);
    command
}

fn fails(folder: &Path, arguments: &[&str], expected: &str) {
    let output = moeflux(folder, arguments).assert().failure().get_output().stderr.clone();
    let text = String::from_utf8(output).unwrap();
    assert!(text.contains(expected), "{arguments:?}: {text} lacks {expected}");
}

#[test]
fn a_trace_is_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    moeflux(
        folder,
        &["trace", "demo", "t", "--prompt", "What is 2 plus 3?", "--prompt", "Hello!", "-n", "20"],
    )
    .assert()
    .success();
    let output = moeflux(folder, &["replay", "t", "--json"]).assert().success().get_output().stdout.clone();
    let report: Value = serde_json::from_slice(&output).unwrap();
    let rates = |budget: usize| -> Vec<f64> {
        let policies = report["replays"][budget]["policies"].as_array().unwrap();
        policies.iter().map(|p| p["hit_rate"].as_f64().unwrap()).collect()
    };
    for budget in 0..3 {
        let rates = rates(budget);
        let (best, others) = rates.split_last().unwrap();
        assert!(others.iter().all(|rate| rate <= best), "no policy beats the optimum: {rates:?}");
    }
    assert!(rates(2)[0] > rates(0)[0], "more memory, more hits");
    let lru = |arguments: &[&str]| -> Value {
        let all = [&["replay", "t", "--json", "--policy", "lru"], arguments].concat();
        let output = moeflux(folder, &all).assert().success().get_output().stdout.clone();
        let report: Value = serde_json::from_slice(&output).unwrap();
        report["replays"][0]["policies"][0].clone()
    };
    let number = |value: &Value| value.as_f64().unwrap();
    let asked = |share: &str| number(&lru(&["--warm-up", share])["asked"]);
    let part = asked("0.5") / asked("0");
    assert!((0.2..0.8).contains(&part), "what warms up does not count: {part}");
    // Reading and computing overlap: the longer of them is what a token takes.
    let (compute, bandwidth) = (&report["trace"]["compute_seconds"], &report["trace"]["bandwidth"]);
    let slow = number(&lru(&["--bandwidth", "1"])["tokens_per_second"]);
    for bandwidth in [number(bandwidth).round(), (1.0 / slow / number(compute)).round()] {
        let speed = number(&lru(&["--bandwidth", &bandwidth.to_string()])["tokens_per_second"]);
        let expected = 1.0 / (1.0 / slow / bandwidth).max(number(compute));
        assert!((speed / expected - 1.0).abs() < 1e-3, "{speed} tokens/s, expected {expected}");
    }
    let precision = report["guesses"]["next_router"]["precision"].as_f64().unwrap();
    assert!(precision > 0.5, "the next layer's router is a guess worth having: {precision}");

    fails(folder, &["replay", "t", "--memory", "1MiB"], "need at least");
    fails(folder, &["replay", "t", "--policy", "best"], "expected lru");
    fails(folder, &["replay", "t", "--warm-up", "1"], "--warm-up");
    std::fs::write(folder.join("no"), "MOEFLUXT").unwrap();
    fails(folder, &["replay", "no"], "no: trace: file: expected a trace");
    fails(folder, &["trace", "demo", "t", "-n", "0"], "--tokens");
}

#[test]
fn a_packed_model_gives_the_same_answer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    moeflux(folder, &["pack", "demo", "packed.gguf"]).assert().success();
    fails(folder, &["pack", "demo", "packed.gguf"], "packed.gguf exists");
    fails(folder, &["pack", "packed.gguf", "again.gguf"], "packed already");
    let answer = |model: &str| {
        let arguments = ["run", model, "Tell me a story.", "--temperature", "0", "--max-tokens", "30"];
        let direct =
            ["--memory", "14MiB", "--read-mode", "direct", "--cache-policy", "lru", "--prefetch", "always"];
        moeflux(folder, &arguments).args(direct).assert().success().get_output().stdout.clone()
    };
    assert_eq!(answer("packed.gguf"), answer("demo"));
}

#[test]
fn fewer_bits_are_measured_before_a_copy_gets_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let arguments = ["pack", "demo", "small.gguf", "--experts-bits", "4"];
    let said = moeflux(folder, &arguments).assert().success().get_output().stdout.clone();
    let said = String::from_utf8(said).unwrap();
    assert!(said.starts_with("mean KL divergence "), "{said}");
    // The demo's own experts are of about six bits, so something is lost, but not everything.
    let divergence: f64 = said.split(' ').nth(3).unwrap().parse().unwrap();
    assert!(divergence > 1e-6 && divergence < 1.0, "{said}");
    let inspected =
        moeflux(folder, &["inspect", "small.gguf"]).assert().success().get_output().stdout.clone();
    let inspected = String::from_utf8(inspected).unwrap();
    assert!(
        inspected.contains(&format!("lossy            experts re-encoded to 4 bits: {}", said.trim())),
        "{inspected}"
    );
    let names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| name == "small.gguf" || name == "moeflux"), "{names:?}");
    fails(folder, &["pack", "demo", "x.gguf", "--experts-bits", "5"], "expected one of [4, 6, 8], got 5");
    fails(folder, &["pack", "demo", "x.gguf", "--text", "no"], "--experts-bits");
    fails(folder, &["pack", "demo", "x.gguf", "--experts-bits", "4", "--text", "no"], "cannot read no");
}
