//! A `moeflux serve` of the demo, for one test.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use assert_cmd::cargo::CommandCargoExt;

pub struct Served {
    child: Child,
    pub address: String,
    /// Reads what it says after its address.
    log: Option<std::thread::JoinHandle<Vec<String>>>,
    _cache: tempfile::TempDir,
}

/// Starts a server on `port`, 0 for any, and waits until it listens.
pub fn serve(port: u16, arguments: &[&str]) -> Served {
    let (mut served, lines) = serve_unread(port, arguments);
    served.log = Some(std::thread::spawn(move || lines.map_while(Result::ok).collect()));
    served
}

/// The same, with the lines of its log for the caller to read.
pub fn serve_unread(port: u16, arguments: &[&str]) -> (Served, Lines<BufReader<ChildStderr>>) {
    let port = port.to_string();
    let (mut served, lines) = start(&[&["--port", &port], arguments].concat());
    served.address = served.address.strip_prefix("http://").unwrap().to_owned();
    (served, lines)
}

/// Starts a server that listens where `arguments` say; its address is what it prints, with the scheme.
#[allow(dead_code, reason = "not every binary with a server listens elsewhere")]
pub fn serve_elsewhere(arguments: &[&str]) -> Served {
    let (mut served, lines) = start(arguments);
    served.log = Some(std::thread::spawn(move || lines.map_while(Result::ok).collect()));
    served
}

fn start(arguments: &[&str]) -> (Served, Lines<BufReader<ChildStderr>>) {
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.env("XDG_CACHE_HOME", cache.path()).args(["serve", "demo", "--context", "512"]);
    let mut child = command.args(arguments).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| {
        let line = line.ok()?;
        let schemes = [" on http://", " on https://", " on unix:"];
        let at = schemes.iter().find_map(|scheme| line.find(scheme))?;
        Some(line[at + " on ".len()..].trim_end_matches(['"', '}']).to_owned())
    });
    let address = address.expect("it says where it listens");
    (Served { child, address, log: None, _cache: cache }, lines)
}

impl Served {
    /// The text of an answer.
    pub fn ask(&self, body: &serde_json::Value) -> String {
        let answer = self.post(&body.to_string());
        let json: serde_json::Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        json["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// What comes back for the body of a request.
    pub fn post(&self, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close";
        let kind = "Content-Type: application/json";
        write!(stream, "{head}\r\n{kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// The most memory that the server has had, in bytes, as Linux says, without code and other parts of files.
    #[allow(dead_code, reason = "not every binary with a server measures it")]
    pub fn peak_memory(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kib = |name: &str| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
        };
        1024 * (kib("VmHWM:") - kib("RssFile:"))
    }

    /// Ends it; gives what it said since it listens.
    #[allow(dead_code, reason = "not every binary with a server reads its log")]
    pub fn stop_and_read(mut self) -> Vec<String> {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        self.child.wait().unwrap();
        self.log.take().unwrap().join().unwrap()
    }

    /// Presses Ctrl-C two times, and waits for its end.
    #[allow(dead_code, reason = "not every binary with a server ends one so")]
    pub fn interrupt_twice(mut self) -> Option<i32> {
        for _ in 0..2 {
            let kill = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
            assert!(kill.success());
            // Two signals that are pending are one.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        self.child.wait().unwrap().code()
    }

    /// Asks it to end, and waits for that.
    pub fn terminate(mut self) -> Option<i32> {
        let kill = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(kill.success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Served {
    /// A test that fails leaves no server behind; one that has ended is past killing.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
