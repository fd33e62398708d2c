//! What goes beside the binary in a package, and the scripts that make releases and check changes.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
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

fn in_repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

fn script(name: &str) -> Command {
    Command::new(in_repository("packaging").join(name))
}

/// Programs that do nothing but end with a status, by name.
fn programs(of: &[(&str, i32)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, status) in of {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\nexit {status}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
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

#[test]
fn the_licences_of_the_pages_libraries_are_told() {
    let written = text(&mut script("copyright.sh"));
    let plain = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim().to_owned());
        lines.filter(|line| !line.is_empty() && line != ".").collect()
    };
    let written = plain(&written);
    let vendored = in_repository("crates/server/src/page/vendor");
    let scripts: Vec<PathBuf> = std::fs::read_dir(vendored)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "js"))
        .collect();
    assert!(scripts.len() >= 3, "{scripts:?}");
    let texts = scripts.iter().map(|script| script.with_extension("LICENSE"));
    for path in texts.chain([in_repository("LICENSE-MIT")]) {
        let licence = plain(&std::fs::read_to_string(&path).unwrap());
        assert!(written.windows(licence.len()).any(|part| part == licence), "{}", path.display());
    }
    for builder in ["packaging/build_deb.sh", "crates/cli/Cargo.toml", "packaging/Dockerfile"] {
        let builder = std::fs::read_to_string(in_repository(builder)).unwrap();
        assert!(builder.contains("copyright"), "{builder}");
    }
}

#[test]
fn the_service_has_its_files() {
    let read = |name: &str| std::fs::read_to_string(in_repository(name)).unwrap();
    for builder in ["packaging/build_deb.sh", "crates/cli/Cargo.toml"] {
        for file in ["packaging/moeflux.service", "packaging/serve.toml", "/etc/moeflux/serve.toml"] {
            assert!(read(builder).contains(file), "{builder} lacks {file}");
        }
    }
    assert!(read("packaging/moeflux.service").contains("moeflux serve --config /etc/moeflux/serve.toml\n"));

    // With all that it proposes, only the certificate is missing.
    let example = read("packaging/serve.toml");
    let proposed =
        |line: &str| line.strip_prefix("# ").filter(|line| line.contains(" = ")).map(str::to_owned);
    let lines: Vec<_> =
        example.lines().map(|line| proposed(line).unwrap_or_else(|| line.to_owned())).collect();
    assert!(lines.iter().any(|line| line.starts_with("tls-key = ")), "{lines:?}");
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("serve.toml");
    std::fs::write(&config, lines.join("\n")).unwrap();
    let mut serve = Command::cargo_bin("moeflux").unwrap();
    let output = serve.args(["serve", "--api-key", "k", "--config"]).arg(&config).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cannot read /run/credentials/moeflux.service/cert.pem"), "{said}");
}

/// Whether `.ci/run` succeeds, and what it says, where the Python, the Rust targets and the packages that its checks need are
/// missing; `online` if they could be had.
fn checks(ci: bool, online: bool) -> (bool, String) {
    let offline = i32::from(!online);
    let missing = ["python3", "rustup", "apt-get", "qemu-aarch64", "npm"].map(|name| (name, 1));
    let programs = programs(&[&missing[..], &[("cargo", 0), ("curl", offline)]].concat());
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
    let mut run = Command::new(in_repository(".ci/run"));
    let output = run.env("PATH", path).env("CI", ci.to_string()).output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn skipped_checks_are_listed_and_fail_where_they_could_run() {
    let ran = "ran      format\nran      clippy\nran      tests\n";
    for (ci, online) in [(false, true), (false, false), (true, false)] {
        let (passes, said) = checks(ci, online);
        let summary = said.split("== summary\n").nth(1).unwrap_or_else(|| panic!("no summary: {said}"));
        assert!(passes && summary.starts_with(ran), "{said}");
        for skipped in
            ["official clients", "page in Chromium", "types on macOS", "NEON under qemu", "kernels by"]
        {
            assert!(summary.contains(&format!("skipped  {skipped}")), "{skipped}: {said}");
        }
    }
    // The first of those that come one after the other, and the first of those beside them.
    let (passes, said) = checks(true, true);
    let mut failed: Vec<_> = said.split("== summary\n").nth(1).unwrap_or_default().lines().skip(3).collect();
    failed.sort_unstable();
    assert!(!passes && said.contains(&format!("== summary\n{ran}")), "{said}");
    assert_eq!(failed, ["failed   Python package", "failed   official clients"], "{said}");
}

#[test]
fn tests_that_fail_on_the_gpu_are_a_failure() {
    let programs = programs(&[("passing", 0), ("failing", 101)]);
    let run = |tests: &[&str]| {
        let (work, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut run = Command::new(in_repository("bench/cuda.sh"));
        run.args(["-p", "operations", "-w"]).arg(work.path());
        tests.iter().for_each(|test| {
            run.arg("-t").arg(programs.path().join(test));
        });
        let output = run.arg(out.path()).arg("moeflux").output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (passes, said) = run(&["passing"]);
    assert!(passes && said.contains("passing: fine"), "{said}");
    for tests in [&["passing", "failing"][..], &[]] {
        let (passes, said) = run(tests);
        assert!(!passes && said.contains("something is BAD"), "{said}");
    }
}
