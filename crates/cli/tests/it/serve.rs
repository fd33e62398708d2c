//! `moeflux serve`, from the command line to its end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::support::server::{serve, serve_elsewhere, serve_unread};

#[test]
fn says_what_run_says_and_ends_in_order() {
    let prompt = "Tell me a short story about a fox.";
    let served = serve(0, &[]);
    for seed in [3, 4] {
        let cache = tempfile::tempdir().unwrap();
        let mut run = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        run.env("XDG_CACHE_HOME", cache.path()).args(["run", "demo", prompt, "--max-tokens", "40", "--seed"]);
        let output =
            run.arg(seed.to_string()).args(["--temperature", "1", "--top-p", "1"]).assert().success();
        let expected = String::from_utf8(output.get_output().stdout.clone()).unwrap();
        let request = serde_json::json!({
            "messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "seed": seed, "temperature": 1
        });
        assert_eq!(served.ask(&request), expected.trim_end_matches('\n'));
    }
    assert_eq!(served.terminate(), Some(0));
}

#[test]
fn an_open_server_without_a_key_is_refused() {
    let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
    let output = command.args(["serve", "demo", "--host", "0.0.0.0"]).assert().failure();
    let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(said.contains("--api-key"), "{said}");
}

#[test]
fn options_that_would_serve_nothing_are_refused() {
    for option in
        ["sequences", "queue", "max-sessions", "max-tokens", "max-body", "body-timeout", "connections"]
    {
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.args(["serve", "no-such-model", &format!("--{option}"), "0"]);
        let said = String::from_utf8(command.assert().failure().get_output().stderr.clone()).unwrap();
        assert_eq!(said, format!("error: --{option}: expected a positive number, got 0\n"));
    }
    for option in ["--name", "--alias"] {
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.args(["serve", "no-such-model", option, ""]);
        let said = String::from_utf8(command.assert().failure().get_output().stderr.clone()).unwrap();
        assert!(said.contains(option) && said.contains("value"), "{said}");
    }
}

/// Flag before environment before file, also among options that exclude each other.
#[test]
fn what_is_nearer_wins_over_what_it_excludes() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // A file without a key is an error if it is read; so is a model that is not there, later.
    let empty = file("keys", String::new());
    let by_file = file("serve.toml", format!("api-key-file = {empty:?}"));
    let check = |environment: &[(&str, &str)], arguments: &[&str], expected: &str| {
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.envs(environment.iter().copied()).args(["serve", "no-such-model"]).args(arguments);
        let said = String::from_utf8(command.assert().failure().get_output().stderr.clone()).unwrap();
        assert!(said.contains(expected), "{environment:?} {arguments:?}: {said}");
    };
    let (no_key, no_model) = ("there is no API key", "no-such-model");
    check(&[("MOEFLUX_API_KEY", "k")], &["--api-key-file", &empty], no_key);
    check(&[("MOEFLUX_API_KEY_FILE", &empty)], &["--api-key", "k"], no_model);
    check(&[("MOEFLUX_API_KEY", "k")], &["--config", &by_file], no_model);
    check(&[], &["--config", &by_file, "--api-key", "k"], no_model);
    check(&[("MOEFLUX_API_KEY_FILE", &empty)], &[], no_key);
    check(&[("MOEFLUX_SOCKET", "s")], &["--port", "0", "--api-key-file", &empty], no_key);
    let both = "cannot be used with";
    check(&[], &["--api-key", "k", "--api-key-file", &empty], both);
    check(&[("MOEFLUX_API_KEY", "k"), ("MOEFLUX_API_KEY_FILE", &empty)], &[], both);
}

#[test]
#[cfg(target_os = "linux")]
fn large_requests_stay_within_the_memory() {
    const MEMORY: u64 = 64 << 20;
    let served = serve(0, &["--memory", "64MiB"]);
    let words = "word ".repeat(200_000);
    let body = serde_json::json!({"messages": [{"role": "user", "content": words}]}).to_string();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let answer = served.post(&body);
                assert!(
                    answer.starts_with("HTTP/1.1 400") && answer.contains("context_length_exceeded"),
                    "{answer}"
                );
            });
        }
    });
    let peak = served.peak_memory();
    assert!(peak <= MEMORY, "{peak} bytes of {MEMORY}");
    let small =
        serde_json::json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0});
    assert_eq!(served.ask(&small), "17 + 25 = 42");
}

#[test]
fn every_request_has_a_line_with_its_name() {
    let served = serve(0, &["--log-format", "json"]);
    served.ask(
        &serde_json::json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}),
    );
    served.post("{");
    let lines = served.stop_and_read();
    let lines: Vec<serde_json::Value> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let requests: Vec<_> = lines.iter().filter(|line| line["message"] == "request").collect();
    assert_eq!(requests.len(), 2, "{lines:?}");
    assert_eq!((&requests[0]["status"], &requests[1]["status"]), (&200.into(), &400.into()));
    assert!(requests[0]["generated_tokens"].as_u64().is_some_and(|count| count > 3), "{}", requests[0]);
    assert!(requests[1]["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{}", requests[1]);
    assert!(requests.iter().all(|line| line["level"] == "INFO" && line["id"].is_string()), "{requests:?}");
}

