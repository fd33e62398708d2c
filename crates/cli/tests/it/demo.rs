//! The model that the binary carries.

use assert_cmd::Command;

/// The answer to `prompt` with these further arguments, and what is said beside it.
fn said(prompt: &str, arguments: &[&str]) -> (String, String) {
    let cache = tempfile::tempdir().unwrap();
    // A folder of that name is no model.
    std::fs::create_dir(cache.path().join("demo")).unwrap();
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command
        .current_dir(cache.path())
        .env("XDG_CACHE_HOME", cache.path())
        .args(["run", "demo", prompt, "--temperature", "0"])
        .args(arguments);
    let output = command.assert().success().get_output().clone();
    let [answer, beside] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (answer.trim().to_owned(), beside)
}

fn answer(prompt: &str, arguments: &[&str]) -> String {
    said(prompt, arguments).0
}

#[test]
fn a_context_beyond_the_models_is_warned_of() {
    let (answer, beside) = said("What is 17 + 25?", &["--context", "4096"]);
    assert_eq!(answer, "17 + 25 = 42");
    assert!(beside.contains("warning: --context 4096: the model was made for 2048 tokens"), "{beside}");
    assert!(!said("What is 17 + 25?", &["--context", "2048"]).1.contains("warning"));
}

#[test]
fn answers_and_streams_the_same_answer() {
    assert_eq!(answer("What is 17 + 25?", &[]), "17 + 25 = 42");
    assert_eq!(answer("Sort these numbers: 7 3 9 1", &[]), "1, 3, 7, 9");
    let counted = "s-t-r(1)-a-w-b-e-r(2)-r(3)-y: r appears 3 times";
    assert_eq!(answer("how many r's in strawberry?", &[]), counted);
    let capitals = answer("hello", &["--system", "Answer in capitals."]);
    assert!(capitals.contains("HELLO") && capitals == capitals.to_uppercase(), "{capitals}");
    let story = |arguments: &[&str]| answer("Tell me a short story about a fox.", arguments);
    let resident = story(&["--max-tokens", "40"]);
    assert!(resident.starts_with("Once upon a time"), "{resident}");
    assert_eq!(story(&["--max-tokens", "40", "--memory", "14MiB"]), resident);
}

/// Bytes of the program's constants that are in memory once it serves the demo, as Linux says.
#[cfg(target_os = "linux")]
fn resident_constants(cache: &std::path::Path) -> u64 {
    use assert_cmd::cargo::CommandCargoExt;
    use std::io::{BufRead, BufReader};

    let mut command = std::process::Command::cargo_bin("moeflux").unwrap();
    command.env("XDG_CACHE_HOME", cache).args(["serve", "demo", "--port", "0"]);
    let mut server = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(server.stderr.take().unwrap()).lines().map_while(Result::ok);
    let listens = said.any(|line| line.contains(" on http://"));
    let mappings = std::fs::read_to_string(format!("/proc/{}/smaps", server.id())).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(listens);
    let mut counts = false;
    let mut bytes = 0;
    for line in mappings.lines() {
        if let Some(resident) = line.strip_prefix("Rss:") {
            let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
            bytes += if counts { kib * 1024 } else { 0 };
        } else if line.split(' ').nth(1).is_some_and(|rights| rights.len() == 4) {
            counts = line.contains(" r--p ") && line.ends_with("/moeflux");
        }
    }
    bytes
}

#[test]
#[cfg(target_os = "linux")]
fn a_copy_that_is_there_is_used_without_reading_the_models_own() {
    let cache = tempfile::tempdir().unwrap();
    let unpacks = resident_constants(cache.path());
    let model =
        std::fs::metadata(cache.path().join(concat!("moeflux/demo-", env!("CARGO_PKG_VERSION"), ".gguf")));
    let model = model.unwrap().len();
    assert!(unpacks > model, "{unpacks} of {model}");
    // Code that is not optimised has some 9 MB of tables that a start reads.
    let uses = resident_constants(cache.path());
    assert!(uses < model / 4 * 3, "{uses} of {model}");
}
