//! `moeflux serve`, from the command line to its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use assert_cmd::cargo::CommandCargoExt;

struct Served {
    child: Child,
    address: String,
    _cache: tempfile::TempDir,
}

fn serve(arguments: &[&str]) -> Served {
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.env("XDG_CACHE_HOME", cache.path()).args(["serve", "demo", "--port", "0", "--context", "512"]);
    let mut child = command.args(arguments).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.find_map(|line| line.ok().filter(|line| line.contains(" on http://"))).unwrap();
    let address = line.split("http://").nth(1).unwrap().to_owned();
    // Whoever does not read stops the writer.
    std::thread::spawn(move || lines.for_each(drop));
    Served { child, address, _cache: cache }
}

impl Served {
    /// The text of an answer.
    fn ask(&self, body: &serde_json::Value) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let body = body.to_string();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close";
        let kind = "Content-Type: application/json";
        write!(stream, "{head}\r\n{kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let json: serde_json::Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        json["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// Asks it to end, and waits for that.
    fn terminate(mut self) -> Option<i32> {
        let kill = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(kill.success());
        self.child.wait().unwrap().code()
    }
}

#[test]
fn says_what_run_says_and_ends_in_order() {
    let prompt = "Tell me a short story about a fox.";
    let served = serve(&[]);
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