#[test]
fn a_log_that_nobody_reads_stops_no_request() {
    // A pipe holds 64 KiB, the lines of some 500 requests.
    let (served, _unread) = serve_unread(0, &["--log-format", "json"]);
    for _ in 0..1500 {
        assert!(served.post("{").starts_with("HTTP/1.1 400"));
    }
    assert_eq!(served.terminate(), Some(0));
}

#[test]
fn options_come_from_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serve.toml");
    let file = |text: &str| std::fs::write(&path, text).unwrap();
    let named = |served: &crate::support::server::Served| {
        let body = serde_json::json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        let answer = served.post(&body.to_string());
        answer.split("\"model\":\"").nth(1).and_then(|rest| rest.split('"').next()).map(str::to_owned)
    };
    let config = path.to_str().unwrap();
    file("name = \"of the file\"\nsequences = 2\nlog-level = \"off\"\nalias = [\"a\", \"b\"]\n");
    assert_eq!(named(&serve(0, &["--config", config])).as_deref(), Some("of the file"));
    assert_eq!(named(&serve(0, &["--config", config, "--name", "typed"])).as_deref(), Some("typed"));

    let refused = |text: &str, environment: &str| {
        file(text);
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.env("MOEFLUX_QUEUE", environment).args(["serve", "demo", "--config", config]);
        let output = command.assert().failure();
        String::from_utf8_lossy(&output.get_output().stderr).into_owned()
    };
    // The environment comes before the file: with the file's number it would start.
    for (text, environment, part) in [
        ("queue = 3", "0", "--queue"),
        ("prot = 1", "3", "\"prot\" is not an option of serve"),
        ("no-key = 1", "3", "no-key: expected true or false, got integer"),
        ("port = [1, 2]", "3", "port: expected a text or a number, got array"),
        ("port = 1 2", "3", "serve.toml is not TOML"),
        ("port = \"x\"", "3", "--port"),
        ("", "many", "--queue"),
    ] {
        let said = refused(text, environment);
        assert!(said.contains(part), "{text}: {said}");
    }
}

/// The demo model under other names, in a folder.
fn copies(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        std::fs::copy(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/demo.gguf"),
            folder.path().join(name),
        )
        .unwrap();
    }
    folder
}

#[test]
fn a_folder_of_models_is_served_beside_another() {
    let folder = copies(&["first.gguf", "second-00001-of-00001.gguf"]);
    std::fs::write(folder.path().join("notes.gguf"), "no model").unwrap();
    let path = folder.path().to_str().unwrap();
    let served = serve(0, &[path, "--alias", "quick=second", "--pin", "first", "--memory", "64MiB"]);
    let ask = |model: &str| {
        let question = serde_json::json!([{"role": "user", "content": "What is 17 + 25?"}]);
        served.ask(&serde_json::json!({"model": model, "messages": question, "temperature": 0}))
    };
    for model in ["demo", "first", "quick", "demo", "second"] {
        assert_eq!(ask(model), "17 + 25 = 42", "{model}");
    }
    let unknown = served.post(r#"{"model": "notes", "messages": [{"role": "user", "content": "Hi"}]}"#);
    assert!(unknown.starts_with("HTTP/1.1 404") && unknown.contains("first"), "{unknown}");
    let said = served.stop_and_read();
    let loads =
        |model: &str| said.iter().filter(|line| line.contains(&format!(" loaded model=\"{model}\""))).count();
    assert!(
        loads("second") > 0 && loads("first") == 0,
        "the pinned one is loaded before the server listens: {said:?}"
    );
    // How much of its memory goes to what, whenever one is loaded.
    for model in ["demo", "second"] {
        let divided = |line: &&String| {
            line.starts_with(&format!("{model}: "))
                && ["experts", "trunk", "context"].iter().all(|what| line.contains(what))
        };
        assert_eq!(said.iter().filter(divided).count(), loads(model), "{model}: {said:?}");
    }
}

#[test]
fn several_models_are_checked_at_the_start() {
    let folder = copies(&["demo.gguf", "other.gguf"]);
    let other = folder.path().join("other.gguf");
    let (path, other) = (folder.path().to_str().unwrap(), other.to_str().unwrap());
    for (arguments, expected) in [
        (vec!["demo", path], "both are called \"demo\""),
        (vec!["demo", other, "--pin", "nothing"], "--pin nothing: there is no model \"nothing\""),
        (vec!["demo", other, "--alias", "x=nothing"], "there is no model \"nothing\""),
        (vec!["demo", other, "--name", "x"], "--name: expected a single model, got 2"),
        (vec!["demo", other, "--mirror", other], "--mirror: expected a single model, got 2"),
        (vec!["demo", other, "--kv-events", "tcp://*:0"], "--kv-events: expected a single model, got 2"),
        (vec!["demo", other, "--memory", "14MiB"], "needs at least"),
        (vec!["demo", "/nowhere.gguf"], "/nowhere.gguf"),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.env("XDG_CACHE_HOME", cache.path()).args(["serve", "--port", "0"]).args(&arguments);
        let output = command.timeout(std::time::Duration::from_secs(60)).assert().failure();
        let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}

#[test]
fn a_unix_socket_takes_any_host_and_no_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let config = folder.path().join("serve.toml");
    std::fs::write(&config, format!("unix-socket = {:?}\n", path.to_str().unwrap())).unwrap();
    let served = serve_elsewhere(&["--config", config.to_str().unwrap()]);
    assert_eq!(served.address, format!("unix:{}", path.display()));
    let mut stream = UnixStream::connect(&path).unwrap();
    let body = r#"{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}"#;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: model.example\r\nConnection: close";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("17 + 25 = 42"), "{answer}");
    assert_eq!(served.terminate(), Some(0));
    assert!(!path.exists());
}

#[test]
fn a_second_signal_aborts_answers_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let served =
        serve_elsewhere(&["--unix-socket", path.to_str().unwrap(), "--drain", "600", "--threads", "1"]);
    let mut stream = UnixStream::connect(&path).unwrap();
    let body = serde_json::json!({
        "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
        "stream": true, "ignore_eos": true, "max_tokens": 480, "n": 8,
    });
    let (head, body) =
        ("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close", body.to_string());
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut begun = [0; 1000];
    stream.read_exact(&mut begun).unwrap();
    let reader = std::thread::spawn(move || {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).map(|_| rest)
    });
    assert_eq!(served.interrupt_twice(), Some(130));
    let rest = reader.join().unwrap().unwrap();
    assert!(rest.contains("\"error\"") && rest.contains("shutting down"), "{rest}");
    assert!(!path.exists());
}

