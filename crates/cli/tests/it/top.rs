//! `moeflux top` beside a server.

use std::process::Command;
use std::time::Duration;

use crate::support::server::serve;
use assert_cmd::cargo::CommandCargoExt;
use expectrl::{Eof, Expect, Session};

fn top(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.env_remove("MOEFLUX_API_KEY").env_remove("NO_COLOR").args(["top"]).args(arguments);
    command
}

/// What `top --once` with these arguments writes to standard output and error.
fn once(arguments: &[&str], key: Option<&str>) -> (bool, String, String) {
    let mut command = top(&[arguments, &["--once"]].concat());
    command.envs(key.map(|key| ("MOEFLUX_API_KEY", key)));
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn one_view_is_printed() {
    let served = serve(0, &[]);
    let request = serde_json::json!({
        "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0
    });
    assert_eq!(served.ask(&request), "17 + 25 = 42");
    let (done, out, err) = once(&[&served.address], None);
    assert!(done, "{err}");
    for part in [
        &*format!("moeflux  demo at http://{}", served.address),
        "tokens/s decode",
        "0 running of 8     0 waiting   1 done, 0 failed",
        "% since the start",
        "cached sessions",
        "7 MoE layers",
    ] {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
    assert!(!out.contains('\x1b') && out.lines().all(|line| line.chars().count() <= 100), "{out}");
    // Every layer has a row.
    for layer in 0..7 {
        assert!(
            out.lines().any(|line| line.trim_start_matches('│').starts_with(&format!("{layer:>3} "))),
            "{out}"
        );
    }
    served.terminate();
}

#[test]
fn several_models_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf");
    let others = ["other", "third"].map(|name| folder.path().join(name).with_extension("gguf"));
    for other in &others {
        std::fs::copy(&demo, other).unwrap();
    }
    let served = serve(0, &others.each_ref().map(|other| other.to_str().unwrap()));
    let request = serde_json::json!({
        "model": "other", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0
    });
    assert_eq!(served.ask(&request), "17 + 25 = 42");
    for (arguments, shown) in [(&[][..], "other"), (&["--model", "demo"], "demo")] {
        let (done, out, err) = once(&[arguments, &[&*served.address]].concat(), None);
        assert!(done && out.contains(&format!("moeflux  {shown} at")), "{out}{err}");
        assert!(out.contains("; models: demo loaded, other loaded, third unloaded"), "{out}");
    }
    let (done, _, err) = once(&["--model", "nothing", &served.address], None);
    assert!(!done && err.contains("there is no model \"nothing\""), "{err}");
    served.terminate();
}

#[test]
fn keys_and_servers_that_are_missing() {
    let served = serve(0, &["--api-key", "secret"]);
    let address = served.address.as_str();
    for (arguments, key) in [(&["--api-key", "secret", address][..], None), (&[address], Some("secret"))] {
        assert!(once(arguments, key).0);
    }
    for key in [None, Some("wrong")] {
        let (done, out, err) = once(&[address], key);
        assert!(!done && out.is_empty() && err.contains("wrong or missing API key"), "{err}");
    }
    let (_, _, err) = once(&[&format!("{address}/v1")], Some("secret"));
    assert!(err.contains("expected a moeflux server, got 404"), "{err}");
    let gone = served.address.clone();
    served.terminate();
    let (done, _, err) = once(&[&gone], None);
    assert!(!done && err.contains("no server at http://") && err.contains("moeflux serve"), "{err}");
    let (done, _, err) = once(&["http://[::1"], None);
    assert!(!done && err.contains("no server at"), "{err}");
    let output = top(&[&gone]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--once"));
}

#[test]
fn a_server_that_goes_away_comes_back() {
    let served = serve(0, &[]);
    let mut command = top(&[&served.address]);
    command.env("TERM", "xterm");
    let mut session = Session::spawn(command).unwrap();
    session.get_process_mut().set_window_size(160, 40).unwrap();
    session.set_expect_timeout(Some(Duration::from_secs(60)));
    // Only what has changed is drawn, which leaves out spaces.
    session.expect("layers").unwrap();
    let port = served.address.rsplit(':').next().unwrap().parse().unwrap();
    served.terminate();
    session.expect("trying").unwrap();
    // A name that has no letter in common with the other.
    let served = serve(port, &["--name", "QQQQQQQQQQQQ"]);
    session.expect("QQQQQQQQQQQQ").unwrap();
    session.send("q").unwrap();
    session.expect(Eof).unwrap();
    served.terminate();
}
