//! `moeflux plan`: what it says of models on disk, described, and of the hub.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::hub::{File, Hub};
use assert_cmd::Command;
use moeflux::synth::Shape;
use serde_json::Value;

/// `moeflux plan` with a cache of its own.
fn moeflux(cache: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command
        .env("HF_HOME", cache)
        .env("XDG_CACHE_HOME", cache)
        .args(["plan", "--backend", "cpu"])
        .args(arguments);
    command
}

fn text(arguments: &[&str]) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = moeflux(cache.path(), arguments).assert().success().get_output().stdout.clone();
    String::from_utf8(output).unwrap()
}

fn json(command: &mut Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().stdout.clone();
    let report: Value = serde_json::from_slice(&output).unwrap();
    for budget in report["budgets"].as_array().unwrap() {
        for key in ["predicted", "predicted_if_uneven"] {
            let p = &budget[key];
            for speed in
                ["decode_tokens_per_second", "decode_tokens_per_second_at_end", "prefill_tokens_per_second"]
            {
                assert!(p.is_null() || p[speed].as_f64().unwrap() > 0.0, "{key} {speed}: {p}");
            }
        }
    }
    report
}

fn refused(arguments: &[&str]) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = moeflux(cache.path(), arguments).assert().failure().get_output().clone();
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_demo_is_planned() {
    let said = text(&["demo", "--prompt", "32"]);
    for part in [
        "model      demo (on disk)",
        "trunk",
        "experts",
        "context",
        "GB/s",
        "| memory",
        "prompt of 32",
        "####",
        "recommended: everything in memory, --memory ",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    // Standard output is no terminal here.
    assert!(said.is_ascii(), "{said}");
}

#[test]
fn more_memory_is_never_slower() {
    let cache = tempfile::tempdir().unwrap();
    let report = json(&mut moeflux(cache.path(), &["demo", "--prompt", "32"]));
    let budgets = report["budgets"].as_array().unwrap();
    assert!(budgets.len() > 2);
    for pair in budgets.windows(2) {
        let of = |budget: &Value, key: &str| budget["predicted"][key].as_f64().unwrap();
        assert!(pair[0]["memory"].as_u64() < pair[1]["memory"].as_u64());
        assert!(of(&pair[0], "hit_rate") <= of(&pair[1], "hit_rate"));
        let speed = "decode_tokens_per_second";
        assert!(of(&pair[0], speed) <= 1.001 * of(&pair[1], speed), "{pair:?}");
    }
    let last = budgets.last().unwrap();
    assert_eq!(last["experts_held"], 1.0);
    assert_eq!(last["predicted"]["bytes_per_token"], 0.0);
    assert_eq!(report["computing"]["kinds"][0]["measured"], true);
}

#[test]
#[cfg(target_os = "linux")]
fn a_busy_machine_is_told() {
    let over = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let cache = tempfile::tempdir().unwrap();
        let output = moeflux(cache.path(), &["demo", "--prompt", "8"]).output();
        over.store(true, Ordering::Relaxed);
        output.unwrap()
    });
    let [said, warned] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    let percent = |text: &str, before: &str| -> Option<u32> {
        text.split_once(before)?.1.split_once(" % of the processors")?.0.parse().ok()
    };
    let part = percent(&warned, "warning: other programs take ").expect(&warned);
    assert!((20..=100).contains(&part), "{part}");
    assert_eq!(percent(&said, "measured while other programs took "), Some(part), "{said}");
}

#[test]
fn budgets_are_those_asked_for() {
    let cache = tempfile::tempdir().unwrap();
    let report = json(&mut moeflux(cache.path(), &["demo", "--prompt", "32", "--memory", "14MiB,64MiB"]));
    let memory: Vec<u64> =
        report["budgets"].as_array().unwrap().iter().map(|b| b["memory"].as_u64().unwrap()).collect();
    assert_eq!(memory, [14 << 20, 64 << 20]);
    assert!(refused(&["demo", "--memory", "1MiB"]).contains("at least"));
}

#[test]
fn a_shape_of_397_billion_parameters_is_planned() {
    let cache = tempfile::tempdir().unwrap();
    let arguments = ["synth:qwen3.5-397b-a17b", "--prompt", "8", "--context", "64", "--memory", "96GiB"];
    let report = json(&mut moeflux(cache.path(), &arguments));
    let parameters = report["parameters"].as_f64().unwrap();
    assert!((380e9..410e9).contains(&parameters), "{parameters}");
    let experts = report["needs"]["experts"].as_f64().unwrap();
    assert!((200e9..260e9).contains(&experts), "{experts}");
    assert_eq!(report["layers"], 60);
    assert_eq!(report["machine"]["disk"]["on_model"], false);
    assert!(report["recommendation"].as_str().unwrap().starts_with("recommended: "));
}

