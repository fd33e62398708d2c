//! `synth`, `inspect`, `bench` and `run` on a tiny synthetic model, as a user would call them.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn moeflux(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("moeflux").expect("the binary");
    command.args(arguments);
    command
}

/// Standard output of a call that must succeed.
fn succeed(arguments: &[&str]) -> String {
    let output = moeflux(arguments).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("UTF-8")
}

/// Checks that a call fails with a message that has every one of `parts`, and leaves `folder` as it was.
fn check_failure(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let before = names(folder);
    let output = moeflux(arguments).assert().failure().get_output().clone();
    let message = String::from_utf8_lossy(&output.stderr);
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: {part:?} is not in {message:?}");
    }
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert_eq!(names(folder), before, "{arguments:?}");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into()).collect();
    names.sort();
    names
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().expect("UTF-8").to_owned()
}

#[test]
fn layers_without_keys_and_values_count() {
    for (shape, layers) in [("granite-4.0-h-small", 40), ("deepseek-v2-lite", 27)] {
        let report = json(&succeed(&["inspect", &format!("synth:{shape}"), "--json"]));
        assert_eq!(report["facts"]["layers"], layers, "{shape}");
    }
}

#[test]
fn both_formats_can_be_inspected_measured_and_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, options, encoding) in [
        ("model.gguf", &["--quant", "q4_k_m"][..], "Q4_K"),
        ("mlx", &["--format", "mlx", "--router-skew", "1"][..], "affine 4-bit g64 bf16"),
    ] {
        let model = path(folder.path(), name);
        succeed(&[&["synth", "tiny", &model], options].concat());

        let report = json(&succeed(&["inspect", &model, "--json", "--tensors"]));
        assert_eq!(report["cannot_run"], Value::Null);
        assert_eq!(report["facts"]["layers"], 4);
        assert_eq!(report["facts"]["routed_layers"][0]["experts"], 16);
        assert_eq!(report["facts"]["routed_layers"][0]["experts_per_token"], 4);
        // 16 experts of three 256 × 256 matrices a layer; 4 of them are active.
        let (all, active) = (&report["facts"]["parameters"], &report["facts"]["active_parameters"]);
        let inactive = all.as_u64().expect("a number") - active.as_u64().expect("a number");
        assert_eq!(inactive, 4 * 12 * 3 * 256 * 256);
        // 4 layers, keys and values of 2 heads of 64 channels in f16.
        assert_eq!(report["facts"]["kv_bytes_per_token"], 4 * 2 * 2 * 64 * 2);
        let tensors = report["tensors"].as_array().expect("tensors");
        assert!(tensors.iter().any(|t| t["encoding"] == encoding && t["shape"].as_array().is_some()));
        let bytes: u64 = tensors.iter().filter_map(|t| t["bytes"].as_u64()).sum();
        assert_eq!(report["bytes"], bytes);
        let parts = [&report["facts"]["trunk_bytes"], &report["facts"]["expert_bytes"]];
        let parts: u64 = parts.iter().filter_map(|part| part.as_u64()).sum();
        // Norms are resident as f32 and stored as bf16 by MLX.
        assert!(parts.abs_diff(bytes) < 16 << 10, "{parts} against {bytes}");

        let text = succeed(&["inspect", &model]);
        for part in ["qwen3_moe|qwen3moe", "1024 tokens", "everything in memory", encoding] {
            assert!(part.split('|').any(|part| text.contains(part)), "{part:?} is not in {text}");
        }

        let sizes = ["-p", "16", "-n", "4", "-d", "0,8", "-r", "2", "--threads", "1"];
        let report =
            json(&succeed(&[&["bench", &model, "--json", "--expert-cache", "8"], &sizes[..]].concat()));
        let tests = report["tests"].as_array().expect("tests");
        let named: Vec<&str> = tests.iter().filter_map(|test| test["test"].as_str()).collect();
        assert_eq!(named, ["pp16", "tg4", "pp16@d8", "tg4@d8"]);
        for test in tests {
            assert!(test["tokens_per_second"]["median"].as_f64().expect("a number") > 0.0, "{test}");
            assert_eq!(test["repetitions"].as_array().expect("repetitions").len(), 2);
            // 8 slots cannot hold 64 experts.
            assert!(test["bytes_read_per_token"].as_u64().expect("a number") > 0, "{test}");
            assert!(test["hit_rate"].as_f64().expect("a number") < 1.0, "{test}");
        }
        assert!(report["peak_resident_bytes"].as_u64().is_some() || !cfg!(target_os = "linux"));
        let table = succeed(&[&["bench", &model, "--profile"], &sizes[..]].concat());
        for part in ["| tg4@d8 ", "budget", "tg4, 8 tokens", "| experts, down "] {
            assert!(table.contains(part), "{part:?} is not in {table}");
        }
        // By the names that the format has for them.
        assert!(table.contains("k_proj + v_proj ") || table.contains("attn_k + attn_v "), "{table}");

        let ask = ["run", &model, "The router", "--temperature", "0", "--max-tokens", "8"];
        let answer = succeed(&ask);
        assert!(!answer.trim().is_empty());
        assert_eq!(succeed(&[&ask[..], &["--expert-cache", "4"]].concat()), answer);
    }
}