#[test]
fn tls_for_a_client_that_checks_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/tests/fixtures/tls");
    let fixture = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let files = ["--tls-cert", &fixture("chain.pem"), "--tls-key", &fixture("key.pem")];
    let served = serve_elsewhere(&[&files[..], &["--port", "0"]].concat());
    let root = ureq::tls::Certificate::from_pem(&std::fs::read(fixture("root.pem")).unwrap()).unwrap();
    let health = |roots| {
        let tls = ureq::tls::TlsConfig::builder().root_certs(roots).build();
        let agent: ureq::Agent = ureq::Agent::config_builder().tls_config(tls).build().into();
        agent.get(format!("{}/health", served.address)).call().map(|answer| answer.status().as_u16())
    };
    assert!(served.address.starts_with("https://127.0.0.1:"), "{}", served.address);
    assert_eq!(health(ureq::tls::RootCerts::new_with_certs(&[root])).unwrap(), 200);
    assert!(health(ureq::tls::RootCerts::WebPki).is_err());
    assert_eq!(served.terminate(), Some(0));
}

#[test]
fn where_it_listens_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("words");
    std::fs::write(&path, "no key").unwrap();
    let words = path.to_str().unwrap();
    let listens = |arguments: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.env("XDG_CACHE_HOME", folder.path()).args(["serve", "demo"]).args(arguments);
        String::from_utf8_lossy(&command.assert().failure().get_output().stderr).into_owned()
    };
    for (arguments, part) in [
        (&["--unix-socket", "s", "--port", "1"][..], "cannot be used with '--port <PORT>'"),
        (&["--unix-socket", "s", "--host", "::1"], "cannot be used with '--host <ADDRESS>'"),
        (&["--unix-socket", "s", "--tls-cert", "c", "--tls-key", "k"], "cannot be used with"),
        (&["--tls-cert", "c"], "--tls-key <FILE>"),
        (&["--tls-key", "k"], "--tls-cert <FILE>"),
        (&["--tls-cert", words, "--tls-key", words], "words: expected a certificate in PEM, got no section"),
        (&["--unix-socket", words], "words: expected a socket or no file, got a regular file"),
    ] {
        let said = listens(arguments);
        assert!(said.contains(part), "{arguments:?}: {said}");
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "no key");
}

#[test]
fn events_of_the_cache_are_published_if_asked_for() {
    let served = serve(0, &["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]);
    let question =
        serde_json::json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0});
    assert_eq!(served.ask(&question), "17 + 25 = 42");
    assert_eq!(served.terminate(), Some(0));
    let refused = |arguments: &[&str], expected: &str| {
        let mut command = assert_cmd::Command::cargo_bin("moeflux").unwrap();
        command.args(["serve", "demo", "--port", "0"]).args(arguments);
        let said = String::from_utf8(command.assert().failure().get_output().stderr.clone()).unwrap();
        assert!(said.contains(expected), "{arguments:?}: {said}");
    };
    refused(&["--kv-events", "ipc:///x"], "--kv-events: ipc:///x: expected an address such as tcp://*:5557");
    refused(&["--kv-events-replay", "tcp://*:0"], "--kv-events <ENDPOINT>");
    refused(&["--kv-events", "tcp://*:0", "--kv-events-format", "list"], "expected map or array");
}
