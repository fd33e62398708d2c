//! Notes the target and, where there is a repository, the commit that the binary is made from.

use std::path::Path;
use std::process::Command;

/// What git says in this folder.
fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// The commit, if the repository around this folder is this project's and not that of somebody who unpacked it there.
fn commit() -> Option<String> {
    let root = Path::new("../..").canonicalize().ok()?;
    let top = Path::new(&git(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()?;
    if top != root {
        return None;
    }
    // Every commit and every checkout adds a line here.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let commit = commit().unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=MOEFLUX_COMMIT={commit}");
    println!("cargo::rustc-env=MOEFLUX_TARGET={}", std::env::var("TARGET").unwrap_or_default());
}