#[test]
fn models_in_memory_are_measured() {
    let sizes = ["-p", "16", "-n", "4", "-r", "1", "--threads", "1", "--backend", "cpu"];
    for (model, options) in [
        ("synth:tiny", &[][..]),
        ("synth:tiny:q8_0", &["--layers", "2", "--router-skew", "1"][..]),
        ("synth:tiny", &["--quant", "4bit"][..]),
    ] {
        let call = [&["bench", model, "--expert-cache", "8"], options, &sizes[..]].concat();
        let table = succeed(&call);
        for part in ["random weights copied in memory", "| copied/token ", "| tg4 "] {
            assert!(table.contains(part), "{part:?} is not in {table}");
        }
        assert!(!table.contains("GB/s") && !table.contains("read speed"), "{table}");
        let report = json(&succeed(&[&call[..], &["--json"]].concat()));
        assert_eq!(report["reads"]["mode"], "memory");
        for test in report["tests"].as_array().expect("tests") {
            assert!(test["bytes_read_per_token"].as_u64().expect("a number") > 0, "{test}");
            assert_eq!(test["read_bandwidth"], Value::Null);
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |arguments: &[&str], parts: &[&str]| {
        check_failure(folder.path(), &[&["bench"], arguments, &["--backend", "cpu"]].concat(), parts);
    };
    refused(&["synth:tinny"], &["shape", "tiny", "tinny"]);
    refused(&["synth:tiny:q9"], &["quant", "q4_k_m", "q9"]);
    refused(&["synth:tiny:q8_0", "--quant", "f16"], &["--quant", "encoding already"]);
    refused(&["synth:tiny", "--layers", "5"], &["layers", "1 to 4", "5"]);
    refused(&["synth:tiny", "--mirror", "x"], &["--mirror", "in memory"]);
    refused(&["synth:tiny", "--read-mode", "direct"], &["--read-mode", "in memory"]);
    refused(&["demo", "--layers", "2"], &["--layers", "synth:SHAPE"]);
}

#[test]
fn same_seed_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let make = |name: &str, seed: &str| {
        let file = path(folder.path(), name);
        succeed(&["synth", "tiny", &file, "--quant", "q8_0", "--layers", "2", "--seed", seed]);
        std::fs::read(file).expect("a file")
    };
    let first = make("a.gguf", "5");
    assert!(first == make("b.gguf", "5"));
    assert!(first != make("c.gguf", "6"));
    assert_eq!(names(folder.path()), ["a.gguf", "b.gguf", "c.gguf"]);
}

#[test]
fn what_cannot_be_made_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(folder.path(), "model.gguf");
    let check = |arguments: &[&str], parts: &[&str]| check_failure(folder.path(), arguments, parts);
    check(&["synth", "qwen4", &file], &["qwen4", "qwen3-30b-a3b", "tiny"]);
    check(&["synth", "tiny", &file, "--layers", "0"], &["layers", "1 to 4", "got 0"]);
    check(&["synth", "tiny", &file, "--layers", "5"], &["layers", "1 to 4", "got 5"]);
    check(&["synth", "tiny", &file, "--quant", "q9"], &["quant", "q4_k_m", "q9"]);
    check(&["synth", "tiny", &file, "--format", "mlx", "--quant", "q8_0"], &["quant", "4bit"]);
    check(&["synth", "tiny", &file, "--router-skew=-1"], &["router-skew", "-1"]);
    check(&["synth", "tiny", &path(folder.path(), "none/model.gguf")], &["none"]);
    check(&["bench", &file], &["cannot open", "model.gguf"]);
    check(&["inspect", &file], &["cannot open", "model.gguf"]);
}

