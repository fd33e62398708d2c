//! What cannot be done ends with one clear message on standard error, nothing on standard output and a status that is
//! not zero.

use std::path::Path;
use std::time::Duration;

use assert_cmd::Command;

/// The demo model.
const DEMO: &[u8] = include_bytes!("../../../../models/demo/demo.gguf");

/// A folder for files of one test; also the cache that the demo is unpacked to.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    /// Writes a file and returns its path.
    fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).expect("a file");
        self.path(name)
    }

    /// Runs `moeflux` with `arguments`, which must fail with one error that has every one of `parts`.
    #[track_caller]
    fn check(&self, arguments: &[&str], parts: &[&str]) {
        let mut command = Command::cargo_bin("moeflux").expect("the binary");
        command.env("XDG_CACHE_HOME", self.0.path()).args(arguments).timeout(Duration::from_secs(300));
        let output = command.assert().failure().get_output().clone();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.stdout.is_empty(), "{arguments:?}: {:?}", String::from_utf8_lossy(&output.stdout));
        assert!(output.status.code().is_some(), "{arguments:?}: ended by a signal");
        assert_eq!(message.matches("error: ").count(), 1, "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
        for part in parts {
            assert!(message.contains(part), "{arguments:?}: {part:?} is not in {message:?}");
        }
    }
}

