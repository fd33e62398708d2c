//! What goes beside the binary in a package, and the scripts that make releases.

use std::path::Path;
use std::process::Command;

use assert_cmd::cargo::CommandCargoExt;

/// What `command` writes to standard output; it must succeed.
fn text(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn moeflux(arguments: &[&str]) -> String {
    text(Command::cargo_bin("moeflux").unwrap().args(arguments))
}

fn script(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name))
}

/// The names of all commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = moeflux(&["--help"]);
    let list = help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap();
    list.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[test]
fn every_command_is_completed_and_has_a_page() {
    let commands = commands();
    assert!(commands.len() > 12, "{commands:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = moeflux(&["completions", shell]);
        for name in commands.iter().map(String::as_str).chain(["--temperature"]) {
            assert!(script.contains(name.trim_start_matches('-')), "{shell} lacks {name}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    moeflux(&["man", pages.to_str().unwrap()]);
    let read = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    assert!(read("moeflux.1").contains(".TH moeflux 1"));
    for name in commands.iter().filter(|name| *name != "help") {
        assert!(read(&format!("moeflux-{name}.1")).contains(&format!("moeflux\\-{name}")), "{name}");
    }
}

#[test]
fn versions() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(moeflux(&["--version"]), format!("moeflux {version}\n"));
    assert_eq!(moeflux(&["-V"]), format!("moeflux {version}\n"));
    let verbose = moeflux(&["--version", "--verbose"]);
    for part in ["commit: ", "target: ", "profile: ", "built in: ", "cpu: ", " threads\n"] {
        assert!(verbose.contains(part), "{part} is not in {verbose}");
    }
    if cfg!(target_os = "linux") {
        assert!(verbose.contains("PTX for sm_80") && verbose.contains("cuda driver: "), "{verbose}");
    }
}

#[test]
fn release_notes_are_cut_from_the_changelog() {
    let notes = text(script("release_notes.sh").arg("Unreleased"));
    assert!(notes.starts_with("### ") && !notes.contains("\n## "), "{notes}");
    let missing = script("release_notes.sh").arg("99.0.0").output().unwrap();
    assert!(!missing.status.success());
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no section \"## 99.0.0\""));
}

#[test]
fn the_formula_is_filled() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("source.tar.gz");
    std::fs::write(&archive, "abc").unwrap();
    let url = "https://example.org/moeflux/moeflux/archive/v1.tar.gz";
    let formula = text(script("homebrew_formula.sh").arg(&archive).arg(url));
    assert!(!formula.contains('@'), "{formula}");
    for part in [
        "homepage \"https://example.org/moeflux/moeflux\"",
        "url \"https://example.org/moeflux/moeflux/archive/v1.tar.gz\"",
        &format!("version \"{}\"", env!("CARGO_PKG_VERSION")),
        "sha256 \"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"",
    ] {
        assert!(formula.contains(part), "{part} is not in {formula}");
    }
}