#[test]
fn nothing_is_replaced_unasked() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |arguments: &[&str], parts: &[&str]| check_failure(folder.path(), arguments, parts);
    let file = path(folder.path(), "model.gguf");
    std::fs::write(&file, "mine").expect("a file");
    check(&["synth", "tiny", &file], &["exists", "--force"]);
    check(&["synth", "tiny", &file, "--format", "mlx", "--force"], &["not a folder"]);
    assert_eq!(std::fs::read(&file).expect("a file"), b"mine");
    succeed(&["synth", "tiny", &file, "--force"]);
    assert!(std::fs::read(&file).expect("a file").starts_with(b"GGUF"));

    let model = path(folder.path(), "mlx");
    succeed(&["synth", "tiny", &model, "--format", "mlx"]);
    check(&["synth", "tiny", &model, "--format", "mlx"], &["exists", "--force"]);
    check(&["synth", "tiny", &model, "--force"], &["is a folder"]);
    succeed(&["synth", "tiny", &model, "--format", "mlx", "--layers", "1", "--force"]);
    assert_eq!(json(&succeed(&["inspect", &model, "--json"]))["facts"]["layers"], 1);
    std::fs::write(folder.path().join("mlx/notes.txt"), "mine").expect("a file");
    check(&["synth", "tiny", &model, "--format", "mlx", "--force"], &["notes.txt"]);
    assert_eq!(names(folder.path()), ["mlx", "model.gguf"]);
}

#[test]
fn what_cannot_be_measured_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = path(folder.path(), "model.gguf");
    succeed(&["synth", "tiny", &file, "--layers", "1"]);
    let check = |arguments: &[&str], parts: &[&str]| check_failure(folder.path(), arguments, parts);
    check(&["bench", &file, "-p", "0", "-n", "0"], &["nothing to measure"]);
    check(&["bench", &file, "-r", "0"], &["--repetitions", "got 0"]);
    check(&["bench", &file, "-p", "8", "-n", "4", "--context", "4"], &["context", "4 tokens"]);
    check(&["bench", &file, "--memory", "1MiB"], &["too small", "needs at least"]);
}

#[test]
fn published_shapes_have_the_parameters_that_they_are_named_after() {
    // Billions in all, and those of a token's experts and of everything resident.
    for (shape, all, active) in [
        ("qwen3.5-35b-a3b", 34.66, 3.45),
        ("qwen3.5-397b-a17b", 396.3, 17.3),
        ("deepseek-v3-671b", 671.0, 37.6),
        ("gpt-oss-120b:mxfp4", 116.8, 5.7),
        ("glm-4.5-air:8bit", 106.9, 13.4),
        ("kimi-k2", 1026.4, 32.9),
        ("minimax-m2:f16", 228.7, 11.0),
        ("minimax-m3", 426.17, 25.96),
        ("nemotron-3-nano-30b-a3b", 31.58, 3.58),
        ("step-3.5-flash:4bit", 196.96, 11.98),
        ("gemma-4-26b-a4b", 25.23, 3.82),
        ("llama-4-maverick-17b-128e:4bit", 400.7, 17.2),
        ("minimax-text-01", 456.1, 48.4),
        ("ernie-4.5-300b-a47b", 298.6, 47.1),
    ] {
        let report = json(&succeed(&["inspect", &format!("synth:{shape}"), "--json", "--tensors"]));
        let billions = |key: &str| report["facts"][key].as_f64().expect("a number") / 1e9;
        assert!((billions("parameters") / all - 1.0).abs() < 1e-3, "{shape}: {}", billions("parameters"));
        let found = billions("active_parameters");
        assert!((found / active - 1.0).abs() < 0.02, "{shape}: {found} active");
        // The same bytes whether counted by tensor or by what the model makes of them, but for vectors that become f32.
        let parts = [&report["facts"]["trunk_bytes"], &report["facts"]["expert_bytes"]];
        let parts: f64 = parts.iter().filter_map(|part| part.as_f64()).sum();
        assert!((parts / report["bytes"].as_f64().expect("a number") - 1.0).abs() < 1e-3, "{shape}");
        assert_eq!(report["files"], 0);
    }
    let folder = tempfile::tempdir().expect("a folder");
    check_failure(folder.path(), &["inspect", "synth:qwen4"], &["qwen4", "glm-4.5-air"]);
    check_failure(folder.path(), &["inspect", "synth:tiny:q9"], &["q9", "mxfp4"]);
}

#[test]
fn inspect_counts_experts_that_a_table_gives_tokens() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/hf");
    let model = fixtures.join("deepseek_v4_basic");
    let text = succeed(&["inspect", model.to_str().expect("UTF-8")]);
    assert!(text.contains("7 in each of 3 layers, 3 per token"), "{text}");
}
