//! `moeflux perplexity` on the model that the binary carries.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn moeflux(folder: &Path) -> Command {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.current_dir(folder).env("XDG_CACHE_HOME", folder);
    command
}

/// The command on a text of the model's own, which it ought to predict well.
fn perplexity(folder: &Path, arguments: &[&str]) -> Command {
    let text = folder.join("text.txt");
    if !text.exists() {
        let mut run = moeflux(folder);
        run.args(["run", "demo", "Tell me a story about a fox.", "--temperature", "0", "--max-tokens", "80"]);
        std::fs::write(text, &run.assert().success().get_output().stdout).unwrap();
    }
    let mut command = moeflux(folder);
    command.args(["perplexity", "demo", "text.txt", "--window", "32"]).args(arguments);
    command
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&command.arg("--json").assert().success().get_output().stdout).unwrap()
}

#[test]
fn a_run_is_compared_with_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let exact = ["--kl-base", "base.safetensors", "--activations", "f32"];
    let base = json(&mut perplexity(folder.path(), &exact));
    assert!(base["kl_divergence"].is_null());
    assert!(base["perplexity"].as_f64().unwrap() < 30.0, "{base}");

    let streamed = json(perplexity(folder.path(), &exact).args(["--memory", "14MiB"]));
    assert_eq!(streamed["perplexity"], base["perplexity"]);
    assert_eq!(streamed["kl_divergence"]["largest"], 0.0);
    assert_eq!(streamed["kl_divergence"]["same_top"], 1.0);

    let fast = json(&mut perplexity(folder.path(), &exact[..2]));
    let mean = fast["kl_divergence"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 0.05, "{mean}");
}

#[test]
fn a_base_of_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    perplexity(folder.path(), &["--kl-base", "base"]).assert().success();
    let refused = |arguments: &[&str], message: &str| {
        let output = perplexity(folder.path(), arguments).assert().failure().get_output().clone();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(message), "{stderr}");
        assert!(output.stdout.is_empty());
    };
    refused(&["--kl-base", "text.txt"], "text.txt");
    std::fs::write(folder.path().join("cut"), &std::fs::read(folder.path().join("base")).unwrap()[..5000])
        .unwrap();
    refused(&["--kl-base", "cut"], "cut");
}