#[test]
fn a_configuration_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let write = |config: &Value| std::fs::write(&path, config.to_string()).unwrap();
    let name = path.to_str().unwrap();
    let mut config = Shape::by_name("tiny").unwrap().config();
    write(&config);
    let sized = |arguments: &[&str]| {
        let arguments = [&[name, "--prompt", "16", "--memory", "1GiB"], arguments].concat();
        let report = json(&mut moeflux(folder.path(), &arguments));
        (report["needs"]["experts"].as_u64().unwrap(), report["note"].as_str().unwrap().to_owned())
    };
    let (bf16, note) = sized(&[]);
    assert_eq!(note, "configuration only, as bf16");
    let (quarter, note) = sized(&["--bits", "4"]);
    assert_eq!(note, "configuration only, as 4bit (given)");
    // Four bits, and two halves for 64 weights.
    assert_eq!(quarter * 16 * 2, bf16 * 9);
    config["quantization"] = serde_json::json!({ "bits": 8, "group_size": 64 });
    write(&config);
    let (half, note) = sized(&[]);
    assert_eq!(note, "configuration only, as 8bit");
    assert_eq!(half * 16 * 2, bf16 * 17);
    assert!(refused(&[name, "--quant", "q9"]).contains("q4_k_m"));
    write(&serde_json::json!({ "model_type": "mamba" }));
    assert!(refused(&[name]).contains("qwen3_moe"));
}

#[test]
fn what_is_no_model_lists_the_choices() {
    let check = |arguments: &[&str], parts: &[&str]| {
        let message = refused(arguments);
        assert!(parts.iter().all(|part| message.contains(part)), "{arguments:?}: {message}");
    };
    check(&["qwen"], &["no such file", "org/name", "qwen3-30b-a3b"]);
    check(&["synth:qwen"], &["qwen3.5-397b-a17b", "got qwen"]);
    check(&["synth:tiny:q1"], &["q4_k_m", "got q1"]);
    check(&["demo", "--bits", "4"], &["--bits", "config.json"]);
    check(&["demo", "--prompt", "0"], &["--prompt"]);
    check(&["demo", "--skew=-1"], &["--skew"]);
    check(&["demo", "--trace", "/nowhere"], &["/nowhere"]);
}

#[test]
fn only_headers_come_from_the_hub() {
    let demo =
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf")).unwrap();
    let hub = Hub::start(vec![
        File::large("m-Q4_K_M.gguf", demo.clone()),
        File::large("m-Q8_0.gguf", demo.clone()),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let plan = |model: &str| {
        let mut command = moeflux(cache.path(), &[model, "--prompt", "16"]);
        command.env("HF_ENDPOINT", hub.endpoint());
        command
    };
    let report = json(&mut plan("org/model:Q4_K_M"));
    assert_eq!(report["note"], "headers only");
    assert_eq!(report["machine"]["disk"]["on_model"], false);
    let asked = hub.asked();
    assert!(asked.iter().all(|(name, _)| name == "m-Q4_K_M.gguf"), "{asked:?}");
    let mut end = 0;
    for (_, range) in &asked {
        let (from, to) = range.expect("ranges only");
        assert_eq!(from, end, "nothing is asked for twice: {asked:?}");
        end = to;
    }
    assert!(end < demo.len() / 2, "{end} of {}", demo.len());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "nothing is kept");
    let message =
        String::from_utf8(plan("org/model").assert().failure().get_output().stderr.clone()).unwrap();
    assert!(message.contains("has several models") && message.contains("m-Q8_0.gguf"), "{message}");
    let message = String::from_utf8(plan("org/none").assert().failure().get_output().stderr.clone()).unwrap();
    assert!(message.contains("org/none is not on the hub"), "{message}");
}

#[test]
fn safetensors_shards_of_the_hub_are_looked_at() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/mlx");
    let folder = std::fs::read_dir(fixture).unwrap().map(|e| e.unwrap().path()).find(|p| p.is_dir()).unwrap();
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let weights = read("model.safetensors");
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    // As if the file were larger than what is asked for at first.
    let padded = [&weights[..], &vec![0; 1 << 20]].concat();
    let padded = grown(&padded, header);
    let hub = Hub::start(vec![
        File::small("config.json", read("config.json")),
        File::large("model.safetensors", padded),
        File::small("tokenizer.json", b"{}".to_vec()),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let mut command = moeflux(cache.path(), &["org/model", "--prompt", "16"]);
    let report = json(command.env("HF_ENDPOINT", hub.endpoint()));
    assert_eq!(report["note"], "headers only");
    let mut asked = hub.asked();
    asked.sort();
    let config = ("config.json".to_owned(), Some((0, read("config.json").len())));
    assert_eq!(asked, [config, ("model.safetensors".to_owned(), Some((0, 64 << 10)))]);
}

/// A safetensors file with another tensor that takes what follows the others.
fn grown(file: &[u8], header: usize) -> Vec<u8> {
    let mut entries: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..header]).unwrap();
    let ends = entries.values().filter_map(|entry| entry["data_offsets"][1].as_u64());
    let (end, all) = (ends.max().unwrap(), (file.len() - header) as u64);
    let more = serde_json::json!({ "dtype": "U8", "shape": [all - end], "data_offsets": [end, all] });
    entries.insert("unused".to_owned(), more);
    let text = serde_json::to_vec(&entries).unwrap();
    [&(text.len() as u64).to_le_bytes()[..], &text, &file[header..]].concat()
}
