//! What the documentation says of the program is what the program says.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use assert_cmd::cargo::CommandCargoExt;

/// The demo model.
const DEMO: &[u8] = include_bytes!("../../../../models/demo/demo.gguf");

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

fn moeflux(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.current_dir(folder).env("XDG_CACHE_HOME", folder).args(arguments);
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_readme_lists_the_families() {
    let (_, table, _) = moeflux(Path::new("."), &["families"]);
    let readme = read("README.md");
    let is_row = |line: &&str| line.starts_with("| ") && line.matches('|').count() == 4;
    let (_, after) = readme.split_once("| family | `model_type`").expect("the table");
    let has: Vec<_> = after.lines().skip(1).take_while(is_row).skip(1).collect();
    let wants: Vec<_> = table.lines().skip(2).collect();
    let missing: Vec<_> = wants.iter().filter(|row| !has.contains(row)).collect();
    let stale: Vec<_> = has.iter().filter(|row| !wants.contains(row)).collect();
    assert!(
        has == wants,
        "README.md is not what `moeflux families` prints\nmissing: {missing:#?}\nstale: {stale:#?}"
    );
}

#[test]
fn every_page_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<String> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "packaging/README.md"].map(str::to_owned).into();
    for folder in ["docs", "docs/decisions", "bench/results"] {
        let names = std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.filter_map(|name| name.into_string().ok());
        pages.extend(names.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}/{name}")));
    }
    for page in &pages {
        let text = read(page);
        let folder = root.join(page);
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if !file.is_empty() && !file.contains("://") {
                assert!(folder.parent().unwrap().join(file).exists(), "{page} links to {link}");
            }
        }
    }
}

/// Whether `text` has the pieces of `pattern` between its ellipses, in order.
fn matches(pattern: &str, text: &str) -> bool {
    let mut rest = text;
    pattern.split('…').all(|piece| match rest.find(piece.trim()) {
        Some(at) => {
            rest = &rest[at + piece.trim().len()..];
            true
        }
        None => false,
    })
}

#[test]
fn the_page_of_errors_has_the_messages() {
    let page = read("docs/errors.md");
    let patterns: Vec<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split("` |").next()).collect();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let file = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    let altered = |name: &str, from: &str, to: &str| {
        let mut bytes = DEMO.to_vec();
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        file(name, &bytes);
    };
    file("text.gguf", b"This is no model, it is a text.");
    file("half.gguf", &DEMO[..DEMO.len() / 2]);
    file("note.session", b"This is no session, it is a text.");
    let key = "general.architecture\x08\0\0\0\x08\0\0\0\0\0\0\0";
    altered("other.gguf", &format!("{key}qwen3moe"), &format!("{key}qwen9moe"));
    altered("silent.gguf", "tokenizer.chat_template", "tokenizer.chat_templatz");
    std::fs::create_dir(folder.join("empty")).unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();

    let mut seen = vec![];
    let mut check = |arguments: &[&str]| {
        let (done, _, err) = moeflux(folder, arguments);
        let error = err.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or_default();
        let at = patterns.iter().position(|pattern| matches(pattern, error));
        assert!(!done && at.is_some(), "{arguments:?}: docs/errors.md has nothing for {err:?}");
        seen.extend(at);
    };
    check(&["run", "none.gguf", "Hello"]);
    check(&["run", "text.gguf", "Hello"]);
    check(&["run", "half.gguf", "Hello"]);
    check(&["run", "empty", "Hello"]);
    check(&["run", "other.gguf", "Hello"]);
    check(&["chat", "silent.gguf"]);
    check(&["run", "demo", "Hello", "--memory", "1MiB"]);
    check(&["run", "demo", "Hello, hello, hello", "--context", "4"]);
    check(&["run", "demo", "Hello", "--temperature", "-1"]);
    check(&["run", "demo", "Hello", "--session", "note.session"]);
    check(&["run", "demo", "Hello", "--session", "nowhere/file.session"]);
    check(&["run", "demo", "--temprature=0"]);
    check(&["serve", "demo", "--port", &port]);
    check(&["serve", "demo", "--host", "0.0.0.0"]);
    let tls = |cert, key| ["serve", "demo", "--tls-cert", cert, "--tls-key", key];
    for name in ["chain.pem", "key.pem", "other_key.pem"] {
        file(name, read(&format!("crates/server/tests/fixtures/tls/{name}")).as_bytes());
    }
    check(&tls("key.pem", "key.pem"));
    check(&tls("chain.pem", "chain.pem"));
    check(&tls("chain.pem", "other_key.pem"));
    let answered = UnixListener::bind(folder.join("socket")).unwrap();
    check(&["serve", "demo", "--unix-socket", "socket"]);
    check(&["serve", "demo", "--unix-socket", "text.gguf"]);
    drop(answered);
    drop(taken);
    check(&["top", "--once", &format!("127.0.0.1:{port}")]);
    let (_, devices, _) = moeflux(folder, &["devices", "--json"]);
    let with_gpu = !devices.contains("\"gpus\": []");
    if !with_gpu {
        check(&["run", "demo", "Hello", "--backend", "cuda"]);
    }
    let unseen = patterns.iter().enumerate().filter(|(at, _)| !seen.contains(at)).map(|(_, p)| p);
    let unseen: Vec<_> = unseen.filter(|p| !(with_gpu && p.contains("NVIDIA"))).collect();
    assert!(unseen.is_empty(), "docs/errors.md has what no command says: {unseen:#?}");
}