/// The demo with the bytes `from` replaced by as many others where they first occur.
fn demo_with(from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = DEMO.to_vec();
    let at = bytes.windows(from.len()).position(|window| window == from).expect("in the demo");
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn files_that_are_no_model() {
    let folder = Folder::new();
    let check = |model: &str, parts: &[&str]| {
        folder.check(&["run", model, "Hello"], parts);
        folder.check(&["logits", model, "--tokens", "1", "--out", &folder.path("l.safetensors")], parts);
        folder.check(&["bench", model], parts);
    };
    check(&folder.path("none.gguf"), &["none.gguf", "No such file"]);
    std::fs::create_dir(folder.path("empty")).unwrap();
    check(&folder.path("empty"), &["empty", "expected one model", "got 0 GGUF models"]);
    check(&folder.file("text.gguf", b"not a model at all, but long enough"), &["text.gguf", "magic", "GGUF"]);
    check(&folder.file("nothing.gguf", b""), &["nothing.gguf", "magic"]);
    check(
        &folder.file("half.gguf", &DEMO[..DEMO.len() / 2]),
        &["half.gguf", "tensor", "expected data within"],
    );
    check(&folder.file("header.gguf", &DEMO[..1000]), &["header.gguf", "expected", "got"]);
    check(&folder.file("v9.gguf", &demo_with(b"GGUF\x03", b"GGUF\x09")), &["v9.gguf", "version", "got 9"]);
    std::os::unix::fs::symlink("nowhere", folder.path("link.gguf")).unwrap();
    check(&folder.path("link.gguf"), &["link.gguf", "No such file"]);
    check("/dev/null", &["/dev/null", "a regular file"]);
    std::fs::create_dir(folder.path("cut")).unwrap();
    folder.file("cut/config.json", b"{\"model_type\": ");
    folder.file("cut/model.safetensors", b"");
    check(&folder.path("cut"), &["config.json", "JSON", "EOF"]);
}

#[test]
fn models_that_do_not_fit() {
    let folder = Folder::new();
    let key = |name: &str| {
        [
            b"general.architecture".as_slice(),
            &[8, 0, 0, 0],
            &(name.len() as u64).to_le_bytes(),
            name.as_bytes(),
        ]
        .concat()
    };
    let other = folder.file("other.gguf", &demo_with(&key("qwen3moe"), &key("qwen9moe")));
    folder.check(&["run", &other, "Hello"], &["other.gguf", "\"qwen9moe\" is not supported", "qwen3moe"]);
    let unnamed = demo_with(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight");
    let unnamed = folder.file("unnamed.gguf", &unnamed);
    folder.check(&["run", &unnamed, "Hello"], &["unnamed.gguf", "tensor blk.1.attn_q.weight is missing"]);
    let voiceless =
        folder.file("voiceless.gguf", &demo_with(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"));
    folder.check(&["run", &voiceless, "Hello"], &["voiceless.gguf", "tokenizer.ggml.tokens"]);
    // Not a number in every expert that is the last tensor.
    let mut spoiled = DEMO.to_vec();
    let start = spoiled.len() - 200_000;
    spoiled[start..].fill(0xff);
    let spoiled = folder.file("spoiled.gguf", &spoiled);
    folder.check(&["run", &spoiled, "Hello", "--temperature", "0"], &["spoiled.gguf", "NaN"]);
}

#[test]
fn options_that_cannot_be() {
    let folder = Folder::new();
    let run = |options: &[&str], parts: &[&str]| {
        folder.check(&[&["run", "demo", "Hello"], options].concat(), parts);
    };
    run(&["--memory", "1KiB"], &["too small", "at least"]);
    run(&["--memory", "0"], &["--memory"]);
    run(&["--memory", "lots"], &["--memory", "lots"]);
    run(&["--threads", "0"], &["--threads:", "got 0"]);
    run(&["--expert-cache", "0"], &["--expert-cache:", "got 0"]);
    run(&["--context", "0"], &["--context:", "got 0"]);
    run(&["--chunk", "0"], &["--chunk:", "got 0"]);
    run(&["--context", "2"], &["do not fit in the context of 2 tokens"]);
    run(&["--context", "99999999999999"], &["too small"]);
    run(&["--simd", "avx9000"], &["avx9000"]);
    run(&["--temperature", "-1"], &["--temperature:", "-1"]);
    run(&["--temperature", "nan"], &["--temperature:", "NaN"]);
    run(&["--top-p", "2"], &["--top-p:", "2"]);
    run(&["--min-p", "nan"], &["--min-p:", "NaN"]);
    run(&["--repetition-penalty", "0"], &["--repetition-penalty:", "0"]);
    run(&["--logit-bias", "99999999=1"], &["--logit-bias:", "99999999"]);
    run(&["--logit-bias", "one"], &["ID=BIAS", "one"]);
    run(&["--session", &folder.file("session", b"not a session")], &["session", "expected", "got"]);
    run(&["--no-such-option"], &["--no-such-option"]);
    folder.check(&["run"], &["MODEL"]);
    folder.check(&["walk"], &["walk"]);
}

#[test]
fn tokens_texts_and_traces_that_cannot_be() {
    let folder = Folder::new();
    let out = folder.path("logits.safetensors");
    let logits = |tokens: &str, out: &str, parts: &[&str]| {
        folder.check(&["logits", "demo", "--tokens", tokens, "--out", out], parts);
    };
    logits("1,99999999", &out, &["99999999", "position 1", "vocabulary"]);
    logits("1,-2", &out, &["--tokens", "-2"]);
    logits("", &out, &["--tokens"]);
    logits("1", &folder.path("none/logits.safetensors"), &["none"]);
    assert!(!Path::new(&out).exists());

    let perplexity = |text: &str, parts: &[&str]| folder.check(&["perplexity", "demo", text], parts);
    perplexity(&folder.path("none.txt"), &["none.txt", "No such file"]);
    perplexity(&folder.file("bytes.txt", &[0xff, 0xfe, 0]), &["bytes.txt", "UTF-8"]);
    perplexity(&folder.file("short.txt", b"A fox."), &["tokens"]);

    folder.check(&["replay", &folder.path("none.trace")], &["none.trace", "No such file"]);
    folder.check(&["replay", &folder.file("text.trace", b"no trace")], &["text.trace", "expected"]);
    folder.check(
        &["pack", &folder.path("none.gguf"), &folder.path("packed.gguf")],
        &["none.gguf", "No such file"],
    );
    folder.check(&["pack", "demo", &folder.path("none/packed.gguf")], &["none"]);
}
